"""Ratios of sums, and how surely one differs from another, however often one looks.

Theory of operation. A hit rate is tokens over tokens: each bin of time brings a numerator and a denominator, and their
sums divide (H2). What a sum's ratio is worth is told by how the bins scatter around it (the ratio estimator's linear
variance), which takes in that requests of one bin are alike. A guard looks again and again while bins come in, and an
ordinary interval that is looked at a hundred times lies far more often than it says; the bounds here hold at all times
at once: the asymptotic confidence sequence of Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas, "Time-uniform central
limit theory and asymptotic confidence sequences", Annals of Statistics 2024, theorem 2.2.

What one request of the baseline stands for, so that its task groups weigh as the trial's do. Pure.

Theory of operation. A share of the prefixes takes in other prompts than the rest. Most of how these differ is their
task groups: what one group hits, another never does, and a trial that got more of the one would look better or worse
by that alone. So the baseline is weighed, group by group, until it has the trial's mix (direct standardization). What
the trial has of groups that the baseline hardly has stands beside the baseline as a whole, as all does where no group
is told or none is shared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ALPHA = 0.05  # the chance that a bound ever fails, over all looks
TIGHTEST_AT = 10  # bins at which the bounds are as tight as they can be made
MIN_BINS = 3  # fewer say nothing about how bins scatter

_LOG = -2 * math.log(ALPHA)
_RHO2 = (_LOG + math.log(_LOG + 1)) / TIGHTEST_AT


@dataclass(frozen=True, slots=True)
class Part:
    """What one bin adds to a ratio, such as cached tokens of prompt tokens."""

    counted: float
    of: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure, and the error that it may have."""

    value: float
    variance: float  # of the value; 0 for what is known exactly
    bins: int

    def __sub__(self, other: Estimate) -> Estimate:
        """The difference of two that were measured apart."""
        return Estimate(self.value - other.value, self.variance + other.variance, min(self.bins, other.bins))

    @property
    def margin(self) -> float:
        """How far the truth may be from the value, at all times at once; infinite for too few bins."""
        return reach(self.bins) * math.sqrt(self.variance * self.bins) if self.bins >= MIN_BINS else math.inf


def reach(bins: int) -> float:
    """Standard deviations of one bin that a mean of so many may be off, at all times at once."""
    spread = bins * _RHO2 + 1
    return math.sqrt(2 * spread / (bins * bins * _RHO2) * math.log(math.sqrt(spread) / ALPHA))


def ratio_of_sums(parts: Sequence[Part]) -> Estimate | None:
    """The ratio, with the variance that the bins' scatter says; None where nothing was asked."""
    deviations = _deviations(parts)
    if deviations is None:
        return None
    return Estimate(_ratio(parts), _variance(deviations), sum(part.of > 0 for part in parts))


def difference_of_ratios(ones: Sequence[Part], others: Sequence[Part]) -> Estimate | None:
    """One ratio minus the other, of bins side by side: what moves both in the same minute is taken for no difference.

    None where either has nothing. ValueError for sides of unlike length.
    """
    first, second = _deviations(ones), _deviations(others)
    if first is None or second is None:
        return None
    pairs = [(a - b, one.of > 0 and other.of > 0) for a, b, one, other in zip(first, second, ones, others, strict=True)]
    variance = _variance([deviation for deviation, _ in pairs])
    return Estimate(_ratio(ones) - _ratio(others), variance, sum(both for _, both in pairs))


def with_chance(estimate: Estimate, *sides: Sequence[Part]) -> Estimate:
    """The same, with no less variance than chance alone gives to shares of so many events.

    Without this a share of 0 in a few bins would pass for certain; (k + 1) / (n + 2) keeps it from that.
    """
    chance = 0.0
    for parts in sides:
        total = sum(part.of for part in parts)
        smoothed = (sum(part.counted for part in parts) + 1) / (total + 2)
        chance += smoothed * (1 - smoothed) / total
    return Estimate(estimate.value, max(estimate.variance, chance), estimate.bins)


def _ratio(parts: Sequence[Part]) -> float:
    return sum(part.counted for part in parts) / sum(part.of for part in parts)


def _deviations(parts: Sequence[Part]) -> list[float] | None:
    """What each bin adds to the ratio's deviation from itself: they sum to 0; None where nothing was asked."""
    total = sum(part.of for part in parts)
    if total <= 0:
        return None
    ratio = _ratio(parts)
    return [(part.counted - ratio * part.of) / total for part in parts]


def _variance(deviations: Sequence[float]) -> float:
    """Of a sum of so many deviations; those that are 0 because their bin is empty count for none."""
    count = sum(deviation != 0 for deviation in deviations)
    return sum(deviation**2 for deviation in deviations) * count / max(count - 1, 1)


LEAST_REQUESTS = 10  # of a group at the baseline: with fewer, chance would weigh as much as the group


def weights(trial: Mapping[str, float], baseline: Mapping[str, float], known: set[str]) -> dict[str, float]:
    """What one unit of each of the baseline's groups counts for; all of it counts for as much as before.

    Both sides are given as units, tokens say, by task group; ``known`` are the groups whose baseline can be relied on.
    """
    wanted, there = sum(trial.values()), sum(baseline.values())
    if not wanted or not there:
        return dict.fromkeys(baseline, 1.0)
    own = {group: trial.get(group, 0.0) / units for group, units in baseline.items() if group in known and units}
    rest = sum(units for group, units in trial.items() if group not in own) / there
    return {group: (own.get(group, 0.0) + rest) * there / wanted for group in baseline}
