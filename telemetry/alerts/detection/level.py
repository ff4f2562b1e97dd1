"""The level and the noise of one task group's hit rate since its last change, and the slow test on hours. Pure.

Theory of operation. The input is a bin: tokens and requests of each task group in one short step. The level of a task
group is the robust mean of its bins since the last change, weighted by requests. The noise is their absolute deviation,
scaled to one request, so that the variance of a bin of n requests is ``request_variance / n``. While caches warm up the
rate climbs, and bins deviate from their mean without noise, so differences of neighbours limit it. Bins of an
excursion below the level are held back until it ends; otherwise a young level would follow the drop that it should
reveal. A one-sided CUSUM upwards finds improvements: then the level is estimated again from the bins since the rise
began. After every change the previous level contributes until there are ``MIN_LEVEL_BINS`` bins.

Bins of real traffic depend on each other: conversations continue, a cache that lost something lacks it for a while. A
test that assumes independence would alarm too often. ``Noise`` measures the factor by which the variance of a sum grows
in two ways, by the correlation of neighbours and by the means of blocks, and uses the larger one.

The slow test finds a decline that is too slow for the fast test: a CUSUM on hours. The shortfall of an hour is the
median of the same hour of the days before, less its own rate; the noise is how much those days differ among themselves.
Hours with too little traffic are left out. The threshold allows one false alarm per ``quiet_days`` on average.
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
    """One step of a pool. Task groups without traffic are absent."""

    end: datetime
    groups: Mapping[str, GroupBin] = field(default_factory=dict)

    @property
    def prompt(self) -> float:
        """Tokens of all task groups."""
        return sum(group.prompt for group in self.groups.values())

    @property
    def requests(self) -> float:
        """Requests of all task groups."""
        return sum(group.requests for group in self.groups.values())

    def of_group(self, group: str) -> Bin:
        """The same bin with one task group only."""
        return Bin(self.end, {group: self.groups[group]} if group in self.groups else {})


BLOCK = 6  # bins
MIN_NOISE_BINS = 24
MAX_FACTOR = 8.0
NOISE_OUTLIER = 4.0  # standard deviations, to which larger values are limited
MAD_TO_SIGMA = 1.4826


class Noise:
    """Collects standardised deviations of quiet bins. Variances are multiplied by ``factor``, which is at least 1."""

    __slots__ = ("_bins_until_estimate", "_values", "factor")

    def __init__(self, most: int) -> None:
        self._values: deque[float] = deque(maxlen=most)
        self._bins_until_estimate = 0
        self.factor = 1.0

    def add(self, values: Iterable[float]) -> None:
        """Deviations of bins from their level, each divided by its standard deviation."""
        for value in values:
            self._values.append(min(max(value, -NOISE_OUTLIER), NOISE_OUTLIER))
            self._bins_until_estimate -= 1
        if self._bins_until_estimate <= 0 and len(self._values) >= MIN_NOISE_BINS:
            self._bins_until_estimate = BLOCK
            self.factor = min(max(inflation(list(self._values)), 1.0), MAX_FACTOR)

    def forget(self) -> None:
        """Restart after a change of level; the factor stays until there are enough bins."""
        self._values.clear()
        self._bins_until_estimate = 0


def inflation(values: list[float]) -> float:
    """The long-run variance of a series: 1 for independent values of variance 1."""
    middle = statistics.median(values)
    spread = (MAD_TO_SIGMA * statistics.median([abs(value - middle) for value in values])) ** 2
    pairs = sum((a - middle) * (b - middle) for a, b in pairwise(values))
    total = sum((value - middle) ** 2 for value in values) or 1.0
    correlation = min(max(pairs / total, 0.0), 0.75)
    return max(spread * (1 + correlation) / (1 - correlation), _block_inflation(values))


def _block_inflation(values: list[float]) -> float:
    means = [statistics.fmean(values[start : start + BLOCK]) for start in range(0, len(values) - BLOCK + 1, BLOCK)]
    if len(means) < 2 * BLOCK:
        return 1.0
    middle = statistics.median(means)
    return BLOCK * (MAD_TO_SIGMA * statistics.median([abs(mean - middle) for mean in means])) ** 2


MIN_LEVEL_BINS = 8  # below it, the previous level counts for the missing bins
REFRESH_DIVISOR = 30  # a level is estimated again once a 30th of its bins is new
RISE_NATS = 12.0  # log-likelihood ratio at which a rise is accepted; a false one costs only a new estimate
PRIOR_SPREAD, LEAST_SPREAD = 0.5, 0.12  # of m (1 - m), the variance of one request that hits all or nothing
NEIGHBOURS_RATIO = 1.5  # the largest variance of all bins, relative to that between neighbours
LEAST_VARIANCE = 0.05**2
ROBUST_LOSS = 1.1  # variance of the robust mean divided by that of the mean, for a normal distribution
OUTLIER = 3.0  # standard deviations


class Sample(NamedTuple):
    """Hit rate and number of requests of a bin."""

    ratio: float
    requests: float


class Level:
    """One task group: add bins, read ``ratio`` and ``variance``."""

    __slots__ = (
        "_bins_until_estimate",
        "_held",
        "_prior",
        "_rise",
        "_rising",
        "_samples",
        "level_variance",
        "ratio",
        "request_variance",
    )

    def __init__(self, most: int) -> None:
        self._samples: deque[Sample] = deque(maxlen=most)
        self._held: list[Sample] = []
        self._rising: list[Sample] = []
        self._rise = 0.0
        self._prior: float | None = None
        self._bins_until_estimate = 0
        self.ratio: float | None = None  # the level; None until there are MIN_LEVEL_BINS bins
        self.request_variance = 0.0  # of the hit rate of one request
        self.level_variance = 0.0

    def variance(self, requests: float) -> float:
        """Variance of the hit rate of a bin with this many requests."""
        return self.request_variance / max(requests, 1.0)

    def add(self, sample: Sample, drop: float, inflation: float, *, hold: bool, may_rise: bool = True) -> bool:
        """Add a bin; ``hold`` holds it back for now. Returns whether the level rose and was estimated again."""
        has_risen = may_rise and self.ratio is not None and self._has_risen(sample, self.ratio, drop, inflation)
        if has_risen:
            self.restart(self._rising)
        elif hold and self.ratio is not None:
            self._held.append(sample)
        else:
            self._release()
            self._append(sample)
        return has_risen

    def restart(self, samples: Sequence[Sample] | None = None) -> None:
        """Estimate the level from these or the held bins; the previous level contributes until there are enough."""
        samples = list(self._held if samples is None else samples)
        self._held, self._rising, self._rise = [], [], 0.0
        self._prior = self.ratio
        self._samples.clear()
        self._samples.extend(samples)
        self._estimate()

    def keep_latest(self, count: int) -> None:
        """Estimate the level again from the latest bins."""
        self._release()
        self.restart(list(self._samples)[-count:])

    def forget_held(self) -> None:
        """Discard the bins of an excursion."""
        self._held = []

    def _release(self) -> None:
        self._samples.extend(self._held)
        self._held = []

    def _append(self, sample: Sample) -> None:
        self._samples.append(sample)
        self._bins_until_estimate -= 1
        if self._bins_until_estimate <= 0:
            self._estimate()

    def _has_risen(self, sample: Sample, level: float, drop: float, inflation: float) -> bool:
        """Advance the upward CUSUM by one bin; whether it crossed ``RISE_NATS``."""
        above = sample.ratio - level - self.level_variance**0.5
        step = drop * (above - drop / 2) / (self.variance(sample.requests) * inflation)
        self._rise = max(self._rise + min(step, RISE_NATS / 3), 0.0)
        self._rising = [*self._rising, sample] if self._rise else []
        return self._rise > RISE_NATS

    def _estimate(self) -> None:
        """Set the level and its variances from the collected bins, and from the previous level while bins are few."""
        count = len(self._samples)
        self._bins_until_estimate = count // REFRESH_DIVISOR
        if not count or (count < MIN_LEVEL_BINS and self._prior is None and self.ratio is None):
            return
        middle = centre(self._samples)
        if count < MIN_LEVEL_BINS and self._prior is not None:
            middle = (count * middle + (MIN_LEVEL_BINS - count) * self._prior) / MIN_LEVEL_BINS
        self.ratio = middle
        self.request_variance = self._request_variance_around(middle)
        requests = sum(sample.requests for sample in self._samples)
        self.level_variance = ROBUST_LOSS * self.request_variance / max(requests, 1.0)

    def _request_variance_around(self, middle: float) -> float:
        """Variance of one request: robust, not below a minimum, and close to an assumption while bins are few."""
        bernoulli = max(middle * (1 - middle), LEAST_VARIANCE)
        deviations = sorted(abs(sample.ratio - middle) * sample.requests**0.5 for sample in self._samples)
        count = len(deviations)
        robust = MAD_TO_SIGMA * deviations[count // 2]
        # without the largest outliers; above the robust estimate for skewed deviations
        limited = sum(min(value, OUTLIER * robust) ** 2 for value in deviations) / count
        largest = NEIGHBOURS_RATIO * self._variance_between_neighbours(OUTLIER * robust)
        measured: float = min(max(robust**2, limited), largest)
        blended = (count * measured + MIN_LEVEL_BINS * PRIOR_SPREAD * bernoulli) / (count + MIN_LEVEL_BINS)
        return max(blended, LEAST_SPREAD * bernoulli, LEAST_VARIANCE)

    def _variance_between_neighbours(self, limit: float) -> float:
        """Variance of one request, from the differences of successive bins, to which a trend adds little.

        ``limit``: standard deviation to which larger differences are limited. von Neumann, "Distribution of the ratio
        of the mean square successive difference to the variance", 1941.
        """
        pairs = list(pairwise(self._samples))
        squares = [(a.ratio - b.ratio) ** 2 / (1 / a.requests + 1 / b.requests) for a, b in pairs]
        return sum(min(square, limit**2) for square in squares) / len(squares) if squares else math.inf


def centre(samples: Collection[Sample]) -> float:
    """The mean weighted by requests, with outliers limited to ``OUTLIER`` deviations from the median (Huber).

    The median alone is above the mean for bins of few requests, most of which hit a lot and some of which nothing.
    """
    middle = weighted_median([(sample.ratio, sample.requests) for sample in samples])
    spread = MAD_TO_SIGMA * weighted_median([(abs(sample.ratio - middle), sample.requests) for sample in samples])
    limit = OUTLIER * max(spread, LEAST_VARIANCE)
    weight = sum(sample.requests for sample in samples)
    deviation = sum(min(max(sample.ratio - middle, -limit), limit) * sample.requests for sample in samples)
    return middle + deviation / weight


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
TESTED_HOURS = 24
MIN_DAYS = 3  # with data of the same hour
LEAST_SIGMA = 0.02
LEAST_HOURS = 3  # below the usual rate that an alarm needs


@dataclass(frozen=True, slots=True)
class Decline:
    """A decline that has not ended: the mean of its hours, and the usual rate at these hours."""

    level: float
    ratio: float
    change_point: datetime
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
    """The decline that lasts until the newest whole hour; None if there is none, or too little data."""
    last = now.replace(minute=0, second=0, microsecond=0) - HOUR
    rows = [
        (at, hours[at], usual)
        for at in (last - HOUR * back for back in range(TESTED_HOURS - 1, -1, -1))
        if at in hours and len(usual := _rates_on_earlier_days(hours, at, days)) >= MIN_DAYS
    ]
    if not rows:
        return None
    sigma = _sigma([usual for _, _, usual in rows])
    threshold = math.log(max(quiet_days * 24.0, 10.0))
    score, first = 0.0, 0
    for index, (_, hour, usual) in enumerate(rows):
        gain = drop * (statistics.median(usual) - hour.ratio - drop / 2) / sigma**2
        score = max(score + min(gain, threshold / LEAST_HOURS), 0.0)
        first = index + 1 if score == 0.0 else first
    low_hours = rows[first:]
    if score <= threshold or len(low_hours) < LEAST_HOURS:
        return None
    return _decline(low_hours)


def _rates_on_earlier_days(hours: Mapping[datetime, Hour], at: datetime, days: int) -> list[float]:
    """Rates at the same hour of the days before ``at``, newest first."""
    same_hours = (hours.get(at - DAY * back) for back in range(1, days + 1))
    return [hour.ratio for hour in same_hours if hour is not None]


def _sigma(usual_rates: Sequence[Sequence[float]]) -> float:
    deviations = [abs(ratio - statistics.median(usual)) for usual in usual_rates for ratio in usual]
    return max(MAD_TO_SIGMA * statistics.median(deviations), LEAST_SIGMA)


def _decline(low_hours: Sequence[tuple[datetime, Hour, list[float]]]) -> Decline:
    tokens = sum(hour.tokens for _, hour, _ in low_hours)
    return Decline(
        level=sum(statistics.median(usual) * hour.tokens for _, hour, usual in low_hours) / tokens,
        ratio=sum(hour.ratio * hour.tokens for _, hour, _ in low_hours) / tokens,
        change_point=low_hours[0][0],
        days=min(len(usual) for _, _, usual in low_hours),
        tokens=tokens,
        requests=sum(hour.requests for _, hour, _ in low_hours),
    )
