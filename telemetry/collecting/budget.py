"""Which part of the blocks to ask a router for, so that no more are stored than there is room for.

A part is a power of two, so that it changes seldom and what was stored before and after has a common part: a smaller
one is a subset of a larger one. It falls at once when prompts grow, and rises when the peak of before has faded.
"""

from __future__ import annotations

import math

SMALLEST = 2.0**-12
FADE_S = 600.0  # in which a peak falls to a third


def faded_peak(peak: float, rate: float, elapsed_s: float) -> float:
    """The highest rate of late; one of long ago counts less and less."""
    return max(rate, peak * math.exp(-max(elapsed_s, 0.0) / FADE_S))


def sample_ratio(blocks_per_s: float, budget_per_s: float) -> float:
    """The largest power of two, at most 1, with which ``blocks_per_s`` stay within the budget."""
    if blocks_per_s <= budget_per_s:
        return 1.0
    return max(SMALLEST, 2.0 ** math.floor(math.log2(budget_per_s / blocks_per_s)))
