"""Compares two placements of the same requests: in turn (round robin), and by prefix.

Both are replayed from empty caches of the same sizes, and the first requests only warm them, so the difference does not
depend on the policy that placed the requests. Placement by prefix is the near-optimal one of the breakdown's term
*split*, without regard to load: a limit for every cache-aware strategy. Round robin is that of one router, in order of
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from telemetry.lab.caches import EMPTY, BlockNumbers, Chains, place_ideally, run_lru
from telemetry.lab.chains import Floats, Integers, Prompts, Requests, depth_error

BATCHES = 20  # in order of time; independent of each other for the standard error


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


def compare_placements(
    requests: Requests, prompts: Prompts, capacities: Sequence[int], *, warm: int
) -> Placements | None:
    """Replay sampled requests on caches of these sizes, in sampled blocks; the first ``warm`` requests do not count.

    None without capacities or prompt tokens, or with fewer counted requests than ``BATCHES``.
    """
    tokens = prompts.tokens[warm:]
    newer = len(tokens) // 2
    if not capacities or len(tokens) < BATCHES or not tokens[newer:].any():
        return None
    known = np.flatnonzero(requests.lengths)  # prompts with a sampled block
    chains = Chains.tail_first(BlockNumbers(requests.blocks).of(requests.blocks), requests.ends[known])
    in_turn, by_prefix = np.zeros((2, len(requests)), np.int64)
    for turn, capacity in enumerate(capacities):
        rows = np.flatnonzero(known % len(capacities) == turn)
        in_turn[known[rows]] = run_lru(EMPTY, chains.take(rows), capacity).matched
    caches = len(capacities)
    by_prefix[known] = place_ideally([EMPTY] * caches, capacities, [0.0] * caches, chains).best
    round_robin_tokens, prefix_tokens = (prompts.cached_tokens(matched)[warm:] for matched in (in_turn, by_prefix))
    differs = known[(known >= warm) & (in_turn[known] != by_prefix[known])]
    sampling = sqrt(2) * _sampling_error(requests, prompts, differs, in_turn)
    gains, total = prefix_tokens - round_robin_tokens, tokens.sum()
    return Placements(
        len(tokens),
        float(round_robin_tokens.sum() / total),
        float(prefix_tokens.sum() / total),
        sqrt(_batch_error(gains, tokens) ** 2 + (sampling / total) ** 2),
        float(gains[newer:].sum() / tokens[newer:].sum()),
    )


def _batch_error(gains: Floats, tokens: Floats) -> float:
    """Standard error of ``gains`` / ``tokens`` by batch means, which allows for requests that depend on neighbours."""
    rest = gains - gains.sum() / tokens.sum() * tokens
    sums = np.array([batch.sum() for batch in np.array_split(rest, BATCHES)])
    return float(sqrt(BATCHES / (BATCHES - 1) * np.square(sums).sum()) / tokens.sum())


def _sampling_error(requests: Requests, prompts: Prompts, rows: Integers, matched: Integers) -> float:
    """Standard error in tokens of a sum of cached tokens; prompts that diverge at the same block share their error."""
    if prompts.ratio >= 1 or not len(rows):
        return 0.0
    at = prompts.starts[rows] + np.maximum(matched[rows] - 1, 0)
    _, codes = np.unique(requests.blocks[at], return_inverse=True)
    return depth_error(prompts.ratio) * sqrt(np.square(np.bincount(codes, prompts.block_tokens[rows])).sum())
