"""Ratios of sums with errors valid for repeated analyses, and weights that give the baseline the canary's mix. Pure.

Theory of operation. A hit rate is tokens divided by tokens: each bin adds a numerator and a denominator, and their sums
are divided. The error of the ratio is estimated from how the bins scatter around it (the ratio estimator's linear
variance), which accounts for the similarity of requests in one bin. An analysis runs again and again while bins arrive.
An ordinary confidence interval that is looked at a hundred times is wrong far more often than stated; the bounds here
hold at all times at once: the asymptotic confidence sequence of Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas,
"Time-uniform central limit theory and asymptotic confidence sequences", Annals of Statistics 2024, theorem 2.2.

A share of the prefixes has other prompts than the rest. Most of the difference is the task group: one group hits what
another never does, and a canary with more of the one would look better or worse for that reason alone. So the baseline
is weighted, group by group, until it has the canary's mix (direct standardization). The canary's traffic of groups that
the baseline hardly has is compared with the whole baseline, and so is everything if no group is known or shared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ALPHA = 0.05  # probability that a bound ever fails, over all looks
TIGHTEST_AT = 10  # number of bins at which the bounds are tightest
MIN_BINS = 3  # to estimate the scatter

_LOG = -2 * math.log(ALPHA)
_RHO2 = (_LOG + math.log(_LOG + 1)) / TIGHTEST_AT


@dataclass(frozen=True, slots=True)
class Part:
    """Contribution of one bin to a ratio, such as cached tokens of prompt tokens."""

    numerator: float
    denominator: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its error."""

    value: float
    variance: float  # of the value; 0 if it is exact
    bins: int

    def __sub__(self, other: Estimate) -> Estimate:
        """Difference of two independent estimates."""
        return Estimate(self.value - other.value, self.variance + other.variance, min(self.bins, other.bins))

    @property
    def margin(self) -> float:
        """Largest error of the value, at all times at once; infinite for too few bins."""
        return max_error(self.bins) * math.sqrt(self.variance * self.bins) if self.bins >= MIN_BINS else math.inf


def max_error(bins: int) -> float:
    """Largest error of a mean of ``bins`` bins in standard deviations of one bin, at all times at once."""
    spread = bins * _RHO2 + 1
    return math.sqrt(2 * spread / (bins * bins * _RHO2) * math.log(math.sqrt(spread) / ALPHA))


def ratio_of_sums(parts: Sequence[Part]) -> Estimate | None:
    """The ratio with the variance estimated from the scatter of the bins; None without traffic."""
    deviations = _deviations(parts)
    if deviations is None:
        return None
    return Estimate(_ratio(parts), _variance(deviations), sum(part.denominator > 0 for part in parts))


def difference_of_ratios(a: Sequence[Part], b: Sequence[Part]) -> Estimate | None:
    """The first ratio minus the second. Compared bin by bin, so that a change of both at once does not count.

    None if either has no traffic. ValueError for sequences of different length.
    """
    first, second = _deviations(a), _deviations(b)
    if first is None or second is None:
        return None
    variance = _variance([x - y for x, y in zip(first, second, strict=True)])
    bins = sum(x.denominator > 0 and y.denominator > 0 for x, y in zip(a, b, strict=True))
    return Estimate(_ratio(a) - _ratio(b), variance, bins)


def with_chance_variance(estimate: Estimate, *sides: Sequence[Part]) -> Estimate:
    """The estimate with at least the variance that chance alone gives to a share of this many events.

    Otherwise a share of 0 in a few bins would count as certain; (k + 1) / (n + 2) prevents that.
    """
    chance = 0.0
    for parts in sides:
        total = sum(part.denominator for part in parts)
        smoothed = (sum(part.numerator for part in parts) + 1) / (total + 2)
        chance += smoothed * (1 - smoothed) / total
    return Estimate(estimate.value, max(estimate.variance, chance), estimate.bins)


def _ratio(parts: Sequence[Part]) -> float:
    return sum(part.numerator for part in parts) / sum(part.denominator for part in parts)


def _deviations(parts: Sequence[Part]) -> list[float] | None:
    """Contribution of each bin to the deviation from the ratio; they sum to 0. None without traffic."""
    total = sum(part.denominator for part in parts)
    if total <= 0:
        return None
    ratio = _ratio(parts)
    return [(part.numerator - ratio * part.denominator) / total for part in parts]


def _variance(deviations: Sequence[float]) -> float:
    """Variance of a sum of deviations; empty bins, whose deviation is 0, do not count."""
    count = sum(deviation != 0 for deviation in deviations)
    return sum(deviation**2 for deviation in deviations) * count / max(count - 1, 1)


MIN_GROUP_REQUESTS = 10  # of a baseline's group: with fewer, chance would matter as much as the group


def mix_weights(
    canary: Mapping[str, float], baseline: Mapping[str, float], measured_groups: set[str]
) -> dict[str, float]:
    """Weight of one unit of each of the baseline's groups; the total of the baseline does not change.

    Both sides are amounts, such as tokens, by task group; ``measured_groups`` are groups with enough baseline traffic.
    """
    canary_total, baseline_total = sum(canary.values()), sum(baseline.values())
    if not canary_total or not baseline_total:
        return dict.fromkeys(baseline, 1.0)
    own = {
        group: canary.get(group, 0.0) / amount
        for group, amount in baseline.items()
        if group in measured_groups and amount
    }
    rest = sum(amount for group, amount in canary.items() if group not in own) / baseline_total
    return {group: (own.get(group, 0.0) + rest) * baseline_total / canary_total for group in baseline}
