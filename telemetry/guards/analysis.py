"""Analyzes a canary: a verdict on each figure, and one on the canary. Pure.

Theory of operation. Each figure compares the requests that the canary placed with those that the active revision placed
in the same time. Both have different prefixes, groups or routers. Where it is known how they differed before the
rollout, that difference is subtracted first; where it is not, the baseline has the canary's mix of task groups
(``confidence.mix_weights``). A figure has *failed* if the canary is certainly worse, and worse by more than allowed as
far as is known. It has *passed* if the canary is certainly not worse than allowed, and is *inconclusive* in between or
with too little data. The canary fails when one figure does, and passes when all do.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from controlplane.services.policies.rollout_plans import GuardLimits
from controlplane.services.policies.rollouts import Verdict
from telemetry.guards.confidence import (
    MIN_BINS,
    Estimate,
    Part,
    difference_of_ratios,
    ratio_of_sums,
    with_chance_variance,
)
from telemetry.metrics.histograms import Buckets, Quantile, merge, quantile

TAIL = 0.95  # the quantile of TTFT or latency that is compared
MIN_STREAMED = 0.05  # share of a side's responses below which TTFT is not representative
OFF = "off"


@dataclass(frozen=True, slots=True)
class Bin:
    """Sums of one side in one bin, weighted or not; None is unknown."""

    start: datetime
    requests: int = 0
    answered: float = 0  # without client errors and cancelled requests
    failed: float = 0  # because of a replica or a router
    prompt_tokens: float = 0  # of responses that reported cached tokens
    cached_tokens: float = 0
    ttft: Buckets | None = None  # router's clock, of streamed responses
    non_streamed_latency: Buckets | None = None  # of the other responses, to their last byte


@dataclass(frozen=True, slots=True)
class Side:
    """Bins of the canary or the baseline, now and before the rollout; ``before`` is empty if unknown."""

    now: Sequence[Bin] = ()
    before: Sequence[Bin] = ()

    @property
    def requests(self) -> int:
        return sum(each.requests for each in self.now)

    @property
    def busy_bins(self) -> int:
        """Number of current bins with requests."""
        return sum(each.requests > 0 for each in self.now)


@dataclass(frozen=True, slots=True)
class Measured:
    """The data of an analysis."""

    canary: Side
    baseline: Side
    load_now: Mapping[str, float] = field(default_factory=dict)  # requests per unit of weight, by active replica
    load_before: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure and its limit, as rollouts store it and pages show it."""

    name: str
    unit: str
    baseline: float | None
    canary: float | None
    limit: float | None
    verdict: str  # a Verdict, or "off"
    detail: str


def analyze(limits: GuardLimits, measured: Measured) -> tuple[Verdict, list[dict[str, Any]]]:
    """The verdict on a canary, and every figure with its own."""
    figures = [
        _compare_ratios("hit_rate", _cached, measured, limits.max_hit_rate_drop, limits, worse=-1),
        _compare_latency(limits, measured),
        _compare_ratios("error_ratio", _failed, measured, limits.max_error_ratio, limits, worse=1),
        _compare_skew(limits, measured),
    ]
    return overall(figure.verdict for figure in figures), [asdict(figure) for figure in figures]


def overall(verdicts: Iterable[str]) -> Verdict:
    """The worst verdict; figures that are off do not count."""
    present = set(verdicts)
    for worst in (Verdict.FAILED, Verdict.INCONCLUSIVE):
        if worst in present:
            return worst
    return Verdict.PASSED


def _cached(each: Bin) -> Part:
    return Part(each.cached_tokens, each.prompt_tokens)


def _failed(each: Bin) -> Part:
    return Part(each.failed, each.answered)


Counts = Callable[[Bin], Part]


def _compare_ratios(
    name: str, counts: Counts, measured: Measured, allowed: float | None, limits: GuardLimits, *, worse: int
) -> Figure:
    """A ratio of the canary and the baseline; ``worse`` is +1 if higher is worse, else -1."""
    canary, baseline = (_ratio(counts, side.now) for side in (measured.canary, measured.baseline))
    if allowed is None:
        return Figure(name, "ratio", baseline, canary, None, OFF, "No limit is set.")
    before = _difference(counts, measured.canary.before, measured.baseline.before)
    offset = before if before and before.bins >= MIN_BINS else Estimate(0.0, 0.0, MIN_BINS)
    limit = None if baseline is None else baseline + offset.value + worse * allowed
    harm, missing = _difference(counts, measured.canary.now, measured.baseline.now), _missing(measured, limits)
    if missing or harm is None:
        detail = missing or "There is no data yet."
        return Figure(name, "ratio", baseline, canary, limit, Verdict.INCONCLUSIVE, detail)
    harm = Estimate(harm.value - offset.value, harm.variance + offset.variance, harm.bins)
    values = f"{_LABELS[name]} {_percent(canary)}, baseline {_percent(baseline)}"
    points = f"{abs(harm.value) * 100:.1f} points {'more' if harm.value > 0 else 'less'}"
    detail = f"{values}: {points} (± {harm.margin * 100:.1f})."
    return Figure(name, "ratio", baseline, canary, limit, _verdict(worse * harm.value, harm.margin, allowed), detail)


_LABELS = {"hit_rate": "Hit rate", "error_ratio": "Failed requests"}


def _ratio(counts: Counts, bins: Sequence[Bin]) -> float | None:
    estimate = ratio_of_sums([counts(each) for each in bins])
    return None if estimate is None else estimate.value


def _difference(counts: Counts, minuend: Sequence[Bin], subtrahend: Sequence[Bin]) -> Estimate | None:
    """One side's ratio minus the other's: bin by bin for bins of the same time, else each side by itself."""
    first, second = [counts(each) for each in minuend], [counts(each) for each in subtrahend]
    if [each.start for each in minuend] == [each.start for each in subtrahend]:
        difference = difference_of_ratios(first, second)
    else:
        ratios = (ratio_of_sums(first), ratio_of_sums(second))
        difference = ratios[0] - ratios[1] if ratios[0] and ratios[1] else None
    counts_events = counts is not _cached
    return with_chance_variance(difference, first, second) if difference and counts_events else difference


def _verdict(harm: float, margin: float, allowed: float) -> Verdict:
    if harm + margin < allowed:
        return Verdict.PASSED
    return Verdict.FAILED if harm >= allowed and harm - margin > 0 else Verdict.INCONCLUSIVE


@dataclass(frozen=True, slots=True)
class _Latency:
    """A latency figure and its texts."""

    name: str
    label: str
    responses: str
    until: str
    of: Callable[[Bin], Buckets | None]

    def merged(self, bins: Sequence[Bin]) -> Buckets | None:
        merged = merge([buckets for each in bins if (buckets := self.of(each)) is not None])
        return None if merged is None else merged.buckets

    def tail(self, bins: Sequence[Bin]) -> Quantile | None:
        buckets = self.merged(bins)
        return None if buckets is None else quantile(buckets, TAIL)

    def slower_than(self, limit_s: float, bins: Sequence[Bin]) -> Estimate | None:
        """Share of responses above the first edge at or beyond the limit."""
        parts = [_slower(self.of(each), limit_s) for each in bins]
        share = ratio_of_sums(parts)
        return share and with_chance_variance(share, parts)


_TTFT = _Latency("ttft_p95_s", "TTFT", "streamed responses", " to their first token", lambda each: each.ttft)
_NON_STREAMED = _Latency(
    "plain_latency_p95_s", "latency", "non-streamed responses", "", lambda each: each.non_streamed_latency
)


def _is_non_streamed(bins: Sequence[Bin]) -> bool:
    """Whether almost no response was streamed; False without data."""
    streamed, others = (sum(part.total for each in bins if (part := of(each))) for of in (_TTFT.of, _NON_STREAMED.of))
    return others > 0 and streamed < MIN_STREAMED * (streamed + others)


def _compare_latency(limits: GuardLimits, measured: Measured) -> Figure:
    """The tail of TTFT, or of the latency of whole responses if neither side streams.

    The verdict is on the share of the canary's responses that are slower than the baseline's p95 plus what is allowed:
    a share is exact where a quantile is a guess within its bucket, and its error is known.
    """
    is_non_streamed = all(_is_non_streamed(side.now) for side in (measured.canary, measured.baseline))
    latency = _NON_STREAMED if is_non_streamed else _TTFT
    base, canary = latency.tail(measured.baseline.now), latency.tail(measured.canary.now)
    values = (None if base is None else base.value, None if canary is None else canary.value)
    allowed = limits.max_ttft_p95_growth
    if allowed is None:
        return Figure(latency.name, "seconds", *values, None, OFF, "No limit is set.")
    limit = None if base is None else base.value * _ratio_before(latency, measured) * (1 + allowed)
    slower = None if limit is None else latency.slower_than(limit, measured.canary.now)
    usual = None if base is None else latency.slower_than(base.value, measured.baseline.now)
    missing = _missing(measured, limits)
    if missing or slower is None or usual is None:
        detail = missing or f"One side has no {latency.label} yet."
        return Figure(latency.name, "seconds", *values, limit, Verdict.INCONCLUSIVE, detail)
    excess = slower - usual
    share = (
        f"{_percent(slower.value)} of the canary's {latency.responses} take longer than {limit:.2g} s{latency.until}"
    )
    detail = f"{share}; {_percent(usual.value)} are allowed (± {excess.margin * 100:.1f} points)."
    return Figure(latency.name, "seconds", *values, limit, _verdict(excess.value, excess.margin, 0.0), detail)


def _ratio_before(latency: _Latency, measured: Measured) -> float:
    """Canary's tail divided by the baseline's before the rollout; 1 if unknown."""
    canary, base = latency.tail(measured.canary.before), latency.tail(measured.baseline.before)
    return canary.value / base.value if canary and base and base.value > 0 else 1.0


def _slower(buckets: Buckets | None, limit: float) -> Part:
    if buckets is None:
        return Part(0, 0)
    last = bisect.bisect_left(buckets.edges, limit)
    return Part(sum(count for bucket, count in buckets.counts.items() if bucket > last), buckets.total)


def _compare_skew(limits: GuardLimits, measured: Measured) -> Figure:
    """Requests of the busiest replica divided by the mean, of the whole pool."""
    now, before, allowed = skew(measured.load_now), skew(measured.load_before), limits.max_load_skew
    if allowed is None:
        return Figure("load_skew", "ratio", before, now, None, OFF, "No limit is set.")
    limit = allowed if before is None else max(allowed, before)
    missing = _missing(measured, limits)
    if missing or now is None:
        detail = missing or "There is no load yet."
        return Figure("load_skew", "ratio", before, now, limit, Verdict.INCONCLUSIVE, detail)
    verdict = Verdict.PASSED if now <= limit + skew_by_chance(measured.load_now) else Verdict.FAILED
    detail = f"The busiest of {len(measured.load_now)} replicas has {now:.2f} times the mean."
    return Figure("load_skew", "ratio", before, now, limit, verdict, detail)


def skew(load: Mapping[str, float]) -> float | None:
    """Maximum divided by mean; None for no load."""
    total = sum(load.values())
    return max(load.values()) * len(load) / total if total > 0 else None


def skew_by_chance(load: Mapping[str, float]) -> float:
    """Skew that chance alone causes: about sqrt(2 ln n) standard deviations of a mean."""
    mean, count = sum(load.values()) / len(load), len(load)
    return math.sqrt(2 * math.log(count) / mean) if count > 1 and mean > 0 else 0.0


def _missing(measured: Measured, limits: GuardLimits) -> str:
    """What an analysis needs first; "" for nothing."""
    for name, side in (("canary", measured.canary), ("baseline", measured.baseline)):
        if side.requests < limits.min_requests:
            return f"The {name} has {side.requests} of at least {limits.min_requests} requests."
    if min(measured.canary.busy_bins, measured.baseline.busy_bins) < MIN_BINS:
        return f"Fewer than {MIN_BINS} time bins have requests on both sides."
    return ""


def _percent(ratio: float | None) -> str:
    return "an unknown share" if ratio is None else f"{ratio * 100:.1f} %"
