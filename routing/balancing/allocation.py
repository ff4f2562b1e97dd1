"""Shares of keys in the work, and the allocation of replicas to keys and task groups by their share.

Shares. Work is what requests leave to prefill: requests differ by a factor of 1,000 in it. Instead of reducing every
sum with every request, the weight of a request grows: after ``half_life`` requests it has doubled. A share is a key's
weight divided by the total. When weights become large, all are scaled down together. At most ``2 * MAX_KEYS`` keys are
counted; then only the ``MAX_KEYS`` greatest remain. A key with a share above 1 / ``MAX_KEYS`` is never dropped, and a
dropped key starts from zero.

Allocation. A share of the work needs the same share of the replicas. The number of replicas changes only if the
share is clearly above or below it, because every change leaves prefixes without cache. Each key has a ring order of the
replicas and in turn picks the first replica that the fewest others have picked, until it has enough. So the sets of
keys are disjoint as long as there are enough replicas. A number stands for that many replicas of mean weight: a key
that reaches the weight earlier stops, and a key that has the number but not the weight gets replicas without owner. A
key that grows picks one more, and one that shrinks loses its last pick; larger keys exchange a quarter of a replica on
average when all sizes change together. Everything follows from sizes and names, so routers with the same shares agree.

Group shares. A pool's work is counted by task group, and its own requests as one more group. Every
``REVIEW_REQUESTS`` requests the sizes are reviewed. A group with hardly any traffic has no replicas of its own: it
shares the first replica of its ring order with others. Sets consist of configured, active replicas. While one of them
is down or excluded, the next available replica in the group's ring order replaces it, and no other set changes. So no
group is without a replica while any is up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from heapq import nlargest
from itertools import filterfalse
from typing import Final, Generic, TypeVar

from xxhash import xxh3_64_intdigest

from routing.balancing.candidates import REQUEST_TOKENS, Candidates
from routing.balancing.replicas import GroupReplicas
from routing.balancing.shared_rings import shared_ring
from routing.prompt.hashing import PrefixHasher
from routing.schema import AutoReplicas, PoolConfig, ReplicaState
from routing.types import NameT, ReplicaId, TargetId

MAX_KEYS: Final = 256
_MAX_WEIGHT: Final = 1e100


class Shares:
    """Shares of keys in the work of recent requests."""

    __slots__ = ("_growth", "_total", "_weight", "_weights")

    def __init__(self, half_life: float) -> None:
        self._growth = 2.0 ** (1.0 / half_life)  # half_life in requests, > 0
        self._weight = 1.0  # of the next request
        self._total = 0.0
        self._weights: dict[int, float] = {}  # by key

    def __len__(self) -> int:
        return len(self._weights)

    def count(self, key: int, uncached_tokens: float) -> None:
        """Count one request, which leaves this many tokens to prefill."""
        weights, weight = self._weights, (REQUEST_TOKENS + uncached_tokens) * self._weight
        weights[key] = weights.get(key, 0.0) + weight
        self._total += weight
        self._weight *= self._growth
        if len(weights) > 2 * MAX_KEYS:
            self._weights = dict(nlargest(MAX_KEYS, weights.items(), key=lambda item: item[1]))
        if self._weight > _MAX_WEIGHT:
            unit, self._weight = self._weight, 1.0
            self._total /= unit
            self._weights = {key: weight / unit for key, weight in self._weights.items()}

    def carry_over(self, before: Shares) -> None:
        """Continue with the counts of ``before``, whose half-life may differ."""
        self._weights, self._total, self._weight = dict(before._weights), before._total, before._weight

    def share(self, key: int) -> float:
        """A key's share, 0 to 1; 0 if it is not counted, because it is unknown or rare."""
        return self._weights.get(key, 0.0) / self._total if self._total else 0.0

    def frequent_keys(self, min_share: float) -> list[tuple[int, float]]:
        """Keys with at least this share (0 to 1), and their shares, the largest first."""
        min_weight = max(min_share * self._total, self._total / MAX_KEYS)
        frequent = [(key, weight / self._total) for key, weight in self._weights.items() if weight >= min_weight]
        return sorted(frequent, key=lambda item: (-item[1], item[0]))


# Most of a fraction is rounded down: allocated keys get hits, while the remaining traffic needs most of the prefill.
GAIN_MARGIN: Final = 0.75  # replicas by which a share must exceed the current number for one more
LOSS_MARGIN: Final = 0.5  # replicas by which a share must fall below the current number for one less
MIN_SHARE: Final = 0.1  # in replicas' worth of work; a key with less needs no replica of its own

KeyT = TypeVar("KeyT", bound=Hashable)


def next_size(current: int, share: float) -> int:
    """Number of replicas for a ``share`` in replicas' worth of work, at least 1. ``current``: the number so far."""
    if current and current - LOSS_MARGIN <= share < current + GAIN_MARGIN:
        return current
    return max(1, int(share + 1 - GAIN_MARGIN))


def trim_sizes(sizes: Mapping[KeyT, int], floors: Mapping[KeyT, int], replicas: int) -> dict[KeyT, int]:
    """Reduce the largest sizes until their sum is at most ``replicas``; none below its floor, or to 0."""
    trimmed = dict(sizes)
    excess = sum(trimmed.values()) - replicas
    while excess > 0:
        largest = max(
            (key for key in trimmed if trimmed[key] > max(1, floors.get(key, 0))), key=trimmed.__getitem__, default=None
        )
        if largest is None:
            break
        trimmed[largest] -= 1
        excess -= 1
    return trimmed


def allocate(
    sizes: Mapping[KeyT, int],
    ring_orders: Mapping[KeyT, Sequence[NameT]],
    weights: Mapping[NameT, float],
    owners: Mapping[NameT, int],
) -> dict[KeyT, list[NameT]]:
    """The replicas of each key in the order of picking; sizes count replicas of mean weight. O(keys * replicas).

    ``owners`` counts existing owners of each replica; replicas with fewer owners are picked first.
    """
    mean_weight = sum(weights.values()) / max(1, len(weights))
    targets = {key: size * mean_weight * (1 - 1e-9) for key, size in sizes.items()}
    owner_counts = {replica: owners.get(replica, 0) for replica in weights}
    picks = {key: _Picks(ring_orders[key], owner_counts, weights) for key, size in sizes.items() if size}
    keys_to_serve = list(picks)
    while keys_to_serve:
        for key in keys_to_serve:
            picks[key].pick()
        keys_to_serve = [
            key
            for key in keys_to_serve
            if picks[key].weight < targets[key] and min(sizes[key], len(weights)) > len(picks[key].chosen)
        ]
    keys_to_serve = [key for key, picked in picks.items() if picked.weight < targets[key]]  # light replicas
    while keys_to_serve:
        keys_to_serve = [
            key for key in keys_to_serve if picks[key].pick(unowned=True) and picks[key].weight < targets[key]
        ]
    return {key: list(picked.chosen) for key, picked in picks.items()}


class _Picks(Generic[NameT]):
    """The replicas that one key has picked."""

    __slots__ = ("_max_owners", "_next_index", "_owner_counts", "_ring_order", "_weights", "chosen", "weight")

    def __init__(self, order: Sequence[NameT], owner_counts: dict[NameT, int], weights: Mapping[NameT, float]) -> None:
        self.chosen: dict[NameT, None] = {}  # in the order of picking
        self.weight = 0.0
        self._ring_order = order
        self._weights = weights
        self._owner_counts = owner_counts
        self._max_owners = 0  # owners of the replicas that are picked now; counts only grow, so no replica is revisited
        self._next_index = 0

    def pick(self, *, unowned: bool = False) -> bool:
        """Pick the first replica in ring order with the fewest owners; at least one replica must be left.

        ``unowned``: pick only a replica without owners; False if there is none.
        """
        while not (unowned and self._max_owners):
            while self._next_index < len(self._ring_order):
                replica = self._ring_order[self._next_index]
                self._next_index += 1
                if self._owner_counts[replica] <= self._max_owners and replica not in self.chosen:
                    self._owner_counts[replica] += 1
                    self.chosen[replica] = None
                    self.weight += self._weights[replica]
                    return True
            self._next_index, self._max_owners = 0, self._max_owners + 1
        return False


REVIEW_REQUESTS: Final = 64  # requests between two reviews; equal shares at the start count as this many requests
INITIAL_TOKENS: Final = 1000.0  # to prefill by each of those
NO_GROUP: Final = ""  # stands for the pool's own requests
_NO_BOUNDS: Final = AutoReplicas()


class GroupShares:
    """The replicas of each task group of a pool with ``auto_replicas``, and of the pool's own requests."""

    def __init__(self, pool: PoolConfig, hasher: PrefixHasher) -> None:
        bounds = {NO_GROUP: _NO_BOUNDS} | {
            group.name: group.auto_replicas for group in pool.groups if group.auto_replicas
        }
        self._bounds = dict(sorted(bounds.items()))  # sorted, so that the configuration's order does not matter
        active = [replica for replica in pool.replicas if replica.state is ReplicaState.ACTIVE]
        self._weights = {ReplicaId(replica.name): replica.capacity for replica in active}
        ring = shared_ring(self._weights).ring
        self._ring_orders = {name: list(ring.walk(hasher.group(pool.name, name))) for name in self._bounds}
        self._owners = Counter(ReplicaId(name) for group in pool.groups for name in group.replicas or ())
        self._shares = Shares(pool.share_half_life)
        self._requests = 0
        self._sizes: dict[str, int] = {}  # number of replicas by share; 0: the group shares a replica with others
        self._trimmed_sizes: dict[str, int] = {}  # reduced to the number of replicas
        self._replicas_by_group: dict[str, Sequence[ReplicaId]] = {}
        # candidates of the pool and of the group, by group and adapter
        self._cache: dict[tuple[str, str], tuple[Candidates, Candidates]] = {}
        for _ in range(-(-REVIEW_REQUESTS // len(self._bounds))):
            for name in self._bounds:
                self._shares.count(_key(name), INITIAL_TOKENS)
        self._review()

    def count(self, group: str, uncached_tokens: float) -> None:
        """Count a request of a group, with or without ``auto_replicas``, or of the pool's own."""
        self._shares.count(_key(group), uncached_tokens)
        self._requests += 1
        if not self._requests % REVIEW_REQUESTS:
            self._review()

    def share(self, group: str) -> float:
        """A group's share of the pool's work, 0 to 1."""
        return self._shares.share(_key(group))

    def replicas(self, group: str) -> Sequence[ReplicaId]:
        """A group's replicas, in the order of picking: a smaller number would keep the first ones."""
        return self._replicas_by_group[group]

    def carry_over(self, before: GroupShares) -> None:
        """Continue with the traffic and the sizes of the previous configuration."""
        self._shares.carry_over(before._shares)
        self._sizes = {name: before._sizes[name] for name in self._bounds if name in before._sizes}
        self._review()

    def candidates(
        self, group: str, replicas: GroupReplicas, pool_candidates: Candidates, adapter: str = ""
    ) -> Candidates:
        """The pool's candidates that a group may use now; at least one, if there is any."""
        cached = self._cache.get((group, adapter))
        if cached is None or cached[0] is not pool_candidates:
            group_candidates = pool_candidates.subset(self._targets(group, replicas, pool_candidates))
            cached = self._cache[group, adapter] = pool_candidates, group_candidates
        return cached[1]

    def untried_candidates(
        self, group: str, replicas: GroupReplicas, untried: Candidates, unfiltered: Candidates
    ) -> Candidates:
        """The candidates that a group may use for a retry.

        ``untried``: the pool's candidates without those at which the request failed; ``unfiltered``: the group's
        candidates including those.
        """
        return untried.subset(self._targets(group, replicas, untried), unfiltered)

    def _targets(self, group: str, replicas: GroupReplicas, candidates: Candidates) -> list[TargetId]:
        """The targets of a group's replicas among candidates, with replacements for missing replicas."""
        assigned = self._replicas_by_group[group]
        targets = replicas.eligible_targets(assigned, candidates)
        missing = len(assigned) - len(targets)
        if missing:
            replacements = filterfalse(assigned.__contains__, self._ring_orders[group])
            targets += replicas.eligible_targets(replacements, candidates, missing)
        return [target for replica_targets in targets for target in replica_targets]

    def _review(self) -> None:
        """Compute the sizes, and allocate the replicas again if a size has changed."""
        replicas = len(self._weights)
        self._sizes = {name: self._size(name, replicas) for name in self._bounds}
        floors = {name: bounds.reserved for name, bounds in self._bounds.items()}
        trimmed = trim_sizes(self._sizes, floors, replicas)
        if trimmed == self._trimmed_sizes:
            return
        self._trimmed_sizes = trimmed
        sets = allocate(trimmed, self._ring_orders, self._weights, self._owners) if replicas else {}
        self._replicas_by_group = {name: sets.get(name) or order[:1] for name, order in self._ring_orders.items()}
        self._cache = {}

    def _size(self, name: str, replicas: int) -> int:
        """Number of replicas for a group's share, within its bounds; 0 for hardly any work."""
        current, bounds = self._sizes.get(name, 0), self._bounds[name]
        share = self.share(name) * replicas
        size = next_size(current, share) if share >= (MIN_SHARE / 2 if current else MIN_SHARE) else 0
        return max(bounds.reserved, size if bounds.max is None else min(size, bounds.max))


def _key(group: str) -> int:
    return xxh3_64_intdigest(group.encode())
