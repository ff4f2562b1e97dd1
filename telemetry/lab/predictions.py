"""Figures of replayed scenarios: hit rate, TTFT, prefill time and load skew, with differences and their uncertainty.

Theory of operation. Two scenarios replay the same requests, so only their paired difference is reported with an
interval. Requests of neighbouring seconds are not independent: the counted span is divided into bins, and blocks of
consecutive bins are drawn with replacement (moving-block bootstrap, Kunsch 1989), the same ones for both scenarios. The
error of block sampling (SHARDS) is independent of that and is added to the interval of hit rates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telemetry.lab.chains import Coded, Floats, Integers

BINS = 60  # of the counted span, at least MIN_BIN_S long
MIN_BIN_S = 5.0
BLOCK_BINS = 4  # consecutive bins that are drawn together
RESAMPLES = 400
GROWTH = 1.05  # of TTFT buckets
SHORTEST_S = 0.001
BUCKETS = 300
CONFIDENCE = 0.95
MAX_HIT_ERROR = 0.03  # of a calibrated replay, hit rate
MAX_TTFT_ERROR = 0.20  # of a calibrated replay, relative, TTFT p50 and p95
MIN_REQUESTS = 100  # counted, for a calibrated replay
Booleans = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One scenario's results, as columns of counted requests."""

    at_s: Floats
    prompt_tokens: Integers
    cached_tokens: Floats  # NaN: unknown
    ttft_s: Floats  # NaN: none
    prefill_s: Floats  # engine time for uncached tokens
    engines: Integers
    engine_count: int
    groups: Coded


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a scenario or of one of its task groups; None: unknown."""

    requests: int
    prompt_tokens: int
    hit_rate: float | None  # cached / prompt tokens, 0 to 1
    ttft_mean_s: float | None
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    ttft_p99_s: float | None
    prefill_gpu_s: float | None  # over all engines
    load_max_over_mean: float | None  # requests


def figures(outcome: Outcome, rows: Booleans | None = None) -> Figures:
    """Figures of all requests, or of those at ``rows``."""
    selected = np.ones(len(outcome.at_s), np.bool_) if rows is None else rows
    known = selected & ~np.isnan(outcome.cached_tokens)
    ttft_s = outcome.ttft_s[selected]
    ttft_s = ttft_s[~np.isnan(ttft_s)]
    queried = int(outcome.prompt_tokens[known].sum())
    prefill_s = outcome.prefill_s[selected]
    loads = np.bincount(outcome.engines[selected], minlength=outcome.engine_count)
    return Figures(
        int(selected.sum()),
        int(outcome.prompt_tokens[selected].sum()),
        float(outcome.cached_tokens[known].sum()) / queried if queried else None,
        float(ttft_s.mean()) if len(ttft_s) else None,
        _quantile(ttft_s, 0.5),
        _quantile(ttft_s, 0.95),
        _quantile(ttft_s, 0.99),
        float(prefill_s.sum()) if not np.isnan(prefill_s).any() else None,
        float(loads.max() / loads.mean()) if loads.sum() else None,
    )


def _quantile(values: Floats, q: float) -> float | None:
    return float(np.quantile(values, q)) if len(values) else None


def figures_by_group(outcome: Outcome) -> dict[str, Figures]:
    """Figures of each task group ("": none), most requests first."""
    counts = np.bincount(outcome.groups.codes, minlength=len(outcome.groups.names))
    return {
        outcome.groups.names[code]: figures(outcome, outcome.groups.codes == code)
        for code in np.argsort(-counts, kind="stable").tolist()
        if counts[code]
    }


@dataclass(frozen=True, slots=True)
class Interval:
    """A difference with the bounds of its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def sign(self) -> int:
        """1 or -1 if the whole interval is above or below 0, else 0."""
        return 1 if self.low > 0 else -1 if self.high < 0 else 0


@dataclass(frozen=True, slots=True)
class Difference:
    """Candidate minus baseline; None: one of the two is unknown."""

    hit_rate: Interval | None  # 0 to 1
    ttft_p50: Interval | None  # relative: -0.5 is half
    ttft_p95: Interval | None
    prefill: Interval | None  # relative


class Verdict(StrEnum):
    """What a candidate would bring."""

    BETTER = "better"
    WORSE = "worse"
    OVERLOAD = "overload"  # the queue of some replicas grows until the end, whatever the figures
    MIXED = "mixed"  # one figure improves and another gets worse
    SAME = "same"  # no difference beyond the uncertainty
    UNKNOWN = "unknown"  # not calibrated, or not replayed


def verdict(difference: Difference | None, *, overloaded_replicas: int = 0) -> Verdict:
    """By hit rate, TTFT p50 and TTFT p95; a difference counts if its interval excludes 0."""
    if difference is None:
        return Verdict.UNKNOWN
    if overloaded_replicas:
        return Verdict.OVERLOAD
    gains = {
        difference.hit_rate.sign if difference.hit_rate else 0,
        -difference.ttft_p50.sign if difference.ttft_p50 else 0,
        -difference.ttft_p95.sign if difference.ttft_p95 else 0,
    }
    if {1, -1} <= gains:
        return Verdict.MIXED
    return Verdict.BETTER if 1 in gains else Verdict.WORSE if -1 in gains else Verdict.SAME


def difference(candidate: Outcome, baseline: Outcome, *, sampling_error: float, seed: int = 1) -> Difference:
    """Paired difference of two scenarios; ``sampling_error``: standard error of a hit rate from block sampling."""
    bins = _bins(baseline.at_s)
    size = int(bins.max()) + 1 if len(bins) else 0
    if size < 2:
        return Difference(None, None, None, None)
    draws = _draws(size, seed)
    own, base = _BinSums.of(candidate, bins, size), _BinSums.of(baseline, bins, size)
    hit = _interval(own.hit_rates(draws), base.hit_rates(draws))
    if hit is not None:
        extra = 1.96 * sampling_error
        hit = Interval(hit.value, hit.low - extra, hit.high + extra)
    return Difference(
        hit,
        _interval(own.quantiles(draws, 0.5), base.quantiles(draws, 0.5), relative=True),
        _interval(own.quantiles(draws, 0.95), base.quantiles(draws, 0.95), relative=True),
        _interval(own.prefill(draws), base.prefill(draws), relative=True),
    )


def _bins(at_s: Floats) -> Integers:
    if not len(at_s):
        return np.empty(0, np.int64)
    width_s = max(MIN_BIN_S, float(at_s[-1] - at_s[0]) / BINS)
    bins: Integers = ((at_s - at_s[0]) / width_s).astype(np.int64)
    return bins


def _draws(size: int, seed: int) -> Floats:
    """How often each resample draws each bin; the first row draws every bin once."""
    random = np.random.default_rng(seed)
    block = min(BLOCK_BINS, size)
    starts = random.integers(0, size - block + 1, (RESAMPLES, -(-size // block)))
    drawn = (starts[:, :, None] + np.arange(block)).reshape(RESAMPLES, -1)
    weights = np.zeros((RESAMPLES + 1, size))
    weights[0] = 1.0
    np.add.at(weights, (np.arange(1, RESAMPLES + 1)[:, None], drawn), 1.0)
    return weights


@dataclass(frozen=True, slots=True)
class _BinSums:
    """Sums of one scenario by bin."""

    queried: Floats
    cached: Floats
    prefill_s: Floats
    ttft: Floats  # (bin, bucket) -> requests

    @classmethod
    def of(cls, outcome: Outcome, bins: Integers, size: int) -> _BinSums:
        known = ~np.isnan(outcome.cached_tokens)
        has_ttft = ~np.isnan(outcome.ttft_s)
        buckets = np.log(np.maximum(outcome.ttft_s[has_ttft], SHORTEST_S) / SHORTEST_S) / np.log(GROWTH)
        cells = bins[has_ttft] * BUCKETS + np.minimum(buckets.astype(np.int64), BUCKETS - 1)
        return cls(
            _sums(bins[known], outcome.prompt_tokens[known].astype(np.float64), size),
            _sums(bins[known], outcome.cached_tokens[known], size),
            _sums(bins, outcome.prefill_s, size),
            np.bincount(cells, minlength=size * BUCKETS).reshape(size, BUCKETS).astype(np.float64),
        )

    def hit_rates(self, draws: Floats) -> Floats:
        queried = draws @ self.queried
        rates: Floats = np.divide(draws @ self.cached, queried, out=np.full(len(draws), np.nan), where=queried > 0)
        return rates

    def prefill(self, draws: Floats) -> Floats:
        seconds: Floats = draws @ self.prefill_s
        return seconds

    def quantiles(self, draws: Floats, q: float) -> Floats:
        """The quantile of each resample, interpolated within its bucket; NaN without requests."""
        counts = np.cumsum(draws @ self.ttft, axis=1)
        targets = q * counts[:, -1]
        buckets = np.argmax(counts >= targets[:, None], axis=1)
        rows = np.arange(len(draws))
        below = np.where(buckets > 0, counts[rows, buckets - 1], 0.0)
        inside = counts[rows, buckets] - below
        part = np.divide(targets - below, inside, out=np.full(len(draws), 0.5), where=inside > 0)
        seconds = SHORTEST_S * GROWTH ** (buckets + part)
        return np.where(counts[:, -1] > 0, seconds, np.nan)


def _sums(bins: Integers, values: Floats, size: int) -> Floats:
    sums: Floats = np.bincount(bins, values, size).astype(np.float64)
    return sums


def _interval(candidate: Floats, baseline: Floats, *, relative: bool = False) -> Interval | None:
    with np.errstate(divide="ignore", invalid="ignore"):
        differences = candidate / baseline - 1 if relative else candidate - baseline
    if not np.isfinite(differences[0]):
        return None
    finite = differences[1:][np.isfinite(differences[1:])]
    low, high = np.quantile(finite, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]) if len(finite) else (-1e9, 1e9)
    return Interval(float(differences[0]), float(low), float(high))


@dataclass(frozen=True, slots=True)
class Calibration:
    """Comparison of the replayed active policy with what was measured for the same requests."""

    measured: Figures
    replayed: Figures
    problems: tuple[str, ...]  # why the replay is not calibrated; () if it is

    @property
    def is_calibrated(self) -> bool:
        """Whether predictions may be used."""
        return not self.problems


def calibrate(measured: Outcome, replayed: Outcome, rows: Booleans | None = None) -> Calibration:
    """Compare hit rate, TTFT p50 and TTFT p95 of all requests, or of those at ``rows``, with their limits."""
    real, model = figures(measured, rows), figures(replayed, rows)
    problems = []
    if real.requests < MIN_REQUESTS:
        problems.append(f"Only {real.requests} requests were counted; {MIN_REQUESTS} are needed.")
    if real.hit_rate is None or model.hit_rate is None:
        problems.append("No response reports its cached tokens: start vLLM with --enable-prompt-tokens-details.")
    elif abs(error := model.hit_rate - real.hit_rate) > MAX_HIT_ERROR:
        problems.append(
            f"The replay's hit rate of the newer half of the counted requests is {100 * model.hit_rate:.1f} %, "
            f"measured were {100 * real.hit_rate:.1f} %: a difference of {100 * abs(error):.1f} points, limit "
            f"{100 * MAX_HIT_ERROR:.0f}."
        )
    if real.ttft_p50_s is None or model.ttft_p50_s is None:
        problems.append("No response was streamed, so TTFT is unknown.")
    problems += _ttft_problem("p50", real.ttft_p50_s, model.ttft_p50_s)
    problems += _ttft_problem("p95", real.ttft_p95_s, model.ttft_p95_s)
    return Calibration(real, model, tuple(problems))


def _ttft_problem(name: str, measured_s: float | None, replayed_s: float | None) -> list[str]:
    """Why a quantile of TTFT is not calibrated; [] if it is, or unknown."""
    if not measured_s or replayed_s is None or abs(error := replayed_s / measured_s - 1) <= MAX_TTFT_ERROR:
        return []
    return [
        f"The replay's TTFT {name} of the newer half of the counted requests is {replayed_s:.3f} s, measured were "
        f"{measured_s:.3f} s: a difference of {100 * abs(error):.1f} %, limit {100 * MAX_TTFT_ERROR:.0f} %."
    ]


def corrected(outcome: Outcome, *, measured: float | None, replayed: float | None) -> Outcome:
    """An outcome with the hit rate that the replay of the active policy lacked, or had too much.

    ``measured`` and ``replayed``: the active policy's hit rates. Their whole difference is added to a hit rate above
    ``replayed``, and to a lower one a part in proportion. Cached tokens are multiplied, because a replay mostly errs
    where a cached prefix ends.
    """
    own = figures(outcome).hit_rate
    if measured is None or replayed is None or not own:
        return outcome
    factor = 1 + (measured - replayed) / max(own, replayed)
    cached_tokens = np.minimum(factor * outcome.cached_tokens, outcome.prompt_tokens)
    uncached = outcome.prompt_tokens - outcome.cached_tokens
    left = np.divide(outcome.prompt_tokens - cached_tokens, uncached, out=np.ones(len(uncached)), where=uncached > 0)
    return replace(outcome, cached_tokens=cached_tokens, prefill_s=left * outcome.prefill_s)


def timeline(outcome: Outcome) -> list[dict[str, Any]]:
    """Hit rate and TTFT p50 by bin, for charts: ``at`` in unix seconds; None: unknown."""
    bins = _bins(outcome.at_s)
    points = []
    for number in range(int(bins.max()) + 1 if len(bins) else 0):
        rows = bins == number
        found = figures(outcome, rows)
        if found.requests:
            points.append(
                {"at": float(outcome.at_s[rows][0]), "hit_rate": found.hit_rate, "ttft_p50_s": found.ttft_p50_s}
            )
    return points


def overload_text(candidate: Mapping[str, Any]) -> str:
    """How many replicas of a replayed candidate get more work than they can do; "" for none."""
    overloaded = candidate.get("overloaded_replicas", 0)  # none in results of an earlier version
    text = f"the queue of {overloaded} of {candidate['replicas']} replicas grows until the end"
    return text if overloaded else ""


def describe(name: str, difference: Difference | None, overload: str = "") -> str:
    """One sentence about a candidate, such as: lowest_cost: hit rate +31 to +35 points, TTFT p50 -60 to -52 %.

    ``difference``: None for the active policy.
    """
    parts = [f"overload: {overload}"] if overload else []
    if difference is not None:
        figures = (
            ("hit rate", difference.hit_rate, "points"),
            ("TTFT p50", difference.ttft_p50, "%"),
            ("TTFT p95", difference.ttft_p95, "%"),
        )
        for label, interval, unit in figures:
            if interval is not None:
                text = interval_text(interval)
                parts.append(f"{label} {text} {unit}" if text else f"no difference in {label}")
    return f"{name}: {', '.join(parts)}" if parts else f"{name}: no difference can be computed"


def interval_text(interval: Interval, *values: float) -> str:
    """The bounds of an interval, or some values, times 100; "" where the interval has no sign or all is nearly 0."""
    bounds = values or (interval.low, interval.high)
    for digits, enough in ((0, all), (1, any)):
        texts = [f"{100 * value:+.{digits}f}" for value in bounds]
        if interval.sign and enough(float(text) for text in texts):
            return " to ".join(dict.fromkeys(texts))
    return ""
