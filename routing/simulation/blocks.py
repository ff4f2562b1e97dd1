"""The KV blocks of a modelled replica: reference counts, prefix cache and LRU eviction as in vLLM's block pool.

Theory of operation. A physical block is *held* by one or more running requests (reference count > 0) or *free*. A free
block keeps its cached content until it is taken for something else: the free queue is the LRU list, and its head is
taken first. A request releases its blocks tail first, so its tail is evicted before its head; a block that caches
nothing (not full yet) goes to the head of the queue. Blocks are cached under a key that stands for the block and
everything before it, so a lookup walks the keys of a prompt until the first one missing. The same key may be in
several physical blocks (a prompt of exactly four blocks recomputes the fourth): a lookup finds the oldest, and the key
leaves the cache with the last of them. Never-used blocks are taken before any cached one, which is the order in which
vLLM's queue starts.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from routing.simulation.statistics import Histogram

RESIDENCY_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
    1200.0, 1800.0,
)  # fmt: skip
MAX_ACCESSES = 4  # latest cache hits recorded for a block


@dataclass(slots=True)
class _SampledBlock:
    allocated_s: float
    accesses_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_ACCESSES))


class BlockResidency:
    """Lifetimes of sampled blocks in seconds, as vLLM's ``--kv-cache-metrics`` reports them.

    A share ``sample_ratio`` of the blocks, above 0 and at most 1, is sampled when allocated. The eviction of a block is
    its next allocation, even if it cached nothing (``v1/core/kv_cache_metrics.py``).
    """

    def __init__(self, sample_ratio: float, seed: int = 0) -> None:
        self.now_s = 0.0  # set by the engine at each step
        self.lifetime = Histogram(RESIDENCY_S)
        self.idle_before_evict = Histogram(RESIDENCY_S)
        self.reuse_gap = Histogram(RESIDENCY_S)
        self._sample_ratio = sample_ratio
        self._random = random.Random(seed)  # noqa: S311 - a sample, no secret
        self._sampled: dict[int, _SampledBlock] = {}  # by block number

    def on_allocated(self, blocks: Iterable[int]) -> None:
        """Observe the eviction of the previous content of these blocks, and sample them again."""
        for block in blocks:
            if (sampled := self._sampled.pop(block, None)) is not None:
                self._observe(sampled)
            if self._random.random() < self._sample_ratio:
                self._sampled[block] = _SampledBlock(self.now_s)

    def on_accessed(self, blocks: Iterable[int]) -> None:
        """Record a cache hit on these blocks."""
        for block in blocks:
            if (sampled := self._sampled.get(block)) is not None:
                sampled.accesses_s.append(self.now_s)

    def reset(self) -> None:
        """Drop all samples without observing them, as a reset of the cache does."""
        self._sampled.clear()

    def _observe(self, sampled: _SampledBlock) -> None:
        latest_s = sampled.accesses_s[-1] if sampled.accesses_s else sampled.allocated_s
        self.lifetime.observe(self.now_s - sampled.allocated_s)
        self.idle_before_evict.observe(self.now_s - latest_s)
        for earlier_s, later_s in pairwise(sampled.accesses_s):
            self.reuse_gap.observe(later_s - earlier_s)


BlockKey = int | None  # >= 0; None: full, but no prompt can ever match it

_UNMATCHABLE = -1  # stored key of a full block whose key is None


class OutOfBlocksError(Exception):
    """More blocks were requested than are free."""


class BlockPool:
    """``capacity`` blocks; None for a pool that never evicts."""

    __slots__ = ("_cached", "_duplicates", "_free", "_keys", "_refs", "capacity", "evicted", "residency")

    def __init__(self, capacity: int | None, residency: BlockResidency | None = None) -> None:
        self.capacity = capacity
        self.residency = residency
        self.evicted: list[object] | None = (
            None  # a list collects the keys of evicted blocks, unique ones for unmatchable
        )
        self._refs: list[int] = []  # by block number; blocks beyond the end were never used
        self._keys: list[BlockKey] = []  # key of the content of each block
        self._free: OrderedDict[int, None] = OrderedDict()  # used blocks that no request holds, next victim first
        self._cached: dict[int, int] = {}  # key -> the block that a lookup finds
        self._duplicates: dict[int, list[int]] = {}  # key -> further blocks, oldest first

    @property
    def held(self) -> int:
        """Blocks that running requests hold."""
        return len(self._refs) - len(self._free)

    @property
    def available(self) -> int | None:
        """Blocks that can be taken, cached or not; None without a limit."""
        return None if self.capacity is None else self.capacity - self.held

    @property
    def usage_ratio(self) -> float:
        """Held blocks / capacity, 0 to 1; 0 without a limit."""
        return 0.0 if self.capacity is None else self.held / self.capacity

    def lookup(self, keys: Sequence[BlockKey], limit: int) -> list[int]:
        """The cached blocks of the longest prefix of ``keys``, at most ``limit`` of them. Changes nothing."""
        hits: list[int] = []
        cached = self._cached
        for key in keys[:limit]:
            if key is None or (block := cached.get(key)) is None:
                break
            hits.append(block)
        return hits

    def fits(self, hits: Sequence[int], fresh: int) -> bool:
        """Whether ``fresh`` further blocks can be taken once the free ones among ``hits`` are held."""
        available = self.available
        if available is None:
            return True
        return fresh <= available and fresh + sum(1 for block in hits if not self._refs[block]) <= available

    def hold(self, blocks: Sequence[int]) -> None:
        """Add a reference to cached blocks."""
        refs, free = self._refs, self._free
        for block in blocks:
            if not refs[block]:
                del free[block]
            refs[block] += 1
        if self.residency is not None:
            self.residency.on_accessed(blocks)

    def take(self, count: int) -> list[int]:
        """Hold ``count`` blank blocks, evicting from the head of the free queue; on OutOfBlocksError none is held."""
        available = self.available
        if available is not None and count > available:
            raise OutOfBlocksError(f"{count} blocks requested, {available} free")
        start = len(self._refs)
        unused = count if self.capacity is None else min(count, self.capacity - start)
        self._refs.extend([1] * unused)
        self._keys.extend([None] * unused)
        taken = list(range(start, start + unused))
        for _ in range(count - unused):
            block, _ = self._free.popitem(last=False)
            self._evict(block)
            self._refs[block] = 1
            taken.append(block)
        if self.residency is not None:
            self.residency.on_allocated(taken)
        return taken

    def cache(self, block: int, key: BlockKey) -> None:
        """Set the content of a held, full block. A block that already has a key keeps it."""
        if self._keys[block] is not None:
            return
        self._keys[block] = _UNMATCHABLE if key is None else key
        if key is not None and self._cached.setdefault(key, block) != block:
            self._duplicates.setdefault(key, []).append(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a request's references, in the order of its tokens; blocks enter the free queue tail first."""
        refs, free, keys = self._refs, self._free, self._keys
        for block in reversed(blocks):
            refs[block] -= 1
            if not refs[block]:
                free[block] = None
                if keys[block] is None:
                    free.move_to_end(block, last=False)

    def reset(self) -> bool:
        """Empty the cache; False, and nothing done, while any block is held (as vLLM responds)."""
        if self.held:
            return False
        for contents in (self._refs, self._keys, self._free, self._cached, self._duplicates):
            contents.clear()
        if self.residency is not None:
            self.residency.reset()
        return True

    def _evict(self, block: int) -> None:
        """Remove what a block caches."""
        key = self._keys[block]
        self._keys[block] = None
        if key is None:
            return
        if self.evicted is not None:
            self.evicted.append(object() if key == _UNMATCHABLE else key)
        if key == _UNMATCHABLE:
            return
        duplicates = self._duplicates.get(key, [])
        if self._cached[key] != block:
            duplicates.remove(block)
        elif duplicates:
            self._cached[key] = duplicates.pop(0)
        else:
            del self._cached[key]
        if not duplicates:
            self._duplicates.pop(key, None)
