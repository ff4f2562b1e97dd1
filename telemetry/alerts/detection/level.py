"""The input of the detector: what each task group of a pool sent and got from caches in one short step of time.

How much noisier a series of standardised deviations is than independent values of variance 1.

Bins of real traffic depend on each other: conversations go on, a cache that lost something lacks it for a while. A test
that assumes independence would alarm too often. The factor by which the variance of a sum grows is measured in two
ways, by the correlation of neighbours and by the means of blocks, and the larger one is used.

The level and the noise of one task group's hit rate since its last change.

Theory of operation. The level is the robust mean of the bins since the last change, weighted by requests; the noise is
their absolute deviation, scaled to one request, so that the variance of a bin of n requests is ``s2 / n``. Bins of an
excursion below the level are held back until it ends, or a young level would follow the drop that it should reveal.
A one-sided CUSUM upwards finds improvements: then the level is estimated anew from the bins since the rise began. After
every change the previous level stands in, in part, until there are ``ENOUGH`` bins.

Finds a slow decline: a CUSUM on hours, each compared with the same hour of the days before.

The fast test forgets what fell too little to tell. Here an hour's shortfall is the median of the same hour of the days
before the decline could begin, less its own rate; the noise is what those days differ by among themselves. Hours of too
little traffic say nothing. The threshold is that of an alarm in ``quiet_days``, in hours.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import pairwise
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class GroupBin:
    """One task group in one bin: responses that reported their cached tokens."""

    prompt: float  # tokens, above 0
    cached: float  # tokens
    requests: float

    @property
    def ratio(self) -> float:
        """Hit rate, 0 to 1."""
        return min(max(self.cached / self.prompt, 0.0), 1.0)


@dataclass(frozen=True, slots=True)
class Bin:
    """One step of a pool. A task group without traffic is absent."""

    end: datetime
    groups: Mapping[str, GroupBin] = field(default_factory=dict)

    @property
    def prompt(self) -> float:
        """Tokens of all task groups."""
        return sum(one.prompt for one in self.groups.values())

    @property
    def requests(self) -> float:
        """Requests of all task groups."""
        return sum(one.requests for one in self.groups.values())

    @property
    def cached(self) -> float:
        """Cached tokens of all task groups."""
        return sum(one.cached for one in self.groups.values())

    def of_group(self, group: str) -> Bin:
        """The same bin with one task group alone."""
        return Bin(self.end, {name: one for name, one in self.groups.items() if name == group})


BLOCK = 6  # bins
FEW = 24  # bins that are needed to tell
LARGEST = 8.0
NOISE_OUTLIER = 4.0  # standard deviations, to which larger values are cut
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
            self._values.append(min(max(value, -NOISE_OUTLIER), NOISE_OUTLIER))
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


ENOUGH = 8  # bins that a level needs
REFRESH = 30  # a level is estimated anew once a 30th of its bins are new
RISE_NATS = 12.0  # log-likelihood ratio at which a rise is believed; a false one costs nothing but a new estimate
PRIOR_SPREAD, LEAST_SPREAD = 0.5, 0.12  # of m (1 - m), the variance of one request that hits all or nothing
LEAST_S2 = 0.05**2
ROBUST_LOSS = 1.1  # variance of the robust mean over that of the mean, of a normal distribution
OUTLIER = 3.0  # standard deviations


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


HOUR, DAY = timedelta(hours=1), timedelta(days=1)
LOOKED_AT = 24  # hours that are tested
MIN_DAYS = 3  # with the same hour
LEAST_SIGMA = 0.02
LEAST_HOURS = 3  # that an alarm rests on


@dataclass(frozen=True, slots=True)
class Decline:
    """A decline that has not ended: its hours' mean beside what is usual at these hours."""

    level: float
    ratio: float
    onset: datetime
    days: int
    tokens: float
    requests: float


@dataclass(frozen=True, slots=True)
class Hour:
    """A whole hour's hit rate and traffic."""

    ratio: float
    tokens: float
    requests: float


def find_decline(
    hours: Mapping[datetime, Hour], now: datetime, *, drop: float, days: int, quiet_days: float
) -> Decline | None:
    """The decline that lasts until the newest whole hour; None where there is none, or too little is known."""
    last = now.replace(minute=0, second=0, microsecond=0) - HOUR
    rows = [
        (at, hours[at], usual)
        for at in (last - HOUR * back for back in range(LOOKED_AT - 1, -1, -1))
        if at in hours and len(usual := _usual(hours, at, days)) >= MIN_DAYS
    ]
    if not rows:
        return None
    sigma = _sigma([usual for _, _, usual in rows])
    threshold = math.log(max(quiet_days * 24.0, 10.0))
    score, since = 0.0, 0
    for place, (_, hour, usual) in enumerate(rows):
        gain = drop * (statistics.median(usual) - hour.ratio - drop / 2) / sigma**2
        score = max(score + min(gain, threshold / LEAST_HOURS), 0.0)
        since = place + 1 if score == 0.0 else since
    fallen = rows[since:]
    if score <= threshold or len(fallen) < LEAST_HOURS:
        return None
    return _decline(fallen)


def _usual(hours: Mapping[datetime, Hour], at: datetime, days: int) -> list[float]:
    """The same hour of the days before; the day before alone could be part of the decline."""
    found = (hours.get(at - DAY * back) for back in range(1, days + 1))
    return [one.ratio for one in found if one is not None]


def _sigma(several: Sequence[Sequence[float]]) -> float:
    off = [abs(ratio - statistics.median(usual)) for usual in several for ratio in usual]
    return max(MAD_TO_SIGMA * statistics.median(off), LEAST_SIGMA)


def _decline(fallen: Sequence[tuple[datetime, Hour, list[float]]]) -> Decline:
    tokens = sum(hour.tokens for _, hour, _ in fallen)
    return Decline(
        level=sum(statistics.median(usual) * hour.tokens for _, hour, usual in fallen) / tokens,
        ratio=sum(hour.ratio * hour.tokens for _, hour, _ in fallen) / tokens,
        onset=fallen[0][0],
        days=min(len(usual) for _, _, usual in fallen),
        tokens=tokens,
        requests=sum(hour.requests for _, hour, _ in fallen),
    )
