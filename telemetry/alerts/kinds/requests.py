"""Rules on requests: the share that fails, and the share whose first token comes too late.

Theory of operation of ``ttft_objective``. The objective is a share of requests whose first token comes within some
seconds; the rest is the error budget. The burn rate is the share of late requests divided by the budget: a burn rate of
1 uses the budget up exactly. A breach needs the burn rate in a long window, so that a short slowdown does not page, and
in a short one, so that the alert resolves soon after its cause. The share is exact at an edge of the histogram, so the
seconds are rounded to the nearest edge, which the finding names.
Source: Beyer et al., "The Site Reliability Workbook", 2018, chapter 5: multiwindow, multi-burn-rate alerts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from telemetry.alerts.findings import POOL, Evidence, Finding, Findings, Reason, Result, Timing, above_limit, no_data
from telemetry.alerts.history_window import HistoryView, Source
from telemetry.alerts.kinds.base import (
    ForS,
    KeepFiringS,
    Kind,
    MinRequests,
    Problem,
    RuleSettings,
    Scope,
    WindowS,
    WindowSettings,
    duration,
    percent,
    setting,
)
from telemetry.metrics.histograms import Buckets, merge
from telemetry.models import RuleKind

MIN_DAYS = 3  # with requests at the same time that are known


class ErrorRatioSettings(WindowSettings, frozen=True):
    """Settings of ``error_ratio``."""

    most_ratio: Annotated[float, setting("ratio", "Failed requests divided by all requests.", gt=0, le=1)] = 0.05
    window_s: WindowS = 300.0
    min_requests: MinRequests = 20.0
    for_s: ForS = 30.0
    keep_firing_s: KeepFiringS = 300.0


class ErrorEvidence(Evidence, frozen=True):
    requests: float
    failed_requests: float


def _evaluate_errors(settings: ErrorRatioSettings, view: HistoryView, group: str) -> Findings:
    """Compare the share of failed requests with its limit."""
    step = view.failures(group or None)
    if step is None:
        return {POOL: no_data(Reason.NO_READINGS)}
    evidence = ErrorEvidence(step.requests, step.part)
    if step.requests < max(settings.min_requests, 1):
        return {POOL: no_data(Reason.LITTLE_TRAFFIC, evidence)}
    return {POOL: above_limit(step.part / step.requests, settings.most_ratio, "ratio", evidence)}


def _summarize_errors(scope: Scope, settings: ErrorRatioSettings, finding: Finding[ErrorEvidence]) -> str:
    failed = f"{finding.evidence.failed_requests:.0f} of {finding.evidence.requests:.0f}"
    counts = f"{failed} in {duration(settings.window_s)}"
    return f"{percent(finding.value)} of the requests to {scope} failed ({counts})."


ERROR_RATIO = Kind(
    name="error_ratio",
    inhibited_by=(RuleKind.EVALUATOR_LAG,),
    about="Compares failed requests with all requests, as routers count them: errors of replicas, and requests that no "
    "replica could accept. Client errors and cancelled requests are not failures.",
    settings=ErrorRatioSettings,
    sources=frozenset({Source.FAILURES}),
    group_sources=frozenset({Source.FAILURES}),
    evaluate=_evaluate_errors,
    summarize=_summarize_errors,
    condition=lambda settings: f"{percent(settings.most_ratio)} of requests failed over {duration(settings.window_s)}",
    figure="Failed requests",
)


class StreamFailuresSettings(WindowSettings, frozen=True):
    """Settings of ``stream_failures``."""

    most_ratio: Annotated[float, setting("ratio", "Streams whose replica failed, of all streams.", gt=0, le=1)] = 0.05
    window_s: WindowS = 600.0
    min_requests: MinRequests = 50.0
    for_s: ForS = 60.0  # until the replica is known to be down, if it is
    keep_firing_s: KeepFiringS = 600.0


class StreamEvidence(Evidence, frozen=True):
    requests: int
    failed_requests: int
    failed_most: str  # a replica


def _evaluate_streams(settings: StreamFailuresSettings, view: HistoryView, _: str) -> Findings:
    """Compare the share of streams whose replica failed with its limit."""
    counts = view.streams()
    requests = sum(counts.values())
    failed = {replica: count for replica, count in counts.items() if replica}
    evidence = StreamEvidence(requests, sum(failed.values()), max(failed, key=failed.__getitem__, default=""))
    if requests < max(settings.min_requests, 1):
        return {POOL: no_data(Reason.LITTLE_TRAFFIC, evidence)}
    finding = above_limit(evidence.failed_requests / requests, settings.most_ratio, "ratio", evidence)
    return {POOL: replace(finding, has_ended=True)}  # each loss is over at once


def _summarize_streams(scope: Scope, settings: StreamFailuresSettings, finding: Finding[StreamEvidence]) -> str:
    evidence, period = finding.evidence, duration(settings.window_s)
    return (
        f"{percent(finding.value)} of the streams of {scope} lost their replica ({evidence.failed_requests} of "
        f"{evidence.requests} in {period}), most of them replica {evidence.failed_most}."
    )


STREAM_FAILURES = Kind(
    name="stream_failures",
    inhibited_by=(RuleKind.EVALUATOR_LAG, RuleKind.REPLICA_DOWN, RuleKind.ERROR_RATIO),
    about="Compares the streams whose replica died, hung or sent an error after the first token with all streams, "
    "whether or not another replica continued them: clients may notice nothing while engines crash again and again. "
    "Streams count once they have ended, in the window in which they began: give it more than the length of a stream.",
    settings=StreamFailuresSettings,
    sources=frozenset({Source.STREAMS}),
    evaluate=_evaluate_streams,
    summarize=_summarize_streams,
    condition=lambda settings: (
        f"{percent(settings.most_ratio)} of streams lost their replica over {duration(settings.window_s)}"
    ),
    figure="Streams that lost their replica",
)


class TrafficVanishedSettings(WindowSettings, frozen=True):
    """Settings of ``traffic_vanished``."""

    least_ratio: Annotated[
        float, setting("ratio", "Requests relative to the fewest of the days before that are too few.", gt=0, le=0.5)
    ] = 0.05
    min_requests: MinRequests = 50.0
    window_s: WindowS = 600.0
    for_s: ForS = 60.0
    keep_firing_s: KeepFiringS = 60.0

    def problem(self) -> Problem | None:
        """Days before are read from rollups of five minutes."""
        return None if self.window_s % 600 == 0 else ("window_s", "expected a multiple of 600")


def _evaluate_traffic(settings: TrafficVanishedSettings, view: HistoryView, _: str) -> Findings:
    """Compare the requests with the fewest at the same time of the last seven days.

    The day a week ago must be known, so that a weekend is not compared with working days alone.
    """
    requests = view.history.requests
    if requests is None or requests.now is None:
        return {POOL: no_data(Reason.NO_READINGS)}
    known = [count for count in requests.days if count is not None]
    if len(known) < MIN_DAYS or requests.days[-1] is None:
        return {POOL: no_data(Reason.LITTLE_HISTORY)}
    usual = min(known)
    limit = settings.least_ratio * usual
    if requests.now > limit:
        return {POOL: Finding(Result.OK, Reason.WITHIN, requests.now, limit, usual, unit="count")}
    if usual < settings.min_requests:
        return {POOL: no_data(Reason.LITTLE_TRAFFIC)}
    return {POOL: Finding(Result.BREACH, Reason.BELOW, requests.now, limit, usual, unit="count")}


def _summarize_traffic(scope: Scope, settings: TrafficVanishedSettings, finding: Finding[Evidence]) -> str:
    return (
        f"Requests for {scope} have vanished: {finding.value or 0:.0f} in the last {duration(settings.window_s)}, "
        f"at least {finding.baseline or 0:.0f} at this time of each of the last days."
    )


TRAFFIC_VANISHED = Kind(
    name="traffic_vanished",
    inhibited_by=(RuleKind.EVALUATOR_LAG, RuleKind.ROUTER_LOST),
    about="Compares the requests of a pool, as routers count them, with the fewest at about the same time of the last "
    "seven days. A quiet night or weekend is usual; requests that stop reaching the routers are not: a load balancer, "
    "a DNS name or a client broke. No result in a pool's first week. There is no preview.",
    settings=TrafficVanishedSettings,
    sources=frozenset({Source.DAYS}),
    evaluate=_evaluate_traffic,
    summarize=_summarize_traffic,
    condition=lambda settings: (
        f"fewer than {percent(settings.least_ratio)} of the requests that are usual at this time, in "
        f"{duration(settings.window_s)}"
    ),
    figure="Requests",
)


class TtftObjectiveSettings(RuleSettings, frozen=True):
    """Settings of ``ttft_objective``."""

    within_s: Annotated[float, setting("seconds", "A first token after this time is late.", gt=0, le=600)] = 1.0
    objective_ratio: Annotated[
        float, setting("ratio", "Share of requests that should not be late.", ge=0.5, le=0.9999)
    ] = 0.95
    burn_rate: Annotated[
        float, setting("times", "Burn rate of the error budget at which the alert fires.", ge=1, le=1000)
    ] = 6.0
    long_s: Annotated[float, setting("seconds", "Long window, which must reach the rate.", ge=60, le=21_600)] = 3600.0
    short_s: Annotated[float, setting("seconds", "Short window, which must reach it too.", ge=10, le=3600)] = 300.0
    min_requests: MinRequests = 50.0
    for_s: ForS = 0.0
    keep_firing_s: KeepFiringS = 300.0

    @property
    def step_s(self) -> float:
        return self.short_s

    @property
    def lookback_s(self) -> float:
        return self.long_s

    @property
    def timing(self) -> Timing:
        return Timing(self.for_s, self.keep_firing_s, self.long_s)

    @property
    def late_ratio(self) -> float:
        """The share of late requests that is a breach."""
        return self.burn_rate * (1 - self.objective_ratio)

    def problem(self) -> Problem | None:
        """The long window consists of short ones, and the rule must be able to fire."""
        if self.long_s < 2 * self.short_s or not math.isclose(self.long_s % self.short_s, 0, abs_tol=1e-6):
            return "long_s", "expected a multiple of short_s, at least twice as long"
        if self.late_ratio > 1:
            return "burn_rate", f"expected at most {1 / (1 - self.objective_ratio):.4g}, when all requests are late"
        return None


class TtftEvidence(Evidence, frozen=True):
    requests: int
    late_short_ratio: float
    edge_s: float


def _evaluate_ttft(settings: TtftObjectiveSettings, view: HistoryView, group: str) -> Findings:
    """Compare the share of late requests in both windows with the limit."""
    long = _late(settings, view.first_tokens(group, round(settings.long_s / settings.short_s)))
    short = _late(settings, view.first_tokens(group, 1))
    if long is None or short is None:
        return {POOL: no_data(Reason.NO_READINGS)}
    evidence = TtftEvidence(requests=long[1], late_short_ratio=short[0], edge_s=long[2])
    if evidence.requests < settings.min_requests or not short[1]:
        return {POOL: no_data(Reason.LITTLE_TRAFFIC, evidence)}
    is_breach = min(long[0], short[0]) >= settings.late_ratio - 1e-9
    result, reason = (Result.BREACH, Reason.ABOVE) if is_breach else (Result.OK, Reason.WITHIN)
    return {POOL: Finding(result, reason, long[0], settings.late_ratio, evidence=evidence)}


def _late(settings: TtftObjectiveSettings, parts: Sequence[Buckets]) -> tuple[float, int, float] | None:
    """(share of late requests, requests, edge in seconds); None without observations."""
    merged = merge(parts)
    if merged is None or not merged.buckets.total or not merged.buckets.edges:
        return None
    edges = merged.buckets.edges
    position = min(range(len(edges)), key=lambda index: abs(edges[index] - settings.within_s))
    late = sum(count for bucket, count in merged.buckets.counts.items() if bucket > position)
    return late / merged.buckets.total, merged.buckets.total, edges[position]


def _summarize_ttft(scope: Scope, settings: TtftObjectiveSettings, finding: Finding[TtftEvidence]) -> str:
    late = f"{percent(finding.value)} of first tokens of {scope} came after {duration(settings.within_s)}"
    burn_rate = (finding.value or 0) / (1 - settings.objective_ratio)
    return f"{late} in {duration(settings.long_s)}: burn rate of the error budget {burn_rate:.1f}."


def _ttft_condition(settings: TtftObjectiveSettings) -> str:
    return (
        f"{percent(settings.late_ratio)} of first tokens after {duration(settings.within_s)}, over "
        f"{duration(settings.long_s)} and over {duration(settings.short_s)}"
    )


TTFT_OBJECTIVE = Kind(
    name="ttft_objective",
    inhibited_by=(RuleKind.EVALUATOR_LAG, RuleKind.NO_DATA),
    about="Watches an objective such as: 95 % of first tokens within a second. It fires when late responses use up the "
    "error budget several times too fast, over a long window and still over a short one. Seconds are rounded to the "
    "nearest edge of the histogram, where the share is exact. Routers time streamed responses; where none is streamed, "
    "engines time all requests.",
    settings=TtftObjectiveSettings,
    sources=frozenset({Source.FIRST_TOKENS}),
    group_sources=frozenset({Source.FIRST_TOKENS}),
    evaluate=_evaluate_ttft,
    summarize=_summarize_ttft,
    condition=_ttft_condition,
    figure="Late first tokens",
)
