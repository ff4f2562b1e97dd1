"""Rules on replicas: down, ejected by a router, short of KV cache, or with far more requests than the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from telemetry.alerts.findings import POOL, Evidence, Finding, Findings, Reason, Result, above_limit, no_data
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
    capitalized,
    duration,
    each_replica,
    percent,
    setting,
)
from telemetry.models import RuleKind

LONGEST_S = 3600.0  # how far back the last successful scrape is looked for


class ReplicaDownSettings(RuleSettings, frozen=True):
    """Settings of ``replica_down``."""

    silent_s: Annotated[float, setting("seconds", "Time without a successful scrape.", ge=10, le=3600)] = 30.0
    for_s: ForS = 0.0
    keep_firing_s: KeepFiringS = 30.0

    @property
    def step_s(self) -> float:
        return self.silent_s

    @property
    def lookback_s(self) -> float:
        return max(LONGEST_S, self.silent_s)


class ScrapeEvidence(Evidence, frozen=True):
    at_least: bool = False  # it is down for longer than is known
    scrape_error: str = ""
    routers: tuple[str, ...] = ()  # that report it up
    requests: float = 0  # that it served meanwhile


def _down_finding(settings: ReplicaDownSettings, view: HistoryView, name: str) -> Finding[ScrapeEvidence]:
    finding = _scrape_finding(settings, view, name)
    if finding.result is not Result.BREACH:
        return finding
    state = view.scraped(name)
    if state is not None and state.serving_at:
        return replace(finding, result=Result.OK, reason=Reason.SERVING)
    evidence = ScrapeEvidence(finding.evidence.at_least, state.reason if state else "")
    return replace(finding, evidence=evidence)


def _scrape_finding(settings: ReplicaDownSettings, view: HistoryView, name: str) -> Finding[ScrapeEvidence]:
    step = view.engine(name)
    if step is None:
        return no_data(Reason.NO_READINGS)  # no scrape was attempted: the scraper is down, not the replica
    if step.read:
        return Finding(Result.OK, Reason.WITHIN, 0.0, settings.silent_s, unit="seconds")
    since_success_s = view.since_success_s(name, settings.lookback_s)
    if since_success_s is None and view.is_starting(name):
        return no_data(Reason.STARTING)
    value = view.since_first_scrape_s(name, settings.lookback_s) if since_success_s is None else since_success_s
    if value < settings.silent_s:
        return no_data(Reason.SCRAPES_FAIL)  # never scraped successfully, and not tried for long enough
    evidence = ScrapeEvidence(at_least=since_success_s is None)
    return Finding(Result.BREACH, Reason.SCRAPES_FAIL, value, settings.silent_s, unit="seconds", evidence=evidence)


def _summarize_down(scope: Scope, _: ReplicaDownSettings, finding: Finding[ScrapeEvidence]) -> str:
    more = "more than " if finding.evidence.at_least else ""
    because = f" ({finding.evidence.scrape_error})" if finding.evidence.scrape_error else ""
    return f"{capitalized(scope)} is down: no successful scrape for {more}{duration(finding.value)}{because}."


REPLICA_DOWN = Kind(
    name="replica_down",
    inhibited_by=(RuleKind.EVALUATOR_LAG, RuleKind.NO_DATA),
    about="Fires for each replica whose metrics cannot be scraped and that no router reports up: it is down or hangs. "
    "Disabled replicas are not evaluated. Where no scrape was attempted, telemetry is down and not the replica. A "
    "replica that was never scraped successfully counts as starting, not down, for 15 min after it was added.",
    settings=ReplicaDownSettings,
    sources=frozenset({Source.ENGINES, Source.SCRAPES}),
    evaluate=each_replica(_down_finding),
    summarize=_summarize_down,
    condition=lambda settings: f"a replica without a successful scrape for {duration(settings.silent_s)}",
    figure="Time without a successful scrape",
)


def _unreadable_finding(settings: ReplicaDownSettings, view: HistoryView, name: str) -> Finding[ScrapeEvidence]:
    """A breach for a replica that serves and whose metrics could be read before."""
    finding = _scrape_finding(settings, view, name)
    if finding.result is not Result.BREACH:
        return finding
    state = view.scraped(name)
    if state is None or not state.serving_at:
        return replace(finding, result=Result.OK, reason=Reason.WITHIN)  # it is down
    if not state.was_read:
        return no_data(Reason.NOT_REPORTED)
    counts = view.responses(name)
    requests = counts.requests if counts else None
    evidence = ScrapeEvidence(finding.evidence.at_least, state.reason, state.serving_at, requests or 0)
    return replace(finding, evidence=evidence)


def _summarize_unreadable(scope: Scope, settings: ReplicaDownSettings, finding: Finding[ScrapeEvidence]) -> str:
    evidence = finding.evidence
    error = f" ({evidence.scrape_error})" if evidence.scrape_error else ""
    routers, period = len(evidence.routers), duration(settings.silent_s)
    served = f"{routers} router{'s report' if routers > 1 else ' reports'} it up, {evidence.requests} requests"
    return f"Metrics of {scope} cannot be read{error}; {served} in the last {period}."


METRICS_UNREADABLE = Kind(
    name="metrics_unreadable",
    inhibited_by=(RuleKind.EVALUATOR_LAG,),
    about="Fires for each replica whose metrics cannot be scraped while routers report it up: it serves requests, and "
    "its figures are unknown. A replica whose metrics were never readable, such as an engine that exports none that "
    "are known, does not fire. In a preview, which has no history of what routers reported, it does not fire.",
    settings=ReplicaDownSettings,
    sources=frozenset({Source.ENGINES, Source.SCRAPES, Source.RESPONSES}),
    evaluate=each_replica(_unreadable_finding),
    summarize=_summarize_unreadable,
    condition=lambda settings: (
        f"a replica that serves requests without a successful scrape for {duration(settings.silent_s)}"
    ),
    figure="Time without a successful scrape",
)


class ReplicaEjectedSettings(WindowSettings, frozen=True):
    """Settings of ``replica_ejected``."""

    ejected_s: Annotated[float, setting("seconds", "Time ejected by one router within the window.", gt=0, le=3600)] = (
        30.0
    )
    window_s: WindowS = 300.0
    for_s: ForS = 0.0
    keep_firing_s: KeepFiringS = 60.0

    def problem(self) -> Problem | None:
        return ("ejected_s", "expected at most window_s") if self.ejected_s > self.window_s else None


class EjectionEvidence(Evidence, frozen=True):
    routers: list[str]
    ejected_because: str


def _ejection_finding(settings: ReplicaEjectedSettings, view: HistoryView, name: str) -> Finding[EjectionEvidence]:
    """Compare the time ejected by the router that ejected the replica for longest with the limit."""
    ejected_s: dict[str, float] = {}
    reason = ""
    ejections = view.ejections(name)
    for ejection, seconds in ejections:
        ejected_s[ejection.router] = ejected_s.get(ejection.router, 0.0) + seconds
        reason = ejection.reason
    has_ended = all(ejection.end is not None and ejection.end <= view.now for ejection, _ in ejections)
    evidence = EjectionEvidence(sorted(ejected_s)[:20], reason)
    finding = above_limit(max(ejected_s.values(), default=0.0), settings.ejected_s, "seconds", evidence)
    return replace(finding, has_ended=has_ended)


def _summarize_ejected(scope: Scope, settings: ReplicaEjectedSettings, finding: Finding[EjectionEvidence]) -> str:
    routers, reason = ", ".join(finding.evidence.routers[:3]), finding.evidence.ejected_because
    times = f"for {duration(round(finding.value or 0))} of the last {duration(settings.window_s)}"
    return f"{capitalized(scope)} was ejected by {routers} {times}{f': {reason}' if reason else ''}."[:300]


REPLICA_EJECTED = Kind(
    name="replica_ejected",
    inhibited_by=(RuleKind.NO_DATA, RuleKind.REPLICA_DOWN),
    about="Fires for each replica that a router's circuit breaker ejected: its requests failed or timed out, so the "
    "router sends it none, though its metrics may be readable. Short ejections add up, so a breaker that opens and "
    "closes is found too. An ejection that began more than two days ago is not found.",
    settings=ReplicaEjectedSettings,
    sources=frozenset({Source.EJECTIONS}),
    evaluate=each_replica(_ejection_finding),
    summarize=_summarize_ejected,
    condition=lambda settings: (
        f"a replica ejected by a router for {duration(settings.ejected_s)} of {duration(settings.window_s)}"
    ),
    figure="Time ejected",
)


class KvPressureSettings(WindowSettings, frozen=True):
    """Settings of ``kv_pressure``."""

    usage_ratio: Annotated[float, setting("ratio", "Mean KV cache usage that is too high.", gt=0, le=1)] = 0.95
    preemptions_per_minute: (
        Annotated[float, setting("a minute", "Preemptions that are too many; null: no limit.", gt=0, le=1e6)] | None
    ) = 6.0
    window_s: WindowS = 300.0
    for_s: ForS = 60.0
    keep_firing_s: KeepFiringS = 600.0


class PressureEvidence(Evidence, frozen=True):
    preemptions_per_minute: float | None
    kv_usage_ratio: float | None


def _pressure_finding(settings: KvPressureSettings, view: HistoryView, name: str) -> Finding[PressureEvidence]:
    step = view.pressure(name)
    if step is None:
        return no_data(Reason.NO_READINGS)
    per_minute = None if step.preemptions is None else step.preemptions * 60 / settings.window_s
    evidence = PressureEvidence(per_minute, step.kv_usage_ratio)
    limit = settings.preemptions_per_minute
    if per_minute is not None and limit is not None and per_minute >= limit:
        return Finding(Result.BREACH, Reason.ABOVE, per_minute, limit, unit="count", evidence=evidence)
    if step.kv_usage_ratio is None:
        return no_data(Reason.NOT_REPORTED, evidence)
    return above_limit(step.kv_usage_ratio, settings.usage_ratio, "ratio", evidence)


def _summarize_pressure(scope: Scope, settings: KvPressureSettings, finding: Finding[PressureEvidence]) -> str:
    if finding.unit == "count":
        rate = f"{finding.value or 0:.1f} requests a minute"
        return f"{capitalized(scope)} preempts {rate}: its KV cache is too small for its load."
    usage = f"{percent(finding.value)} of its KV cache"
    return f"{capitalized(scope)} uses {usage} for running requests ({duration(settings.window_s)})."


def _pressure_condition(settings: KvPressureSettings) -> str:
    limit = settings.preemptions_per_minute
    preemptions = f", or {limit:g} preemptions a minute" if limit is not None else ""
    return f"KV cache usage of {percent(settings.usage_ratio)}{preemptions}, over {duration(settings.window_s)}"


KV_PRESSURE = Kind(
    name="kv_pressure",
    inhibited_by=(RuleKind.EVALUATOR_LAG, RuleKind.NO_DATA),
    about="Fires for each replica whose running requests use nearly all of its KV cache, or whose engine preempts "
    "requests. Blocks of running requests cannot hold cached prefixes: hit rates fall next.",
    settings=KvPressureSettings,
    sources=frozenset({Source.PRESSURE}),
    evaluate=each_replica(_pressure_finding),
    summarize=_summarize_pressure,
    condition=_pressure_condition,
    figure="KV usage",
)


class LoadSkewSettings(WindowSettings, frozen=True):
    """Settings of ``load_skew``."""

    most_over_mean: Annotated[
        float, setting("times", "Requests of the busiest replica divided by the mean.", gt=1, le=100)
    ] = 1.5
    min_replicas: Annotated[int, setting("replicas", "With fewer replicas there is no result.", ge=2, le=1000)] = 2
    window_s: WindowS = 300.0
    min_requests: MinRequests = 200.0
    for_s: ForS = 60.0
    keep_firing_s: KeepFiringS = 600.0
    min_waiting: (
        Annotated[
            float, setting("requests", "Mean waiting requests at the busiest replica; null: skew alone.", gt=0, le=1e6)
        ]
        | None
    ) = None


class SkewEvidence(Evidence, frozen=True):
    replicas: int
    requests: float
    busiest: str = ""
    waiting: float | None = None  # requests at the busiest replica


def _evaluate_skew(settings: LoadSkewSettings, view: HistoryView, _: str) -> Findings:
    """Compare the busiest replica with the mean of the active replicas that were scraped."""
    loads = {
        name: step.requests
        for name in view.history.replicas
        if name in view.history.active and (step := view.engine(name)) is not None and step.requests is not None
    }
    if not loads:
        return {POOL: no_data(Reason.NO_READINGS)}
    total = sum(loads.values())
    if len(loads) < settings.min_replicas:
        return {POOL: no_data(Reason.NO_REPLICAS, SkewEvidence(len(loads), total))}
    if total < settings.min_requests or not total:
        return {POOL: no_data(Reason.LITTLE_TRAFFIC, SkewEvidence(len(loads), total))}
    busiest = max(loads, key=lambda name: loads[name])
    pressure = view.pressure(busiest)
    waiting = pressure.waiting if pressure else None
    evidence = SkewEvidence(len(loads), total, busiest, waiting)
    finding = above_limit(loads[busiest] * len(loads) / total, settings.most_over_mean, "count", evidence)
    if settings.min_waiting is not None and finding.result is Result.BREACH:
        if waiting is None:
            return {POOL: no_data(Reason.NOT_REPORTED, evidence)}
        if waiting < settings.min_waiting:
            finding = replace(finding, result=Result.OK, reason=Reason.WITHIN)
    return {POOL: finding}


def _summarize_skew(scope: Scope, settings: LoadSkewSettings, finding: Finding[SkewEvidence]) -> str:
    busiest = Scope(scope.pool, replica=finding.evidence.busiest)
    ratio = f"{finding.value or 0:.2f} times the mean of its pool's requests"
    return f"{capitalized(busiest)} gets {ratio}, more than {settings.most_over_mean:g}."


def _skew_condition(settings: LoadSkewSettings) -> str:
    waiting = "" if settings.min_waiting is None else f" and {settings.min_waiting:g} waiting"
    times = f"{settings.most_over_mean:g} times the mean's requests"
    return f"a replica with {times}{waiting} over {duration(settings.window_s)}"


LOAD_SKEW = Kind(
    name="load_skew",
    inhibited_by=(RuleKind.EVALUATOR_LAG, RuleKind.NO_DATA, RuleKind.REPLICA_DOWN),
    about="Compares the busiest replica's requests with the mean over the pool's active replicas. Affinity causes some "
    "skew; a policy that bounds load keeps it low. Replicas of different weights are skewed on purpose, and so is a "
    "pool with little load: min_waiting limits the rule to skew that makes requests wait.",
    settings=LoadSkewSettings,
    sources=frozenset({Source.ENGINES, Source.PRESSURE}),
    evaluate=_evaluate_skew,
    summarize=_summarize_skew,
    condition=_skew_condition,
    figure="Busiest replica / mean",
)
