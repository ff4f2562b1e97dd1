"""Life of sampled KV blocks, as vLLM's ``--kv-cache-metrics`` observes it (``v1/core/kv_cache_metrics.py``).

A block is sampled when it is allocated. Its eviction is its next allocation, whether or not it cached anything.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from routing.simulation.histogram import Histogram

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
