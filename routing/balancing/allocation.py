"""Each key's share of the traffic, with old traffic counting less and less.

Theory of operation. Instead of shrinking every count with every request, the weight of a request grows: after
``half_life`` requests it is twice what it was, and a share is a key's weight over that of all. When weights become
large all are scaled down together. At most ``2 * KEPT`` keys are counted; then only the ``KEPT`` heaviest stay. A key
with a share above 1 / ``KEPT`` is never among those dropped, and one that was counts anew.

How many replicas each of several shares of the traffic gets, and which ones.

Theory of operation. How many: a share of all requests asks for as large a part of the replicas, and what it has
changes only where it asks for clearly more or less, because every change makes somebody cold. Which ones: everybody
has a home order, and in turn picks the first replica there that fewest others have picked, until it has as many as it
gets. So the replicas of one are disjoint from those of others as long as there are enough for all. A number stands for
as much of all weight: who has that sooner stops, and who has the number without it takes what nobody has. Who gets one
more picks it last, so its others stay; who gets one less loses what it picked last. Who has no more than that has
picked before and loses nothing to who grows; those who have more exchange a quarter of a replica on average, all
together. All follows from the numbers and the names alone, so routers that see the same shares agree.

A pool's replicas, divided among its task groups by their parts of its traffic.

Theory of operation. Requests are counted by group with decay, the pool's own as one group more. Every ``REVIEW``
requests each group's number of replicas is looked at again (``core/traffic``). A group with hardly any traffic has none
of its own: it is a guest at the first replica of its home order, whoever has that. A group's set is made of configured,
active replicas; for one that is down or excluded the next of the group's home order that is not stands in, only as long
as that lasts, so nobody else's set moves. Hence no group is ever without a replica while any is up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from heapq import nlargest
from typing import Final, Generic, TypeVar

from xxhash import xxh3_64_intdigest

from routing.balancing.candidates import Candidates
from routing.balancing.replicas import GroupReplicas
from routing.balancing.shared_rings import shared_ring
from routing.prompt.hashing import PrefixHasher
from routing.schema import AutoReplicas, PoolConfig, ReplicaState
from routing.types import NameT, ReplicaId, TargetId

KEPT: Final = 256
_LARGE: Final = 1e100


class Shares:
    """Shares of keys among the latest requests."""

    __slots__ = ("_growth", "_of_key", "_total", "_weight")

    def __init__(self, half_life: float) -> None:
        self._growth = 2.0 ** (1.0 / half_life)  # half_life in requests, > 0
        self._weight = 1.0  # of the next request
        self._total = 0.0
        self._of_key: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._of_key)

    def count(self, key: int) -> None:
        """Count one request."""
        counts = self._of_key
        counts[key] = counts.get(key, 0.0) + self._weight
        self._total += self._weight
        self._weight *= self._growth
        if len(counts) > 2 * KEPT:
            self._of_key = dict(nlargest(KEPT, counts.items(), key=lambda item: item[1]))
        if self._weight > _LARGE:
            self._scale_down()

    def carry_over(self, before: Shares) -> None:
        """Go on from what another counted, whatever its half-life."""
        self._of_key, self._total, self._weight = dict(before._of_key), before._total, before._weight

    def share(self, key: int) -> float:
        """A key's share, 0 to 1; 0 for one that is not counted, which may have come, but rarely."""
        return self._of_key.get(key, 0.0) / self._total if self._total else 0.0

    def above(self, ratio: float) -> list[tuple[int, float]]:
        """Keys with at least this share (0 to 1), and their shares, the largest first."""
        least = max(ratio * self._total, self._total / KEPT)
        heavy = [(key, weight / self._total) for key, weight in self._of_key.items() if weight >= least]
        return sorted(heavy, key=lambda item: (-item[1], item[0]))

    def _scale_down(self) -> None:
        unit, self._weight = self._weight, 1.0
        self._total /= unit
        self._of_key = {key: weight / unit for key, weight in self._of_key.items()}


# Most of a fraction is rounded off, for what is shared hits, and the others are most of the prefill.
GAIN: Final = 0.75  # replicas that a share must be above its number to gain one
LOSE: Final = 0.5  # replicas that it must be below its number to lose one
FEW: Final = 0.1  # replicas' worth of traffic below which nobody needs any of its own

K = TypeVar("K", bound=Hashable)


def stepped(before: int, wanted: float) -> int:
    """How many replicas who had so many (0 for none) gets when its share is ``wanted`` replicas' worth; 1 at least."""
    if before and before - LOSE <= wanted < before + GAIN:
        return before
    return max(1, int(wanted + 1 - GAIN))


def trimmed(sizes: Mapping[K, int], floors: Mapping[K, int], replicas: int) -> dict[K, int]:
    """The sizes, taken from the largest until all fit, but from nobody below its floor, or below 1 where it has any."""
    fitting = dict(sizes)
    excess = sum(fitting.values()) - replicas
    while excess > 0:
        largest = max(
            (key for key in fitting if fitting[key] > max(1, floors.get(key, 0))), key=fitting.__getitem__, default=None
        )
        if largest is None:
            break
        fitting[largest] -= 1
        excess -= 1
    return fitting


def divided(
    sizes: Mapping[K, int],
    home_orders: Mapping[K, Sequence[NameT]],
    weights: Mapping[NameT, float],
    owners: Mapping[NameT, int],
) -> dict[K, list[NameT]]:
    """Who gets which replicas, each in the order of picking; a size counts replicas of mean weight.

    ``owners`` counts who has a replica before anybody picks; those with fewer are picked first. O(keys * replicas).
    """
    mean = sum(weights.values()) / max(1, len(weights))
    enough = {key: size * mean * (1 - 1e-9) for key, size in sizes.items()}
    counts = {replica: owners.get(replica, 0) for replica in weights}
    picks = {key: _Picks(home_orders[key], counts, weights) for key, size in sizes.items() if size}
    hungry = list(picks)
    while hungry:
        for key in hungry:
            picks[key].pick()
        left = {key: min(sizes[key], len(weights)) - len(picks[key].chosen) for key in hungry}
        hungry = [key for key in hungry if picks[key].held < enough[key] and left[key]]
    hungry = [key for key, mine in picks.items() if mine.held < enough[key]]  # light ones; what nobody has is for them
    while hungry:
        hungry = [key for key in hungry if picks[key].pick(free=True) and picks[key].held < enough[key]]
    return {key: list(mine.chosen) for key, mine in picks.items()}


class _Picks(Generic[NameT]):
    """What one has picked."""

    __slots__ = ("_at", "_counts", "_level", "_order", "_weights", "chosen", "held")

    def __init__(self, order: Sequence[NameT], counts: dict[NameT, int], weights: Mapping[NameT, float]) -> None:
        self.chosen: dict[NameT, None] = {}  # in the order of picking
        self.held = 0.0  # weight
        self._order = order
        self._weights = weights
        self._counts = counts
        self._level = 0  # owners of what is looked for; they only become more, so nobody looks back
        self._at = 0

    def pick(self, *, free: bool = False) -> bool:
        """Take the first in order of those with the fewest owners that are not mine; there is one.

        ``free``: that nobody owns; whether there was one.
        """
        while not (free and self._level):
            while self._at < len(self._order):
                replica = self._order[self._at]
                self._at += 1
                if self._counts[replica] <= self._level and replica not in self.chosen:
                    self._counts[replica] += 1
                    self.chosen[replica] = None
                    self.held += self._weights[replica]
                    return True
            self._at, self._level = 0, self._level + 1
        return False


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
