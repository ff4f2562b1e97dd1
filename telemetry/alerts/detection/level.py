"""The level and the noise of one task group's hit rate since its last change.

Theory of operation. The level is the robust mean of the bins since the last change, weighted by requests; the noise is
their absolute deviation, scaled to one request, so that the variance of a bin of n requests is ``s2 / n``. Bins of an
excursion below the level are held back until it ends, or a young level would follow the drop that it should reveal.
A one-sided CUSUM upwards finds improvements: then the level is estimated anew from the bins since the rise began. After
every change the previous level stands in, in part, until there are ``ENOUGH`` bins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

ENOUGH = 8  # bins that a level needs
REFRESH = 30  # a level is estimated anew once a 30th of its bins are new
RISE_NATS = 12.0  # log-likelihood ratio at which a rise is believed; a false one costs nothing but a new estimate
PRIOR_SPREAD, LEAST_SPREAD = 0.5, 0.12  # of m (1 - m), the variance of one request that hits all or nothing
LEAST_S2 = 0.05**2
ROBUST_LOSS = 1.1  # variance of the robust mean over that of the mean, of a normal distribution
OUTLIER = 3.0  # standard deviations
MAD_TO_SIGMA = 1.4826  # of a normal distribution


class Sample(NamedTuple):
    """A bin's hit rate, and how many requests it rests on."""

    ratio: float
    requests: float


class Level:
    """One task group: add bins, read ``ratio`` and ``variance``."""

    __slots__ = ("_due", "_held", "_prior", "_rise", "_rising", "_samples", "doubt", "ratio", "s2")

    def __init__(self, most: int) -> None:
        self._samples: deque[Sample] = deque(maxlen=most)
        self._held: list[Sample] = []
        self._rising: list[Sample] = []
        self._rise = 0.0
        self._prior: float | None = None
        self._due = 0
        self.ratio: float | None = None  # the level; None until there are ENOUGH bins
        self.s2 = 0.0
        self.doubt = 0.0  # variance of the level itself

    def variance(self, requests: float) -> float:
        """Of a bin of so many requests."""
        return self.s2 / max(requests, 1.0)

    @property
    def bins(self) -> int:
        """How many bins the level rests on."""
        return len(self._samples)

    def add(self, sample: Sample, drop: float, inflation: float, *, hold: bool) -> bool:
        """Take in a bin; ``hold`` keeps it apart for now. Whether the level rose and is estimated anew."""
        has_risen = self.ratio is not None and self._has_risen(sample, self.ratio, drop, inflation)
        if has_risen:
            self.restart(self._rising)
        elif hold and self.ratio is not None:
            self._held.append(sample)
        else:
            self._release()
            self._append(sample)
        return has_risen

    def restart(self, samples: Sequence[Sample] | None = None) -> None:
        """Estimate anew from these bins, else from those that are held; the previous level stands in until enough."""
        kept = list(self._held if samples is None else samples)
        self._held, self._rising, self._rise = [], [], 0.0
        self._prior = self.ratio
        self._samples.clear()
        self._samples.extend(kept)
        self._estimate()

    def keep_latest(self, count: int) -> None:
        """Estimate anew from the latest bins."""
        self._release()
        self.restart(list(self._samples)[-count:])

    def forget_held(self) -> None:
        """Leave the bins of an excursion out for good."""
        self._held = []

    def _release(self) -> None:
        self._samples.extend(self._held)
        self._held = []

    def _append(self, sample: Sample) -> None:
        self._samples.append(sample)
        self._due -= 1
        if self._due <= 0:
            self._estimate()

    def _has_risen(self, sample: Sample, level: float, drop: float, inflation: float) -> bool:
        above = sample.ratio - level - self.doubt**0.5
        step = drop * (above - drop / 2) / (self.variance(sample.requests) * inflation)
        self._rise = max(self._rise + min(step, RISE_NATS / 3), 0.0)
        self._rising = [*self._rising, sample] if self._rise else []
        return self._rise > RISE_NATS

    def _estimate(self) -> None:
        count = len(self._samples)
        self._due = count // REFRESH
        if not count or (count < ENOUGH and self._prior is None and self.ratio is None):
            return
        middle = centre(self._samples)
        if count < ENOUGH and self._prior is not None:
            middle = (count * middle + (ENOUGH - count) * self._prior) / ENOUGH
        self.ratio = middle
        self.s2 = self._spread(middle)
        self.doubt = ROBUST_LOSS * self.s2 / max(sum(one.requests for one in self._samples), 1.0)

    def _spread(self, middle: float) -> float:
        """Variance of one request: robust, between a floor and, while bins are few, an assumption."""
        bernoulli = max(middle * (1 - middle), LEAST_S2)
        off = sorted(abs(one.ratio - middle) * one.requests**0.5 for one in self._samples)
        robust = MAD_TO_SIGMA * off[len(off) // 2]
        cut = sum(min(one, OUTLIER * robust) ** 2 for one in off) / len(off)  # more where deviations are skewed
        measured: float = max(robust**2, cut)
        blended = (len(off) * measured + ENOUGH * PRIOR_SPREAD * bernoulli) / (len(off) + ENOUGH)
        return max(blended, LEAST_SPREAD * bernoulli, LEAST_S2)


def centre(samples: Collection[Sample]) -> float:
    """The mean, weighted by requests, with outliers cut to ``OUTLIER`` deviations from the median (Huber).

    The median alone lies above the mean of bins of few requests, most of which hit a lot and some of which nothing.
    """
    middle = weighted_median([(one.ratio, one.requests) for one in samples])
    spread = MAD_TO_SIGMA * weighted_median([(abs(one.ratio - middle), one.requests) for one in samples])
    limit = OUTLIER * max(spread, LEAST_S2)
    weight = sum(one.requests for one in samples)
    off = sum(min(max(one.ratio - middle, -limit), limit) * one.requests for one in samples)
    return middle + off / weight


def weighted_median(pairs: list[tuple[float, float]]) -> float:
    """The value at half of the weight; ``pairs`` are (value, weight) with a positive sum of weights."""
    pairs.sort()
    half = sum(weight for _, weight in pairs) / 2
    for value, weight in pairs:
        half -= weight
        if half <= 0:
            return value
    return pairs[-1][0]
