"""What-if grid of one pool's caches: the same requests by layout of the caches (rows) and by their size (columns).

The page of the breakdown reads the hit rate by cache size from it, the verdicts of ``worth.py`` the placements and the
working set, and the advice on a shared cache the prefixes that the present caches lost. All caches begin empty; the
first requests only warm them and do not count.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import sqrt

import numpy as np

from telemetry.lab.caches import EMPTY, BlockNumbers, CacheRun, Chains, best_of, place_ideally, run_lru
from telemetry.lab.chains import Floats, Integers, Prompts, Requests, depth_error
from telemetry.lab.replay import Replay

MULTIPLES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # of the replicas' actual cache size
WORKING_SET_SHARE = 0.9  # of the reused tokens
MIN_REUSED_REQUESTS = 20  # for a working set
SIZE_STEP = 1.01  # between two cache sizes that are tried for the working set
BATCHES = 20  # in order of time; independent of each other for the standard error


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


@dataclass(frozen=True, slots=True)
class Placements:
    """Hit rates (cached / prompt tokens, 0 to 1) of the counted requests by placement."""

    requests: int
    round_robin: float
    by_prefix: float
    standard_error: float  # of the difference, from batches in time and from sampling of blocks
    newer_difference: float  # of the newer half of the requests; less while round robin's caches warm up

    @property
    def difference(self) -> float:
        """Hit rate that round robin loses, 0 to 1; below 0 only by chance."""
        return self.by_prefix - self.round_robin


class CacheGrid:
    """``capacities``: each replica's cache in tokens. The first ``warm`` requests do not count.

    Blocks are sampled so that at most ``most_blocks`` of all prompts are replayed.
    """

    def __init__(self, requests: Requests, capacities: Mapping[str, int], *, warm: int, most_blocks: int) -> None:
        self.ratio = float(requests.sample_ratios.min(initial=1.0))
        while requests.block_counts.sum() * self.ratio > most_blocks:
            self.ratio /= 2
        self.warm, self.capacities = warm, capacities
        self._sizes = Replay(None, self.ratio)
        self._sizes.learn(requests, math.inf)
        self._requests = requests.sampled(self.ratio)
        self._prompts = Prompts.of(self._requests, self._sizes.tokens_of(requests), self.ratio)
        self._known = np.flatnonzero(self._requests.lengths)  # prompts with a sampled block
        numbers = BlockNumbers(self._requests.blocks).of(self._requests.blocks)
        self._distinct = int(numbers.max(initial=0)) + 1
        self._chains = Chains.tail_first(numbers, self._requests.ends[self._known])
        self.prompt_tokens = self._prompts.tokens[warm:]

    def points(self) -> list[CapacityPoint]:
        """Hit rates by multiples of the cache sizes; [] without traffic or capacities."""
        if not self.capacities or not self.prompt_tokens.sum():
            return []
        mean = sum(self.capacities.values()) / len(self.capacities)
        return [
            CapacityPoint(
                multiple,
                self._hit_rate(self._in_one(self._blocks(multiple * mean))),
                self._hit_rate(self._as_placed(multiple)[0]),
                self._hit_rate(self._in_one(self._blocks(multiple * mean * len(self.capacities)))),
            )
            for multiple in MULTIPLES
        ]

    def working_set(self) -> WorkingSet | None:
        """The smallest cache that has most of the reuse; None below ``MIN_REUSED_REQUESTS``.

        The interval is that of a quantile of as many independent observations as requests reused something.
        """
        count = int((self._unlimited[self._known >= self.warm] > 0).sum())
        if count < MIN_REUSED_REQUESTS:
            return None
        unshared = self._tokens(np.zeros(len(self._known), np.int64)).sum()  # expected where no sampled block is cached

        @lru_cache
        def reused(step: int) -> float:
            return float(self._tokens(self._in_one(math.ceil(SIZE_STEP**step))).sum() - unshared)

        steps = range(math.ceil(math.log(self._distinct, SIZE_STEP)) + 1)
        margin = 1.96 * sqrt(WORKING_SET_SHARE * (1 - WORKING_SET_SHARE) / count)
        shares = (WORKING_SET_SHARE, WORKING_SET_SHARE - margin, min(WORKING_SET_SHARE + margin, 1.0))
        found = (bisect_left(steps, share * reused(steps[-1]), key=reused) for share in shares)
        tokens, low, high = (self._sizes.block_tokens / self.ratio * math.ceil(SIZE_STEP**step) for step in found)
        return WorkingSet(tokens, low, high, count)

    def placements(self) -> Placements | None:
        """Round robin and placement by prefix; None without capacities or with fewer requests than ``BATCHES``."""
        tokens = self.prompt_tokens
        newer = len(tokens) // 2
        if not self.capacities or len(tokens) < BATCHES or not tokens[newer:].any():
            return None
        sizes = list(map(self._blocks, self.capacities.values()))
        in_turn, _ = self._in_each(self._known % len(sizes), sizes)
        round_robin, by_prefix = self._tokens(in_turn), self._tokens(self._ideal)
        gains, total = by_prefix - round_robin, tokens.sum()
        sampling = sqrt(2) * self._sampling_error(in_turn, in_turn != self._ideal)
        return Placements(
            len(tokens),
            float(round_robin.sum() / total),
            float(by_prefix.sum() / total),
            sqrt(_batch_error(gains, tokens) ** 2 + (sampling / total) ** 2),
            float(gains[newer:].sum() / tokens[newer:].sum()),
        )

    def lost_tokens(self) -> Floats:
        """Of each counted request, what the caches evicted before and no placement would have kept."""
        matched, runs = self._as_placed(1.0)
        kept = np.maximum(self._ideal, best_of(runs, len(matched)) if runs else matched)
        reachable = np.maximum(self._unlimited, kept)
        return np.maximum(0.0, self._tokens(reachable) - self._tokens(kept))

    def length_error(self) -> float:
        """Standard error in tokens of one lost prefix, from block sampling."""
        return depth_error(self.ratio) * float(np.median(self._prompts.block_tokens))

    @cached_property
    def _unlimited(self) -> Integers:
        return self._in_one(self._distinct)

    @cached_property
    def _ideal(self) -> Integers:
        """Most cached blocks of each prompt in any of the caches, placed by prefix."""
        sizes = list(map(self._blocks, self.capacities.values()))
        return place_ideally([EMPTY] * len(sizes), sizes, [0.0] * len(sizes), self._chains).best

    def _in_one(self, blocks: int) -> Integers:
        return run_lru(EMPTY, self._chains, blocks).matched

    def _as_placed(self, multiple: float) -> tuple[Integers, list[tuple[Integers, CacheRun]]]:
        mean = sum(self.capacities.values()) / len(self.capacities)
        replicas = self._requests.replicas
        sizes = [self._blocks(multiple * self.capacities.get(name, mean)) for name in replicas.names]
        return self._in_each(replicas.codes[self._known], sizes)

    def _in_each(self, owners: Integers, sizes: Sequence[int]) -> tuple[Integers, list[tuple[Integers, CacheRun]]]:
        """(cached blocks of each prompt in its cache, each cache's prompts and run)."""
        matched = np.zeros(len(owners), np.int64)
        runs = []
        for number, size in enumerate(sizes):
            rows = np.flatnonzero(owners == number)
            run = run_lru(EMPTY, self._chains.take(rows), size)
            matched[rows] = run.matched
            runs.append((rows, run))
        return matched, runs

    def _blocks(self, tokens: float) -> int:
        return self._sizes.capacity_blocks(tokens)

    def _tokens(self, matched: Integers) -> Floats:
        """Cached tokens of each counted request; ``matched``: of prompts with a sampled block."""
        of_all = np.zeros(len(self._requests), np.int64)
        of_all[self._known] = matched
        return self._prompts.cached_tokens(of_all)[self.warm :]

    def _hit_rate(self, matched: Integers) -> float:
        return float(self._tokens(matched).sum() / self.prompt_tokens.sum())

    def _sampling_error(self, matched: Integers, differs: Integers) -> float:
        """Standard error in tokens of a sum; prompts that diverge at the same block share their error."""
        is_counted = (self._known >= self.warm) & differs
        rows = self._known[is_counted]
        if self.ratio >= 1 or not len(rows):
            return 0.0
        at = self._prompts.starts[rows] + np.maximum(matched[is_counted] - 1, 0)
        _, codes = np.unique(self._requests.blocks[at], return_inverse=True)
        return depth_error(self.ratio) * sqrt(np.square(np.bincount(codes, self._prompts.block_tokens[rows])).sum())


def _batch_error(gains: Floats, tokens: Floats) -> float:
    """Standard error of ``gains`` / ``tokens`` by batch means, which allows for requests that depend on neighbours."""
    rest = gains - gains.sum() / tokens.sum() * tokens
    sums = np.array([batch.sum() for batch in np.array_split(rest, BATCHES)])
    return float(sqrt(BATCHES / (BATCHES - 1) * np.square(sums).sum()) / tokens.sum())
