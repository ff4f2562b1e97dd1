"""Rules on response caches: their store, the share of requests that they answer, and wrong semantic responses."""

from __future__ import annotations

from typing import Annotated

from telemetry.alerts.findings import (
    POOL,
    Evidence,
    Finding,
    Findings,
    Reason,
    Result,
    above_limit,
    below_limit,
    no_data,
)
from telemetry.alerts.history_window import HistoryView, ShareStep, Source, whole_steps
from telemetry.alerts.kinds.base import (
    CurrentSettings,
    ForS,
    KeepFiringS,
    Kind,
    MinRequests,
    Problem,
    Scope,
    WindowS,
    WindowSettings,
    duration,
    percent,
    setting,
)
from telemetry.models import RuleKind


class CacheStoreDownSettings(WindowSettings, frozen=True):
    """Settings of ``cache_store_down``."""

    down_s: Annotated[float, setting("seconds", "Time within the window that the store is down.", gt=0, le=3600)] = (
        120.0
    )
    window_s: WindowS = 300.0
    for_s: ForS = 0.0
    keep_firing_s: KeepFiringS = 60.0

    def problem(self) -> Problem | None:
        """The rule must be able to fire."""
        return ("down_s", "expected at most window_s") if self.down_s > self.window_s else None


class StoreEvidence(Evidence, frozen=True):
    router: str  # the one that lacks the store longest
    routers: list[str]  # beyond the limit
    present: int


def _evaluate_store(settings: CacheStoreDownSettings, view: HistoryView, _: str) -> Findings:
    """Compare the time for which a router could not use the store with the limit; the worst router decides."""
    down = view.cache_stores()
    if not view.history.has_response_cache or not down:
        return {POOL: no_data(Reason.NO_CACHE)}
    worst = max(down, key=lambda router: down[router])
    affected = sorted(router for router, ratio in down.items() if ratio * settings.window_s >= settings.down_s)
    evidence = StoreEvidence(worst, affected[:20], len(down))
    return {POOL: above_limit(down[worst] * settings.window_s, settings.down_s, "seconds", evidence)}


def _summarize_store(scope: Scope, settings: CacheStoreDownSettings, finding: Finding[StoreEvidence]) -> str:
    routers = f"{len(finding.evidence.routers)} of {finding.evidence.present} routers"
    lasted = f"{duration(finding.value)} of the last {duration(settings.window_s)}"
    return f"{routers} could not use the store of response caches for {lasted}: {scope} has fewer cached responses."


CACHE_STORE_DOWN = Kind(
    name="cache_store_down",
    inhibited_by=(RuleKind.EVALUATOR_LAG,),
    is_fleet_wide=True,
    about="Fires when a router cannot use the store in which routers share stored responses: its server is down, slow "
    "or full. Requests are served, but every router answers from its own memory only. All routers and pools share one "
    "store. No result in a pool without a response cache, and where routers have no store.",
    settings=CacheStoreDownSettings,
    sources=frozenset({Source.CACHE_STORE}),
    evaluate=_evaluate_store,
    summarize=_summarize_store,
    condition=lambda settings: (
        f"a router cannot use the store of response caches for {duration(settings.down_s)} of "
        f"{duration(settings.window_s)}"
    ),
    figure="Time down",
)


class CacheShareDropSettings(WindowSettings, frozen=True):
    """Settings of ``cache_share_drop``."""

    drop_points: Annotated[float, setting("points of 100", "Size of a drop to report.", ge=1, le=100)] = 20.0
    window_s: WindowS = 600.0
    baseline_s: Annotated[
        float, setting("seconds", "Period before the window whose share is the level.", ge=300, le=14_400)
    ] = 3600.0
    min_requests: MinRequests = 200.0
    for_s: ForS = 60.0
    keep_firing_s: KeepFiringS = 600.0

    @property
    def lookback_s(self) -> float:
        return self.window_s + self.baseline_s

    def problem(self) -> Problem | None:
        """The level needs some windows of its own."""
        if self.baseline_s < MIN_BASELINE_WINDOWS * self.window_s:
            return "baseline_s", f"expected at least {MIN_BASELINE_WINDOWS} times window_s"
        return None


MIN_BASELINE_WINDOWS = 3  # with requests, before the newest one


class ShareEvidence(Evidence, frozen=True):
    requests: float
    baseline_requests: float


def _evaluate_share(settings: CacheShareDropSettings, view: HistoryView, group: str) -> Findings:
    """Compare the share of hits in the newest window with that of the windows before."""
    if not view.history.has_response_cache:
        return {POOL: no_data(Reason.NO_CACHE)}
    (newest,) = view.cache_requests(group or None, 1) or (ShareStep(0, 0),)
    earlier = view.cache_requests(group or None, whole_steps(settings.baseline_s, settings.window_s), before=1)
    requests, hits = sum(step.requests for step in earlier), sum(step.part for step in earlier)
    evidence = ShareEvidence(newest.requests, requests)
    if newest.requests < max(settings.min_requests, 1):
        return {POOL: no_data(Reason.LITTLE_TRAFFIC, evidence)}
    if len(earlier) < MIN_BASELINE_WINDOWS or requests < max(settings.min_requests, 1):
        return {POOL: no_data(Reason.LITTLE_HISTORY, evidence)}
    share, level = newest.part / newest.requests, hits / requests
    limit = level - settings.drop_points / 100
    return {POOL: below_limit(share, limit, evidence, is_breach=share <= limit + 1e-9, baseline=level)}


def _summarize_share(scope: Scope, settings: CacheShareDropSettings, finding: Finding[ShareEvidence]) -> str:
    fell = f"from {percent(finding.baseline)} to {percent(finding.value)}"
    counts = f"{finding.evidence.requests:.0f} cacheable requests in {duration(settings.window_s)}"
    return f"The share that the response cache of {scope} answers fell {fell} ({counts})."


CACHE_SHARE_DROP = Kind(
    name="cache_share_drop",
    inhibited_by=(RuleKind.EVALUATOR_LAG, RuleKind.CACHE_STORE_DOWN),
    about="Compares the share of cacheable requests that the response cache answered with its level before: a new "
    "version or another sampling setting of a client, a changed prompt, a store that lost its entries. A purge causes "
    "a drop too. A level that stays lower becomes the new level.",
    settings=CacheShareDropSettings,
    sources=frozenset({Source.CACHE_REQUESTS}),
    group_sources=frozenset({Source.CACHE_REQUESTS}),
    evaluate=_evaluate_share,
    summarize=_summarize_share,
    condition=lambda settings: (
        f"{settings.drop_points:g} points fewer hits of the response cache in {duration(settings.window_s)} than in "
        f"{duration(settings.baseline_s)} before"
    ),
    figure="Response cache hits",
)


class SemanticCachePrecisionSettings(CurrentSettings, frozen=True):
    """Settings of ``semantic_cache_precision``; the limit is that of each task group."""

    for_s: ForS = 0.0
    keep_firing_s: KeepFiringS = 300.0


class PrecisionEvidence(Evidence, frozen=True):
    group: str
    checks: float
    routers: list[str]  # that stopped serving


def _evaluate_semantic_cache(_: SemanticCachePrecisionSettings, view: HistoryView, group: str) -> Findings:
    """Whether routers stopped serving from the semantic cache of the task group, or of any group of the pool."""
    caches = view.history.semantic_caches
    found = {name: cache for name, cache in caches.items() if not group or name == group}
    if not found:
        return {POOL: no_data(Reason.NOT_REPORTED)}
    stopped = {name: cache for name, cache in found.items() if cache.stopped_at and cache.precision is not None}
    name, cache = min((stopped or found).items(), key=lambda item: (item[1].precision is None, item[1].precision or 0))
    evidence = PrecisionEvidence(name, cache.checks, list(cache.stopped_at[:20]))
    if cache.precision is None:
        return {POOL: no_data(Reason.LITTLE_TRAFFIC, evidence)}
    if not stopped and cache.precision < cache.min_precision:  # in shadow, or not yet served
        return {POOL: Finding(Result.OK, Reason.WITHIN, cache.precision, evidence=evidence)}
    return {POOL: below_limit(cache.precision, cache.min_precision, evidence, is_breach=bool(stopped))}


def _summarize_semantic_cache(
    scope: Scope, _: SemanticCachePrecisionSettings, finding: Finding[PrecisionEvidence]
) -> str:
    group = Scope(scope.pool, finding.evidence.group)
    routers = ", ".join(finding.evidence.routers)
    precision = f"{percent(finding.value)} of the latest checks were right, below the limit of {percent(finding.limit)}"
    return f"The semantic cache of {group} stopped serving a caller at {routers}: {precision}."[:300]


SEMANTIC_CACHE_PRECISION = Kind(
    name="semantic_cache_precision",
    inhibited_by=(),
    about="Fires when routers stop serving a caller stored responses of similar requests, because the precision of its "
    "latest checks is below the task group's limit. They check all of its requests until it has recovered. A cache in "
    "shadow, or with too few checks, does not fire. It evaluates the current state, of which no history is stored: "
    "there is no preview.",
    settings=SemanticCachePrecisionSettings,
    sources=frozenset({Source.SEMANTIC_CACHES}),
    group_sources=frozenset({Source.SEMANTIC_CACHES}),
    evaluate=_evaluate_semantic_cache,
    summarize=_summarize_semantic_cache,
    condition=lambda _: "the precision of a caller's recent checks is below the limit, and routers stopped serving it",
    figure="Precision of recent checks",
)
