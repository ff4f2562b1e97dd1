"""When a hit rate fell: the moment that best divides a higher level from a lower one. Pure.

Theory of operation. Of all places to cut a series of bins in two, the best is where two levels, one for each part,
leave the least of the squared deviations, each bin weighing as much as its tokens (the first step of binary
segmentation: Scott and Knott, "A cluster analysis method for grouping means", 1974).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

LEAST_BINS = 2  # on either side
LEAST_FALL = 0.02  # between the levels


@dataclass(frozen=True, slots=True)
class Bin:
    """A short time's answers."""

    start: datetime
    prompt: float  # tokens
    cached: float


def onset(bins: Sequence[Bin]) -> datetime | None:
    """The start of the lower part; None where nothing fell, or there is too little to tell. ``bins`` ascending."""
    known = [it for it in bins if it.prompt > 0]
    best: tuple[float, datetime] | None = None
    total, cached = sum(it.prompt for it in known), sum(it.cached for it in known)
    prompt_left = cached_left = 0.0
    for place, it in enumerate(known):
        if LEAST_BINS <= place <= len(known) - LEAST_BINS:
            left, right = cached_left / prompt_left, (cached - cached_left) / (total - prompt_left)
            between = prompt_left * (total - prompt_left) / total * (left - right) ** 2  # what the cut explains
            if left - right >= LEAST_FALL and (best is None or between > best[0]):
                best = between, it.start
        prompt_left += it.prompt
        cached_left += it.cached
    return None if best is None else best[1]
