"""A pool's replicas, divided among its task groups by their parts of its traffic.

Theory of operation. Requests are counted by group with decay, the pool's own as one group more. Every ``REVIEW``
requests each group's number of replicas is looked at again (``core/traffic``). A group with hardly any traffic has none
of its own: it is a guest at the first replica of its home order, whoever has that. A group's set is made of configured,
active replicas; for one that is down or excluded the next of the group's home order that is not stands in, only as long
as that lasts, so nobody else's set moves. Hence no group is ever without a replica while any is up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from xxhash import xxh3_64_intdigest

from routing.core.group_replicas import GroupReplicas
from routing.core.homes.shared_rings import shared_ring
from routing.core.loads.candidates import Candidates
from routing.core.prompt.prefix import PrefixHasher
from routing.core.traffic.apportionment import FEW, divided, stepped, trimmed
from routing.core.traffic.shares import Shares
from routing.core.types import ReplicaId, TargetId
from routing.schema import AutoReplicas, PoolConfig, ReplicaState

REVIEW: Final = 64  # requests between two looks at sizes; as many count at the start as if all groups sent alike
OWN: Final = ""  # the pool's own requests
_UNBOUND: Final = AutoReplicas()


class GroupShares:
    """Which replicas each group of one pool uses, of those groups that have ``auto_replicas``, and the pool's own."""

    def __init__(self, pool: PoolConfig, hasher: PrefixHasher) -> None:
        bounds = {OWN: _UNBOUND} | {it.name: it.auto_replicas for it in pool.groups if it.auto_replicas}
        self._bounds = dict(sorted(bounds.items()))  # the order of turns, whatever the configuration's
        active = [replica for replica in pool.replicas if replica.state is ReplicaState.ACTIVE]
        self._weights = {ReplicaId(replica.name): replica.capacity for replica in active}
        ring = shared_ring(self._weights).ring
        self._home_orders = {name: list(ring.walk(hasher.group(pool.name, name))) for name in self._bounds}
        self._owners = Counter(ReplicaId(name) for group in pool.groups for name in group.replicas or ())
        self._shares = Shares(pool.share_half_life)
        self._requests = 0
        self._sizes: dict[str, int] = {}  # as each asks for them; 0 of a guest
        self._given: dict[str, int] = {}  # as they fit
        self._sets: dict[str, Sequence[ReplicaId]] = {}
        self._kept: dict[tuple[str, str], tuple[Candidates, Candidates]] = {}  # by group and adapter, with whole
        for _ in range(-(-REVIEW // len(self._bounds))):
            for name in self._bounds:
                self._shares.count(_key(name))
        self._review()

    def count(self, group: str) -> None:
        """Count a request of a group, whether it has ``auto_replicas`` or not, or of the pool's own."""
        self._shares.count(_key(group))
        self._requests += 1
        if not self._requests % REVIEW:
            self._review()

    def share(self, group: str) -> float:
        """A group's part of the pool's requests, 0 to 1."""
        return self._shares.share(_key(group))

    def replicas(self, group: str) -> Sequence[ReplicaId]:
        """A group's set, the first one that it would keep first."""
        return self._sets[group]

    def carry_over(self, before: GroupShares) -> None:
        """Go on from the traffic and the sizes that were known under the configuration before."""
        self._shares.carry_over(before._shares)
        self._sizes = {name: before._sizes[name] for name in self._bounds if name in before._sizes}
        self._review()

    def candidates(self, group: str, replicas: GroupReplicas, whole: Candidates, adapter: str = "") -> Candidates:
        """Those of a pool's candidates that a group may use now; at least one, if there is any."""
        kept = self._kept.get((group, adapter))
        if kept is None or kept[0] is not whole:
            kept = self._kept[group, adapter] = whole, whole.only(self._chosen(group, replicas, whole))
        return kept[1]

    def untried(self, group: str, replicas: GroupReplicas, rest: Candidates, whole: Candidates) -> Candidates:
        """The same where some of ``whole`` refused the request and ``rest`` are left."""
        return rest.only(self._chosen(group, replicas, rest), whole)

    def _chosen(self, group: str, replicas: GroupReplicas, candidates: Candidates) -> list[TargetId]:
        """The group's set among candidates, and the next in its order for each one missing."""
        own = self._sets[group]
        there = replicas.present(own, candidates)
        missing = len(own) - len(there)
        if missing:
            others = (name for name in self._home_orders[group] if name not in own)
            there += replicas.present(others, candidates, missing)
        return [target for targets in there for target in targets]

    def _review(self) -> None:
        """Divide anew, if anybody's number has changed."""
        replicas = len(self._weights)
        self._sizes = {name: self._size(name, replicas) for name in self._bounds}
        floors = {name: bounds.reserved for name, bounds in self._bounds.items()}
        given = trimmed(self._sizes, floors, replicas)
        if given == self._given:
            return
        self._given = given
        sets = divided(given, self._home_orders, self._weights, self._owners) if replicas else {}
        self._sets = {name: sets.get(name) or order[:1] for name, order in self._home_orders.items()}
        self._kept = {}

    def _size(self, name: str, replicas: int) -> int:
        """How many replicas a group asks for: by its share, within its bounds; 0 for hardly any traffic."""
        before, bounds = self._sizes.get(name, 0), self._bounds[name]
        wanted = self.share(name) * replicas
        size = stepped(before, wanted) if wanted >= (FEW / 2 if before else FEW) else 0
        return max(bounds.reserved, size if bounds.max is None else min(size, bounds.max))


def _key(group: str) -> int:
    return xxh3_64_intdigest(group.encode())
