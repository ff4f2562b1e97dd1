"""Hit rate as a function of cache size: of one replica, of N replicas as placed, and of one shared cache.

Theory of operation. An LRU cache contains exactly the most recently used blocks, so a block is a hit in every cache
that can store the distinct blocks used since its last use, itself included: its reuse distance (Mattson et al., 1970).
One pass computes the distances for all cache sizes; a Fenwick tree over the times of last use counts later uses. Blocks
are sampled by hash, so distances are divided by the sampling ratio (SHARDS). The blocks of a prompt are used tail
first, so distances increase along a prompt.

The working set is a quantile of the same distances: the distinct blocks used between two uses of a prefix, for
``WORKING_SET_SHARE`` of the reused tokens. A cache of that size has them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

INITIAL_SIZE = 1024
WORKING_SET_SHARE = 0.9  # of the reused tokens
MIN_REUSED_REQUESTS = 20  # for a working set
MULTIPLES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # of the replicas' actual cache size


class Fenwick:
    """Prefix sums over positions from 1 on."""

    __slots__ = ("_tree", "total")

    def __init__(self, size: int) -> None:
        self._tree = [0] * (size + 1)
        self.total = 0

    def add(self, position: int, value: int) -> None:
        tree, size = self._tree, len(self._tree)
        self.total += value
        while position < size:
            tree[position] += value
            position += position & -position

    def up_to(self, position: int) -> int:
        """Sum of the values up to this position, inclusive."""
        tree, total = self._tree, 0
        while position:
            total += tree[position]
            position &= position - 1
        return total


class ReuseDistances:
    """Histogram of reuse distances, in tokens."""

    def __init__(self) -> None:
        self._times: dict[int, int] = {}  # of a block's last use
        self._tree = Fenwick(INITIAL_SIZE)
        self._size = INITIAL_SIZE
        self._now = 0
        self.tokens: dict[int, float] = defaultdict(float)  # by distance in sampled blocks
        self.reused_requests = 0  # counted requests with a block that was used before

    def __len__(self) -> int:
        return len(self._times)

    def use(self, chain: Sequence[int], gains: Sequence[float] | None, base: float = 0.0) -> None:
        """Use the blocks of a prompt. ``gains``: tokens that each block adds to a hit; None: not counted.

        ``base``: expected cached tokens of a prompt without a cached sampled block.
        """
        times = self._times
        if gains is not None:
            self.tokens[0] += base
            total = self._tree.total
            self.reused_requests += bool(chain) and chain[0] in times
            for block, tokens in zip(chain, gains, strict=True):
                last_use = times.get(block)
                if last_use is None:
                    break
                self.tokens[total - self._tree.up_to(last_use - 1)] += tokens
        for block in reversed(chain):
            self._touch(block)

    def hits(self, capacity: float) -> float:
        """Cached tokens with a cache of ``capacity`` sampled blocks."""
        return sum(tokens for distance, tokens in self.tokens.items() if distance <= capacity)

    def quantile(self, share: float) -> int:
        """Distance that ``share`` (0 to 1) of the reused tokens do not exceed; 0 without reuse."""
        distances = sorted(distance for distance in self.tokens if distance)
        rest = share * sum(self.tokens[distance] for distance in distances)
        for distance in distances:
            rest -= self.tokens[distance]
            if rest <= 0:
                return distance
        return distances[-1] if distances else 0

    def _touch(self, block: int) -> None:
        if self._now == self._size:
            self._compact()
        self._now += 1
        last_use = self._times.get(block)
        if last_use is not None:
            self._tree.add(last_use, -1)
        self._times[block] = self._now
        self._tree.add(self._now, 1)

    def _compact(self) -> None:
        """Renumber the times of last use without gaps."""
        order = sorted(self._times, key=self._times.__getitem__)
        self._size = max(INITIAL_SIZE, 2 * len(order))
        self._tree, self._now = Fenwick(self._size), len(order)
        for time, block in enumerate(order, 1):
            self._times[block] = time
            self._tree.add(time, 1)


@dataclass(frozen=True, slots=True)
class CapacityPoint:
    """Hit rates (0 to 1) if each replica's cache were ``multiple`` times its size."""

    multiple: float
    one: float  # all traffic on one replica
    split: float  # a cache per replica, with the actual placement
    shared: float  # one cache of all replicas' size


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """Cache size that would have ``WORKING_SET_SHARE`` of the reused tokens, in tokens, with its 95 % interval."""

    tokens: float
    low: float
    high: float
    requests: int  # with reuse


class CapacityCurve:
    """Reuse distances of one pool's requests, over all replicas and by replica."""

    def __init__(self) -> None:
        self._all = ReuseDistances()
        self._by_replica: dict[str, ReuseDistances] = defaultdict(ReuseDistances)
        self.prompt_tokens = 0.0
        self.requests = 0

    def use(
        self,
        replica: str,
        chain: Sequence[int],
        gains: Sequence[float],
        prompt_tokens: float | None,
        base: float = 0.0,
    ) -> None:
        """Add a request. Without ``prompt_tokens`` it only warms the caches and is not counted."""
        counted = None if prompt_tokens is None else gains
        self._all.use(chain, counted, base)
        self._by_replica[replica].use(chain, counted, base)
        if prompt_tokens is not None:
            self.prompt_tokens += prompt_tokens
            self.requests += 1

    def points(self, capacities: Mapping[str, float]) -> list[CapacityPoint]:
        """Points at multiples of the replicas' capacities in sampled blocks; [] without traffic or capacities."""
        if not capacities or not self.prompt_tokens:
            return []
        mean = sum(capacities.values()) / len(capacities)
        return [
            CapacityPoint(
                multiple,
                self._all.hits(multiple * mean) / self.prompt_tokens,
                sum(
                    distances.hits(multiple * capacities.get(name, mean))
                    for name, distances in self._by_replica.items()
                )
                / self.prompt_tokens,
                self._all.hits(multiple * mean * len(capacities)) / self.prompt_tokens,
            )
            for multiple in MULTIPLES
        ]

    def working_set(self, tokens_per_block: float) -> WorkingSet | None:
        """The working set of all requests; ``tokens_per_block``: distinct tokens that a sampled block stands for.

        None below ``MIN_REUSED_REQUESTS``. The interval is that of a quantile of as many independent observations.
        """
        count = self._all.reused_requests
        if count < MIN_REUSED_REQUESTS:
            return None
        margin = 1.96 * sqrt(WORKING_SET_SHARE * (1 - WORKING_SET_SHARE) / count)
        shares = (WORKING_SET_SHARE, WORKING_SET_SHARE - margin, min(WORKING_SET_SHARE + margin, 1.0))
        tokens, low, high = (tokens_per_block * self._all.quantile(share) for share in shares)
        return WorkingSet(tokens, low, high, count)
