"""The difference of two sides of a canary, each compared with its own past, with errors valid for repeated analyses.

Theory of operation. Four cells of requests: canary and baseline, now and before the rollout. Each has a ratio of sums,
such as cached tokens divided by prompt tokens, and the difference is (canary now - before) - (baseline now - before).
The question is how large a difference a canary without an effect may have:

* Chance gives a ratio p of n requests the variance p (1 - p) / n, with the p that is expected of the canary. Requests
  of a minute or session are similar, and the variance is larger by a factor, the *design effect* (Kish, "Survey
  Sampling", 1965). The time before shows it: how far its bins scattered, with their neighbours, relative to chance.
  Rare events are skewed, which is a term of Cornish and Fisher's expansion.
* Prompts change by themselves. How differently is known from the baseline's, by the jackknife: how far the difference
  moves when one prompt is left out (Efron and Stein, "The jackknife estimate of variance", Annals of Statistics 1981).
  A prompt's own level is in both periods and cancels. And no single prompt of the canary decides: the margin grows by
  how far the difference moves without the most influential one, beyond two standard errors of that prompt's chance.

An analysis runs again and again while bins arrive. An ordinary confidence interval that is looked at a hundred times is
wrong far more often than stated; these bounds hold at all times at once. Source: the asymptotic confidence sequence of
Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas, "Time-uniform central limit theory and asymptotic confidence
sequences", Annals of Statistics 2024, the one-sided form of theorem 2.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ALPHA = 0.05  # probability that a bound ever fails in its direction, over all analyses
TIGHTEST_AT = 10  # number of bins at which the bounds are tightest
MIN_BINS = 3  # to estimate the scatter

_LOG = -2 * math.log(2 * ALPHA)
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
            # (Sum of the work)^2 / sum of its squares: as many of equal size have the same error.
            self.effective_requests = self.denominator**2 / float((denominators**2).sum())
            self.effective_prompts = 1 / float((self.prompt_shares**2).sum())
            others = np.sort(self.prompt_shares)[:-1]
            self.other_prompts = float(others.sum()) ** 2 / max(float((others**2).sum()), 1e-12)  # besides the largest
            # With one hit and one miss more: never 0 or 1, as if nothing else could happen.
            self.smoothed = (self.ratio * self.effective_requests + 1) / (self.effective_requests + 2)

    def chance(self, ratio: float) -> float:
        """Variance that chance alone gives to the ratio of so many requests, if the true one is ``ratio``."""
        return ratio * (1 - ratio) / self.effective_requests

    def by_prompt_and_bin(self) -> Floats:
        """Deviations of each prompt in each bin, in order, with a gap between bins that are no neighbours."""
        keys, codes = np.unique(self.prompts * (int(self.bins.max()) + 2) + self.bins, return_inverse=True)
        places = np.cumsum(np.minimum(np.diff(keys, prepend=0), 2))[codes]
        return np.bincount(places, self.deviations).astype(np.float64)

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
    by_prompts: bool,
    counts_events: bool,
    effect: float = 0.0,
) -> Difference:
    """The first cell's ratio minus the second's, now, minus the same before. Each cell has a denominator.

    ``by_prompts``: sides have other prompts, which may have changed by themselves. With ``counts_events``, or
    without a past, the error is at least that of chance. The margin is that of a canary whose true
    ratio is ``effect`` higher than expected.
    """
    sides = tuple(zip(now, before or (None, None), strict=True))
    changes = [(cell.ratio or 0.0) - (past.ratio or 0.0 if past else 0.0) for cell, past in sides]
    value = changes[0] - changes[1]
    bins = min(cell.busy_bins for cell in now)
    if bins < MIN_BINS:
        return Difference(value, math.inf)
    known = before or now
    chances = [cell.chance(cell.smoothed) for cell in known]
    design_effect = _scatter(_by_bin(*known)) / sum(chances)
    if counts_events or not before:  # Few bins, or a few events in them, may scatter little by chance.
        design_effect = max(design_effect, 1.0)
    if counts_events and not by_prompts:  # The baseline has more sessions: it shows how many failures come at once.
        design_effect = max(design_effect, _scatter(known[1].by_prompt_and_bin()) / chances[1])
    expected = (known[0].smoothed + max(changes[1], 0.0)) if before else now[1].smoothed
    expected = min(max(expected + effect, 0.0), 1.0)
    canary, baseline = (
        design_effect * (cell.chance(ratio) + (past.chance(past.smoothed) if past else 0.0))
        for (cell, past), ratio in zip(sides, (expected, now[1].smoothed), strict=True)
    )
    variance, margin = canary + baseline, 0.0
    if by_prompts:
        size = max(len(cell.prompt_shares) for pair in (now, before or now) for cell in pair)
        moves, of_others = (cell.moves(size) - (past.moves(size) if past else 0.0) for cell, past in sides)
        changed = max(float((of_others**2).sum()) - baseline, 0.0) * now[1].effective_prompts  # variance of a prompt
        variance += changed * sum(1 / cell.effective_prompts for cell in now)
        shares = np.pad(now[0].prompt_shares, (0, size - len(now[0].prompt_shares)))
        margin = math.sqrt(max(float((moves**2 - 4 * canary * shares).max()), 0.0))  # beyond two standard errors
    deviate = max_error(bins) * math.sqrt(bins)
    skew = design_effect * abs(1 - 2 * expected) * (deviate**2 - 1) / 6 / now[0].effective_requests
    return Difference(value, margin + deviate * math.sqrt(variance) + skew)


def _by_bin(first: Cell, second: Cell) -> Floats:
    """Deviations of the difference of two ratios in each bin: what changes in both does not count."""
    size = 1 + max(int(cell.bins.max()) for cell in (first, second))
    sums = (np.bincount(cell.bins, cell.deviations, size).astype(np.float64) for cell in (first, second))
    return next(sums) - next(sums)


def _scatter(sums: Floats) -> float:
    """Variance of a total, from its parts in order of time.

    Neighbouring bins may be similar, because a session lasts longer than one: their covariance is added.
    """
    count = int(np.count_nonzero(sums))
    neighbours = max(float((sums[1:] * sums[:-1]).sum()), 0.0)
    return (float((sums**2).sum()) + 2 * neighbours) * count / max(count - 1, 1)


def max_error(bins: int) -> float:
    """Largest error of a mean of ``bins`` bins in standard deviations of a bin, in one direction, at all times."""
    spread = bins * _RHO2 + 1
    return math.sqrt(2 * spread / (bins * bins * _RHO2) * math.log1p(math.sqrt(spread) / (2 * ALPHA)))
