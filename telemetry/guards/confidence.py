"""The difference of two sides of a canary, each compared with its own past, with errors valid for repeated analyses.

Theory of operation. Four cells of requests: canary and baseline, now and before the rollout. Each has a ratio of sums,
such as cached tokens divided by prompt tokens, and the difference is (canary now - before) - (baseline now - before).
Its error is estimated twice, and the larger one counts:

* from how the bins of time scatter: requests of the same minute are similar, and so are those of the next one;
* from how the prompts scatter, by the jackknife: how far the difference moves when one prompt is left out of all cells
  (Efron and Stein, "The jackknife estimate of variance", Annals of Statistics 1981). A session has one prompt, so its
  requests count together; a prompt's own level is in both of its periods and cancels. With few prompts, or some that
  have most of the work, Student's distribution with the effective number of prompts makes the interval wide.

An analysis runs again and again while bins arrive. An ordinary confidence interval that is looked at a hundred times is
wrong far more often than stated; the bounds from bins hold at all times at once. Those from prompts need not: the
prompts, and what is peculiar to them, stay the same from one analysis to the next. Source: the asymptotic confidence
sequence of Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas, "Time-uniform central limit theory and asymptotic
confidence sequences", Annals of Statistics 2024, theorem 2.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ALPHA = 0.05  # probability that a bound ever fails, over all looks
TIGHTEST_AT = 10  # number of bins at which the bounds are tightest
MIN_BINS = 3  # to estimate the scatter
RARE = 2.33  # normal deviate that is exceeded in 1 % of cases: for the scatter of prompts

_LOG = -2 * math.log(ALPHA)
_RHO2 = (_LOG + math.log(_LOG + 1)) / TIGHTEST_AT

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class Cell:
    """One side's requests in one period, as columns."""

    def __init__(self, numerators: Floats, denominators: Floats, bins: Integers, prompts: Integers) -> None:
        self.bins = bins  # number of each request's bin, from 0
        self.prompts = prompts  # number of each request's prompt, the same in all cells
        self.numerator, self.denominator = float(numerators.sum()), float(denominators.sum())
        self.ratio: float | None = None  # sum divided by sum; None without any
        self.deviations = self.prompt_shares = np.zeros(0)
        if self.denominator > 0:
            self.ratio = self.numerator / self.denominator
            # Each request's contribution to the deviation from the ratio; they sum to 0.
            self.deviations = (numerators - self.ratio * denominators) / self.denominator
            self.prompt_shares = np.bincount(prompts, denominators) / self.denominator
            self.busy_bins = int(np.count_nonzero(np.bincount(bins, denominators)))

    @property
    def effective_prompts(self) -> float:
        """(Sum of the work)^2 / sum of its squares: of equally frequent prompts with the same error."""
        return 1 / float((self.prompt_shares**2).sum())

    def chance_variance(self) -> float:
        """Variance that chance alone gives to a share of this many events; (k + 1) / (n + 2): never 0."""
        smoothed = (self.numerator + 1) / (self.denominator + 2)
        return smoothed * (1 - smoothed) / self.denominator

    def moves(self, size: int) -> Floats:
        """How far the ratio moves when a prompt is left out, exactly."""
        moves = np.zeros(size)
        with np.errstate(divide="ignore", invalid="ignore"):
            sums = np.bincount(self.prompts, self.deviations) / (1 - self.prompt_shares)
        moves[: len(sums)] = np.where(self.prompt_shares < 1, sums, np.inf)
        return moves


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference of ratios and its error. Compare ``value`` with ``margin``."""

    value: float
    margin: float  # largest error, at all times at once; infinite for too few bins


def difference(
    now: tuple[Cell, Cell],
    before: tuple[Cell, Cell] | None,
    *,
    effective_prompts: float | None,
    counts_events: bool,
) -> Difference:
    """The first cell's ratio minus the second's, now, minus the same before. Each cell has a denominator.

    ``effective_prompts``: of the side with fewer; None: the scatter of prompts says nothing. With ``counts_events`` the
    error is at least that of chance: otherwise 0 in a few bins would count as certain.
    """
    value, by_time = 0.0, 0.0
    moves = np.zeros(max(len(cell.prompt_shares) for pair in (now, before or now) for cell in pair))
    for pair, sign in ((now, 1.0), *(((before, -1.0),) if before else ())):
        value += sign * ((pair[0].ratio or 0.0) - (pair[1].ratio or 0.0))
        by_time += _scatter(*pair)
        if effective_prompts is not None:
            moves += sign * (pair[0].moves(len(moves)) - pair[1].moves(len(moves)))
    if counts_events:
        by_time = max(by_time, sum(cell.chance_variance() for pair in (now, before or ()) for cell in pair))
    bins = min(cell.busy_bins for cell in now)
    if bins < MIN_BINS:
        return Difference(value, math.inf)
    errors = max_error(bins) * math.sqrt(bins)  # in standard errors
    margin = errors * math.sqrt(by_time)
    if effective_prompts is not None:
        errors = student(RARE, effective_prompts - 1)
        margin = max(margin, errors * float(np.sqrt((moves**2).sum())))
    return Difference(value, margin)


def _scatter(first: Cell, second: Cell) -> float:
    """Variance of the difference of two ratios, from bins of the same time: what changes in both does not count.

    Neighbouring bins may be similar, because a session lasts longer than one: their covariance is added.
    """
    size = 1 + max(int(cell.bins.max()) for cell in (first, second))
    sums = np.bincount(first.bins, first.deviations, size) - np.bincount(second.bins, second.deviations, size)
    count = int(np.count_nonzero(sums))
    neighbours = max(float((sums[1:] * sums[:-1]).sum()), 0.0)
    return (float((sums**2).sum()) + 2 * neighbours) * count / max(count - 1, 1)


def max_error(bins: int) -> float:
    """Largest error of a mean of ``bins`` bins in standard deviations of one bin, at all times at once."""
    spread = bins * _RHO2 + 1
    return math.sqrt(2 * spread / (bins * bins * _RHO2) * math.log(math.sqrt(spread) / ALPHA))


def student(normal: float, freedom: float) -> float:
    """The quantile of Student's distribution that is as rare as this one of the normal distribution.

    Peizer's expansion (Abramowitz and Stegun 26.7.5), within 6 % for 4 degrees of freedom and deviates below 3.3.
    """
    z = normal
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )
