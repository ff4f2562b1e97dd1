"""Rules on a hit rate in one window: below a fixed value, or different from what was predicted.

Theory of operation of ``prediction_gap``. Three hit rates of a replica can be known: the one that the router predicted
and the one that responses reported, both of the same responses, and the one by the engine's own counters of nearly the
same requests. They are compared as on the replica's page (``metrics/rates.py``): the prediction with the responses that
had one, and the engine with all responses, where routers have the responses of nearly all of its requests. A pair that
is far apart means that placement relies on a wrong estimate, or that a counter is wrong. The finding is that of the
pair farthest apart.
"""

from __future__ import annotations

from typing import Annotated

from telemetry.alerts.findings import (
    POOL,
    Evidence,
    Finding,
    Findings,
    Reason,
    TrafficEvidence,
    above_limit,
    below_limit,
    no_data,
)
from telemetry.alerts.history_window import HistoryView, ReplicaStep, Source, WindowSum
from telemetry.alerts.kinds.base import (
    ForS,
    KeepFiringS,
    Kind,
    MinRequests,
    MinTokens,
    Scope,
    WarmUpS,
    WindowS,
    WindowSettings,
    basis_text,
    duration,
    has_traffic,
    no_result_reason,
    percent,
    setting,
    with_restarts,
)
from telemetry.metrics.rates import Agreement, EngineCounts, RouterCounts, compare
from telemetry.models import RuleKind


class HitRateFloorSettings(WindowSettings, frozen=True):
    """Settings of ``hit_rate_floor``."""

    floor_ratio: Annotated[float, setting("ratio", "A hit rate below this value is too low.", gt=0, le=1)] = 0.5
    window_s: WindowS = 300.0
    min_requests: MinRequests = 50.0
    min_tokens: MinTokens = 20_000.0
    warm_up_s: WarmUpS = 300.0
    for_s: ForS = 60.0
    keep_firing_s: KeepFiringS = 600.0

    @property
    def warm_up_lookback_s(self) -> float:
        return self.warm_up_s


def _evaluate_floor(settings: HitRateFloorSettings, view: HistoryView, group: str) -> Findings:
    """Compare the newest window with the floor."""
    return {POOL: with_restarts(_compare_with_floor(settings, view.window(group)), view, settings.warm_up_s)}


def _compare_with_floor(settings: HitRateFloorSettings, window: WindowSum) -> Finding[TrafficEvidence]:
    evidence = TrafficEvidence(window.requests, window.queries, window.accounted_ratio)
    if window.ratio is None or not has_traffic(window, settings):
        return no_data(no_result_reason(window), evidence)
    floor = settings.floor_ratio
    return below_limit(window.ratio, floor, evidence, is_breach=window.ratio < floor)


def _summarize_floor(scope: Scope, settings: HitRateFloorSettings, finding: Finding[TrafficEvidence]) -> str:
    floor = percent(settings.floor_ratio)
    return f"Hit rate of {scope} is {percent(finding.value)}, below its floor of {floor}.{basis_text(finding.evidence)}"


HIT_RATE_FLOOR = Kind(
    name="hit_rate_floor",
    inhibited_by=(RuleKind.EVALUATOR_LAG, RuleKind.NO_DATA, RuleKind.REPLICA_DOWN),
    about="Compares the hit rate with a fixed value: for a fleet whose cost or capacity was planned with one. It does "
    "not know what is usual; a drop that stays above the floor is detected by a Hit rate drop rule.",
    settings=HitRateFloorSettings,
    sources=frozenset({Source.ENGINES}),
    group_sources=frozenset({Source.GROUPS}),
    evaluate=_evaluate_floor,
    summarize=_summarize_floor,
    condition=lambda settings: f"hit rate below {percent(settings.floor_ratio)} over {duration(settings.window_s)}",
    is_drop=True,
    figure="Hit rate",
)


class PredictionGapSettings(WindowSettings, frozen=True):
    """Settings of ``prediction_gap``."""

    gap_points: Annotated[float, setting("points of 100", "Difference that is too large.", ge=1, le=100)] = 5.0
    window_s: WindowS = 300.0
    min_requests: MinRequests = 200.0
    for_s: ForS = 60.0
    keep_firing_s: KeepFiringS = 600.0


class GapEvidence(Evidence, frozen=True):
    requests: float | None
    between: tuple[str, str] | None = None  # "predicted" or "counted", and "delivered"
    predicted: float | None = None
    counted: float | None = None
    delivered: float | None = None


def _evaluate_gap(settings: PredictionGapSettings, view: HistoryView, _: str) -> Findings:
    """Compare the hit rates of each replica whose responses routers counted."""
    history = view.history
    return {
        name: _gap_finding(
            settings,
            view.responses(name) or RouterCounts(),
            _engine_counts(view.engine(name), is_decode=name not in history.hit_rate_replicas),
        )
        for name in history.replicas
        if name in history.responses
    }


def _engine_counts(step: ReplicaStep | None, *, is_decode: bool) -> EngineCounts:
    if step is None:
        return EngineCounts(is_decode=is_decode)
    reports = step.hits is not None or not step.requests
    return EngineCounts(step.queries, step.hits, requests=step.requests, reports=reports, is_decode=is_decode)


def _gap_finding(settings: PredictionGapSettings, counts: RouterCounts, engine: EngineCounts) -> Finding[GapEvidence]:
    gap = compare(engine, counts, min_requests=max(settings.min_requests, 1.0))
    if gap.points is None or gap.rates is None:
        too_few = gap.agreement is Agreement.TOO_FEW
        return no_data(Reason.LITTLE_TRAFFIC if too_few else Reason.NOT_REPORTED, GapEvidence(counts.requests))
    compared, delivered = gap.rates
    if gap.is_of_prediction:
        evidence = GapEvidence(counts.requests, ("predicted", "delivered"), predicted=compared, delivered=delivered)
    else:
        evidence = GapEvidence(counts.requests, ("counted", "delivered"), counted=compared, delivered=delivered)
    return above_limit(gap.points / 100, settings.gap_points / 100, "ratio", evidence)


def _summarize_gap(scope: Scope, _: PredictionGapSettings, finding: Finding[GapEvidence]) -> str:
    evidence = finding.evidence
    source = "routers predict" if evidence.counted is None else "the engine counts"
    compared = percent(evidence.predicted if evidence.counted is None else evidence.counted)
    return f"Hit rates of {scope} disagree: {source} {compared}, responses report {percent(evidence.delivered)}."


PREDICTION_GAP = Kind(
    name="prediction_gap",
    inhibited_by=(RuleKind.EVALUATOR_LAG, RuleKind.NO_DATA, RuleKind.REPLICA_DOWN),
    about="Compares, for each replica, the hit rate that routers predicted, that responses reported, and that the "
    "engine counted, as its page does. A gap means that placement relies on a wrong estimate: a cache that was reset, "
    "a block size that is not the engine's, or a counter that does not count. Where more than a tenth of an engine's "
    "requests do not come through routers, its counters are not compared with responses.",
    settings=PredictionGapSettings,
    sources=frozenset({Source.RESPONSES, Source.ENGINES}),
    evaluate=_evaluate_gap,
    summarize=_summarize_gap,
    condition=lambda settings: (
        f"hit rates of one replica {settings.gap_points:g} points apart over {duration(settings.window_s)}"
    ),
    figure="Difference of hit rates",
)
