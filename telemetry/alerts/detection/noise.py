"""How much noisier a series of standardised deviations is than independent values of variance 1.

Bins of real traffic depend on each other: conversations go on, a cache that lost something lacks it for a while. A test
that assumes independence would alarm too often. The factor by which the variance of a sum grows is measured in two
ways, by the correlation of neighbours and by the means of blocks, and the larger one is used.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from itertools import pairwise

BLOCK = 6  # bins
FEW = 24  # bins that are needed to tell
LARGEST = 8.0
OUTLIER = 4.0  # standard deviations, to which larger values are cut
MAD_TO_SIGMA = 1.4826


class Noise:
    """Collects standardised deviations of quiet bins, and says by what to multiply variances: at least 1."""

    __slots__ = ("_due", "_values", "factor")

    def __init__(self, most: int) -> None:
        self._values: deque[float] = deque(maxlen=most)
        self._due = 0
        self.factor = 1.0

    def add(self, values: Iterable[float]) -> None:
        """Deviations of bins from their level, each divided by its standard deviation."""
        for value in values:
            self._values.append(min(max(value, -OUTLIER), OUTLIER))
            self._due -= 1
        if self._due <= 0 and len(self._values) >= FEW:
            self._due = BLOCK
            self.factor = min(max(inflation(list(self._values)), 1.0), LARGEST)

    def forget(self) -> None:
        """Begin anew after a change of level, with what was known so far as the factor."""
        self._values.clear()
        self._due = 0


def inflation(values: list[float]) -> float:
    """The long-run variance of a series: 1 for independent values of variance 1."""
    middle = statistics.median(values)
    spread = (MAD_TO_SIGMA * statistics.median([abs(value - middle) for value in values])) ** 2
    pairs = sum((one - middle) * (other - middle) for one, other in pairwise(values))
    total = sum((value - middle) ** 2 for value in values) or 1.0
    correlation = min(max(pairs / total, 0.0), 0.75)
    return max(spread * (1 + correlation) / (1 - correlation), _of_blocks(values))


def _of_blocks(values: list[float]) -> float:
    means = [statistics.fmean(values[start : start + BLOCK]) for start in range(0, len(values) - BLOCK + 1, BLOCK)]
    if len(means) < 2 * BLOCK:
        return 1.0
    middle = statistics.median(means)
    return BLOCK * (MAD_TO_SIGMA * statistics.median([abs(mean - middle) for mean in means])) ** 2
