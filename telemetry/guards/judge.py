"""What was measured of both sides of a trial -> a verdict on each figure, and on the trial. Pure.

Theory of operation. Each figure compares the requests that the trial placed with those that the revision in force
placed in the same time. The two sides have other prefixes, groups or routers: where it is known how they differed
BEFORE the trial, that difference is taken off first; where it is not, their groups were mixed alike (``mix``). A figure
is *breached* when the trial is surely worse at all and by more than allowed as far as can be told; *passed* when it is
surely no worse than allowed; *inconclusive* between the two, or with too little to go by. One figure that is breached
breaches the trial; it passes when all do.
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
from telemetry.guards.confidence import MIN_BINS, Estimate, Part, difference_of_ratios, ratio_of_sums, with_chance
from telemetry.metrics.histograms import Buckets, Quantile, merge, quantile

TAIL = 0.95  # the quantile of TTFT, or of latency, that is guarded
LEAST_STREAMED = 0.05  # share of a side's responses below which TTFT says too little of it
OFF = "off"


@dataclass(frozen=True, slots=True)
class Bin:
    """What was counted of one side in one bin of time, weighed or not; None is unknown."""

    start: datetime
    requests: int = 0
    answered: float = 0  # those that ended well or by our fault: not the client's, not cancelled
    failed: float = 0  # by a replica's or a router's fault
    prompt_tokens: float = 0  # of answers that reported their cached tokens (H16)
    cached_tokens: float = 0
    ttft: Buckets | None = None  # router's clock, of streamed responses (T1b)
    plain_latency: Buckets | None = None  # of the others, to their last byte


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a trial: its bins now, and as it was before the trial began, empty where that is not known."""

    now: Sequence[Bin] = ()
    before: Sequence[Bin] = ()

    @property
    def requests(self) -> int:
        """Of all bins of now."""
        return sum(one.requests for one in self.now)

    @property
    def busy_bins(self) -> int:
        """Bins of now in which anything was asked."""
        return sum(one.requests > 0 for one in self.now)


@dataclass(frozen=True, slots=True)
class Measured:
    """All that a verdict rests on."""

    trial: Side
    baseline: Side
    load_now: Mapping[str, float] = field(default_factory=dict)  # requests by unit of weight, of each active replica
    load_before: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure beside its limit, as rollouts keep and pages show it."""

    name: str
    unit: str
    baseline: float | None
    trial: float | None
    limit: float | None
    verdict: str  # a Verdict, or "off"
    detail: str


def judge(limits: GuardLimits, measured: Measured) -> tuple[Verdict, list[dict[str, Any]]]:
    """The verdict on a trial, and every figure with its own."""
    figures = [
        _hit_rate(limits, measured),
        _waits(limits, measured),
        _errors(limits, measured),
        _skew(limits, measured),
    ]
    return overall(figure.verdict for figure in figures), [asdict(figure) for figure in figures]


def overall(verdicts: Iterable[str]) -> Verdict:
    """One breach breaches all; all must pass, or be off, to pass."""
    found = set(verdicts) - {OFF}
    for worst in (Verdict.BREACHED, Verdict.INCONCLUSIVE):
        if worst in found:
            return worst
    return Verdict.PASSED


def _hit_rate(limits: GuardLimits, measured: Measured) -> Figure:
    """Cached over prompt tokens; lower is worse."""
    return _compared("hit_rate", _cached, measured, limits.max_hit_rate_drop, worse=-1, least=limits.min_requests)


def _errors(limits: GuardLimits, measured: Measured) -> Figure:
    """Failed requests over answered ones; higher is worse."""
    return _compared("error_ratio", _failures, measured, limits.max_error_ratio, worse=1, least=limits.min_requests)


def _cached(one: Bin) -> Part:
    return Part(one.cached_tokens, one.prompt_tokens)


def _failures(one: Bin) -> Part:
    return Part(one.failed, one.answered)


Counting = Callable[[Bin], Part]


def _compared(
    name: str, counting: Counting, measured: Measured, allowed: float | None, *, worse: int, least: int
) -> Figure:
    """A ratio of the trial's side beside the baseline's; ``worse`` is +1 where higher is worse, else -1."""
    trial, baseline = (_value(counting, side.now) for side in (measured.trial, measured.baseline))
    if allowed is None:
        return Figure(name, "ratio", baseline, trial, None, OFF, "Not guarded.")
    before = _difference(counting, measured.trial.before, measured.baseline.before)
    offset = before if before and before.bins >= MIN_BINS else None
    limit = None if baseline is None else baseline + (offset.value if offset else 0.0) + worse * allowed
    harm, lacking = _difference(counting, measured.trial.now, measured.baseline.now), _lacking(measured, least)
    if lacking or harm is None:
        why = lacking or "Nothing was measured yet."
        return Figure(name, "ratio", baseline, trial, limit, Verdict.INCONCLUSIVE, why)
    if offset is not None:
        harm = Estimate(harm.value - offset.value, harm.variance + offset.variance, harm.bins)
    verdict = _verdict(worse * harm.value, harm.margin, allowed)
    return Figure(name, "ratio", baseline, trial, limit, verdict, _sentence(name, trial, baseline, harm))


def _value(counting: Counting, bins: Sequence[Bin]) -> float | None:
    estimate = ratio_of_sums([counting(one) for one in bins])
    return None if estimate is None else estimate.value


def _difference(counting: Counting, ones: Sequence[Bin], others: Sequence[Bin]) -> Estimate | None:
    """One side's ratio minus the other's: minute by minute where they are of the same time, else each by itself."""
    first, second = [counting(one) for one in ones], [counting(one) for one in others]
    if [one.start for one in ones] == [one.start for one in others]:
        difference = difference_of_ratios(first, second)
    else:
        apart = (ratio_of_sums(first), ratio_of_sums(second))
        difference = apart[0] - apart[1] if apart[0] and apart[1] else None
    counts_events = counting is not _cached
    return with_chance(difference, first, second) if difference and counts_events else difference


def _verdict(harm: float, margin: float, allowed: float) -> Verdict:
    if harm + margin < allowed:
        return Verdict.PASSED
    return Verdict.BREACHED if harm >= allowed and harm - margin > 0 else Verdict.INCONCLUSIVE


Timing = Callable[[Bin], Buckets | None]


def _waits(limits: GuardLimits, measured: Measured) -> Figure:
    """The tail of TTFT; where neither side streams, that of plain responses' latency. Never one beside the other."""
    if all(_is_plain(side.now) for side in (measured.trial, measured.baseline)):
        return _slowest("plain_latency_p95_s", _plain_of, limits, measured)
    return _slowest("ttft_p95_s", _ttft_of, limits, measured)


def _ttft_of(one: Bin) -> Buckets | None:
    return one.ttft


def _plain_of(one: Bin) -> Buckets | None:
    return one.plain_latency


def _is_plain(bins: Sequence[Bin]) -> bool:
    """Whether hardly any response of a side was streamed; False where none of any kind was timed."""
    timed, plain = (sum(part.total for one in bins if (part := of(one)) is not None) for of in (_ttft_of, _plain_of))
    return plain > 0 and timed < LEAST_STREAMED * (timed + plain)


def _slowest(name: str, timing: Timing, limits: GuardLimits, measured: Measured) -> Figure:
    """A tail: how many of the trial's requests are slower than the baseline's p95 and what is allowed above.

    A share is exact where a quantile is a guess within its bucket (T6), and its error is known.
    """
    base, trial = _tail(timing, measured.baseline.now), _tail(timing, measured.trial.now)
    shown = (None if base is None else base.value, None if trial is None else trial.value)
    allowed = limits.max_ttft_p95_growth
    if allowed is None:
        return Figure(name, "seconds", *shown, None, OFF, "Not guarded.")
    limit = None if base is None else base.value * _former_ratio(timing, measured) * (1 + allowed)
    slower = None if limit is None else _slower_than(limit, timing, measured.trial.now)
    usual = None if base is None else _slower_than(base.value, timing, measured.baseline.now)
    lacking = _lacking(measured, limits.min_requests)
    if lacking or slower is None or usual is None:
        why = lacking or f"No {_TIMED[name]} was measured yet on one of the sides."
        return Figure(name, "seconds", *shown, limit, Verdict.INCONCLUSIVE, why)
    over = slower - usual
    slow = f"{_percent(slower.value)} of the trial's {_OF[name]} take longer than {limit:.2g} s{_UNTIL[name]}"
    detail = f"{slow}, where {_percent(usual.value)} may (± {over.margin * 100:.1f} points)."
    verdict = _verdict(over.value, over.margin, 0.0)
    return Figure(name, "seconds", *shown, limit, verdict, detail)


_TIMED = {"ttft_p95_s": "TTFT", "plain_latency_p95_s": "latency"}
_OF = {"ttft_p95_s": "streamed responses", "plain_latency_p95_s": "plain responses"}
_UNTIL = {"ttft_p95_s": " to their first token", "plain_latency_p95_s": ""}


def _former_ratio(timing: Timing, measured: Measured) -> float:
    """How the trial's side compared before the trial; 1 where that is not known."""
    trial, base = _tail(timing, measured.trial.before), _tail(timing, measured.baseline.before)
    return trial.value / base.value if trial and base and base.value > 0 else 1.0


def _tail(timing: Timing, bins: Sequence[Bin]) -> Quantile | None:
    merged = merge([waits for one in bins if (waits := timing(one)) is not None])
    return None if merged is None else quantile(merged.buckets, TAIL)


def _slower_than(limit_s: float, timing: Timing, bins: Sequence[Bin]) -> Estimate | None:
    parts = [_slower(timing(one), limit_s) for one in bins]
    share = ratio_of_sums(parts)
    return share and with_chance(share, parts)


def _slower(waits: Buckets | None, limit: float) -> Part:
    """Observations above the first edge at or beyond the limit, of all."""
    if waits is None:
        return Part(0, 0)
    last = bisect.bisect_left(waits.edges, limit)
    return Part(sum(count for position, count in waits.counts.items() if position > last), waits.total)


def _skew(limits: GuardLimits, measured: Measured) -> Figure:
    """Requests of the most loaded replica over the mean, of the whole pool: what the trial does to the fleet."""
    now, before, allowed = skew(measured.load_now), skew(measured.load_before), limits.max_load_skew
    if allowed is None:
        return Figure("load_skew", "ratio", before, now, None, OFF, "Not guarded.")
    limit = allowed if before is None else max(allowed, before)
    lacking = _lacking(measured, limits.min_requests)
    if lacking or now is None:
        return Figure(
            "load_skew", "ratio", before, now, limit, Verdict.INCONCLUSIVE, lacking or "No load was measured yet."
        )
    verdict = Verdict.PASSED if now <= limit + chance_of_skew(measured.load_now) else Verdict.BREACHED
    detail = f"The busiest of {len(measured.load_now)} replicas has {now:.2f} times the mean."
    return Figure("load_skew", "ratio", before, now, limit, verdict, detail)


def skew(load: Mapping[str, float]) -> float | None:
    """Greatest over mean; None for no load."""
    total = sum(load.values())
    return max(load.values()) * len(load) / total if total > 0 else None


def chance_of_skew(load: Mapping[str, float]) -> float:
    """What chance alone adds to the skew of so many requests: about sqrt(2 ln n) standard deviations of a mean."""
    mean, count = sum(load.values()) / len(load), len(load)
    return math.sqrt(2 * math.log(count) / mean) if count > 1 and mean > 0 else 0.0


def _lacking(measured: Measured, least: int) -> str:
    """What is missing before anything can be said; "" for nothing."""
    for name, side in (("trial", measured.trial), ("baseline", measured.baseline)):
        if side.requests < least:
            return f"The {name} has {side.requests} of the {least} requests that are needed."
    if min(side.busy_bins for side in (measured.trial, measured.baseline)) < MIN_BINS:
        return f"Fewer than {MIN_BINS} bins of time have traffic on both sides."
    return ""


def _sentence(name: str, trial: float | None, baseline: float | None, harm: Estimate) -> str:
    """Both sides and what the trial makes of it, in points of 100."""
    sides = f"{_WORDS[name]} of {_percent(trial)} beside {_percent(baseline)}"
    points = f"{abs(harm.value) * 100:.1f} points {'more' if harm.value > 0 else 'less'}"
    return f"{sides}: {points} (± {harm.margin * 100:.1f})."


_WORDS = {"hit_rate": "A hit rate", "error_ratio": "Failures"}


def _percent(ratio: float | None) -> str:
    return "an unknown share" if ratio is None else f"{ratio * 100:.1f} %"
