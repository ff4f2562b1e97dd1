"""A histogram as Prometheus counts one.

Life of sampled KV blocks, as vLLM's ``--kv-cache-metrics`` observes it (``v1/core/kv_cache_metrics.py``).

A block is sampled when it is allocated. Its eviction is its next allocation, whether or not it cached anything.

A replica's KV blocks: which are held, which are cached, and which goes next.

Theory of operation, as vLLM's block pool does it. A physical block is *held* by one or more running requests
(reference count > 0) or *free*. A free block keeps what it cached until it is taken for something else: the free
queue is the LRU list, its head goes first. A request gives its blocks back tail first, so its tail is evicted before
its head; a block that caches nothing (not full yet) goes to the head of the queue. Blocks are cached under a key
that stands for the block and everything before it, so a lookup walks a prompt's keys until the first one missing.
The same key may lie in several physical blocks (a prompt of exactly four blocks recomputes the fourth): a lookup
finds the oldest, and the key is gone when the last of them is. Never-used blocks are taken before any cached one,
which is the order that vLLM's queue starts in.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise


class Histogram:
    """Counts by bucket. ``buckets[i]`` counts values <= ``edges[i]`` and above the edge before; the last is +Inf."""

    __slots__ = ("buckets", "count", "edges", "total")

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = tuple(float(edge) for edge in edges)
        self.buckets = [0] * (len(self.edges) + 1)
        self.count = 0
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value`` ``times`` times."""
        self.buckets[bisect_left(self.edges, value)] += times
        self.count += times
        self.total += value * times


RESIDENCY_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
    1200.0, 1800.0,
)  # fmt: skip
ACCESSES = 4  # newest ones of a block that are kept


@dataclass(slots=True)
class _Life:
    allocated_s: float
    accesses_s: deque[float] = field(default_factory=lambda: deque(maxlen=ACCESSES))


class BlockResidency:
    """Histograms of seconds, of a share ``sample_ratio`` of the blocks, above 0 and at most 1."""

    def __init__(self, sample_ratio: float, seed: int = 0) -> None:
        if not 0 < sample_ratio <= 1:
            raise ValueError(f"the sampled share of blocks is above 0 and at most 1, not {sample_ratio}")
        self.now_s = 0.0  # set by the engine at each step
        self.lifetime = Histogram(RESIDENCY_S)
        self.idle_before_evict = Histogram(RESIDENCY_S)
        self.reuse_gap = Histogram(RESIDENCY_S)
        self._sample_ratio = sample_ratio
        self._random = random.Random(seed)  # noqa: S311 - a sample, no secret
        self._lives: dict[int, _Life] = {}  # by block: at most one each

    def on_allocated(self, blocks: Iterable[int]) -> None:
        """Observe the end of what was in these blocks, and sample them anew."""
        for block in blocks:
            if (life := self._lives.pop(block, None)) is not None:
                self._observe(life)
            if self._random.random() < self._sample_ratio:
                self._lives[block] = _Life(self.now_s)

    def on_accessed(self, blocks: Iterable[int]) -> None:
        """Note a cache hit on these blocks."""
        for block in blocks:
            if (life := self._lives.get(block)) is not None:
                life.accesses_s.append(self.now_s)

    def reset(self) -> None:
        """Forget blocks without observing them, as a reset of the cache does."""
        self._lives.clear()

    def _observe(self, life: _Life) -> None:
        newest_s = life.accesses_s[-1] if life.accesses_s else life.allocated_s
        self.lifetime.observe(self.now_s - life.allocated_s)
        self.idle_before_evict.observe(self.now_s - newest_s)
        for earlier_s, later_s in pairwise(life.accesses_s):
            self.reuse_gap.observe(later_s - earlier_s)


BlockKey = int | None  # >= 0; None: full, but no prompt can ever match it

_MATCHLESS = -1  # how a pool remembers a full block without a key


class OutOfBlocksError(Exception):
    """More blocks were asked for than are free."""


class BlockPool:
    """``capacity`` blocks, None for a pool that never evicts."""

    __slots__ = ("_cached", "_duplicates", "_free", "_keys", "_refs", "capacity", "residency")

    def __init__(self, capacity: int | None, residency: BlockResidency | None = None) -> None:
        if capacity is not None and capacity < 1:
            raise ValueError(f"a pool needs at least one block, not {capacity}")
        self.capacity = capacity
        self.residency = residency
        self._refs: list[int] = []  # by block number; blocks above the end were never used
        self._keys: list[BlockKey] = []  # what each block caches
        self._free: OrderedDict[int, None] = OrderedDict()  # used blocks that nobody holds, next to go first
        self._cached: dict[int, int] = {}  # key -> the block that a lookup finds
        self._duplicates: dict[int, list[int]] = {}  # key -> further blocks, oldest first

    @property
    def held(self) -> int:
        """Blocks that running requests hold."""
        return len(self._refs) - len(self._free)

    @property
    def available(self) -> int | None:
        """Blocks that can be taken, cached or not; None where there is no limit."""
        return None if self.capacity is None else self.capacity - self.held

    @property
    def usage_ratio(self) -> float:
        """Held blocks / capacity, 0 to 1; 0 where there is no limit."""
        return 0.0 if self.capacity is None else self.held / self.capacity

    def lookup(self, keys: Sequence[BlockKey], limit: int) -> list[int]:
        """The cached blocks of the longest prefix of ``keys``, at most ``limit`` of them. Changes nothing."""
        found: list[int] = []
        cached = self._cached
        for key in keys[:limit]:
            if key is None or (block := cached.get(key)) is None:
                break
            found.append(block)
        return found

    def fits(self, hits: Sequence[int], fresh: int) -> bool:
        """Whether ``fresh`` further blocks can be taken once the free ones among ``hits`` are held."""
        if self.capacity is None:
            return True
        room = self.capacity - self.held
        return fresh <= room and fresh + sum(1 for block in hits if not self._refs[block]) <= room

    def hold(self, blocks: Sequence[int]) -> None:
        """Hold cached blocks once more."""
        refs, free = self._refs, self._free
        for block in blocks:
            if not refs[block]:
                del free[block]
            refs[block] += 1
        if self.residency is not None:
            self.residency.on_accessed(blocks)

    def take(self, count: int) -> list[int]:
        """Hold ``count`` blank blocks, evicting from the head of the free queue; OutOfBlocksError takes none."""
        available = self.available
        if available is not None and count > available:
            raise OutOfBlocksError(f"{count} blocks asked for, {available} free")
        taken = self._never_used(count)
        for _ in range(count - len(taken)):
            block, _nothing = self._free.popitem(last=False)
            self._forget(block)
            self._refs[block] = 1
            taken.append(block)
        if self.residency is not None:
            self.residency.on_allocated(taken)
        return taken

    def cache(self, block: int, key: BlockKey) -> None:
        """Say what a held, full block contains. A block that already has a key keeps it."""
        if self._keys[block] is not None:
            return
        self._keys[block] = _MATCHLESS if key is None else key
        if key is not None and self._cached.setdefault(key, block) != block:
            self._duplicates.setdefault(key, []).append(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Give back a request's blocks, in the order of its tokens; they enter the free queue tail first."""
        refs, free, keys = self._refs, self._free, self._keys
        for block in reversed(blocks):
            refs[block] -= 1
            if not refs[block]:
                free[block] = None
                if keys[block] is None:
                    free.move_to_end(block, last=False)

    def reset(self) -> bool:
        """Forget everything cached; False, and nothing done, while any block is held (as vLLM answers)."""
        if self.held:
            return False
        for kept in (self._refs, self._keys, self._free, self._cached, self._duplicates):
            kept.clear()
        if self.residency is not None:
            self.residency.reset()
        return True

    def _never_used(self, count: int) -> list[int]:
        start = len(self._refs)
        if self.capacity is not None:
            count = min(count, self.capacity - start)
        self._refs.extend([1] * count)
        self._keys.extend([None] * count)
        return list(range(start, start + count))

    def _forget(self, block: int) -> None:
        """Evict what a block caches."""
        key = self._keys[block]
        self._keys[block] = None
        if key is None or key == _MATCHLESS:
            return
        others = self._duplicates.get(key, [])
        if self._cached[key] != block:
            others.remove(block)
        elif others:
            self._cached[key] = others.pop(0)
        else:
            del self._cached[key]
        if not others:
            self._duplicates.pop(key, None)
