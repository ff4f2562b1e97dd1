"""Saturation, waiting work and recommended replicas of pools, over all routers and replicas.

Theory of operation. Each router exports the part of a pool's saturation that its own requests cause, so the pool's is
their sum, up to 1; KV cache usage of the engines counts if it is higher, because requests wait for KV blocks too. The
figures are of the newest scrapes. If one connected router was not scraped lately, or does not know its part, the sum
is unknown, and so is everything that rests on it: a recommendation from old figures would remove replicas in an outage
of telemetry.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated

from django.conf import settings
from msgspec import Meta

from controlplane.models import Pool, Replica, ReplicaRole, ReplicaState, Router
from telemetry.lab.predictions import Verdict
from telemetry.lab.scaling import Caching, Demand, Limit, SizeFigures, recommend
from telemetry.metrics.rates import sum_known
from telemetry.metrics.windows import PointState, Window
from telemetry.models import CapacityCurve
from telemetry.services.figures.overview import SILENT_INTERVALS, Fleet, Pools, Subject, health_of
from telemetry.services.lab.sizing import newest_sweep
from telemetry.storage.sums import Gauges, Hits, hit_sums_by_set, mean_gauge

PEAK_S, STEP_S = 3600.0, 60.0  # time that peaks are looked for in, and the steps of which the busiest counts
MAX_CURVE_AGE = timedelta(hours=1)  # curves are computed every ten minutes
MAX_SWEEP_AGE = timedelta(days=7)  # of traffic that still resembles the present


@dataclass(frozen=True, slots=True)
class PoolScaling:
    """Scaling signals of a pool; None: unknown, and ``reason`` says why there is no recommendation."""

    pool: str
    replicas: Annotated[int, Meta(description="active ones that were scraped lately")]
    saturation_ratio: Annotated[float | None, Meta(description="0 to 1: the higher of prefill and KV usage")]
    prefill_ratio: Annotated[float | None, Meta(description="offered work / prefill rate, of all routers")]
    kv_usage_ratio: Annotated[float | None, Meta(description="mean over the replicas")]
    waiting_work_s: Annotated[float | None, Meta(description="time that the waiting tokens need")]
    peak_saturation_ratio: Annotated[
        float | None,
        Meta(description="in the busiest minute of the last hour; above 1: more than the replicas can prefill"),
    ]
    recommended_replicas: int | None
    limited_by: Annotated[Limit | None, Meta(description="what decides the recommendation")]
    reason: str


@dataclass(frozen=True, slots=True)
class _RouterSums:
    """The routers' figures of one pool; ``problem``: why they are unknown."""

    prefill_ratio: float | None = None
    waiting_s: float | None = None
    tokens_per_s: float | None = None  # of all serving replicas
    problem: str = ""


def scaling_of(pools: Pools, now: datetime, fleet: Fleet | None = None) -> list[PoolScaling]:
    """Scaling signals by pool name. At most ten queries, and two for each pool with several replicas.

    ``fleet``: what a page already read of the same pools.
    """
    fleet = fleet or Fleet(Subject(pools))
    members: dict[Pool, list[Replica]] = defaultdict(list)
    for pool in Pool.objects.order_by("name") if pools is None else pools:
        members[pool] = []
    active = [replica for replica in fleet.replicas if replica.state == ReplicaState.ACTIVE]
    serving = [replica for replica in active if health_of(fleet.states.get(replica.pk), now).is_serving]
    for replica in serving:
        members[replica.pool].append(replica)
    ids = [replica.pk for replica in serving]
    window = Window.last(PEAK_S, until=now, step_s=STEP_S)
    hits: dict[int, list[Hits]] = defaultdict(list)
    for row in hit_sums_by_set([[replica.pk for replica in listed] for listed in members.values()], window):
        hits[row.key].append(row)
    usage: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for pk, step, value, _ in mean_gauge(ids, window, "kv_usage_ratio"):
        if value is not None:
            usage[pk].append((step, value))
    gauges = fleet.gauges(now)
    routers, curves = _router_states(now), _curves(members, now)
    return [
        _scaling(
            pool,
            listed,
            _summed(routers, pool.name),
            hits[number],
            {replica.pk: usage[replica.pk] for replica in listed},
            gauges,
            curves.get(pool.pk),
            now,
        )
        for number, (pool, listed) in enumerate(members.items())
    ]


def _scaling(
    pool: Pool,
    replicas: Sequence[Replica],
    routed: _RouterSums,
    hits: Sequence[Hits],
    usage: Mapping[int, Sequence[tuple[int, float]]],
    gauges: Mapping[int, Gauges],
    curve: CapacityCurve | None,
    now: datetime,
) -> PoolScaling:
    kv_usage = _mean([gauges[replica.pk].kv_usage_ratio for replica in replicas if replica.pk in gauges])
    demand = _demand(len(replicas), routed, kv_usage, hits, usage)
    problem = routed.problem or _problem(replicas)
    found = None if problem else recommend(demand, _caching(pool, replicas, curve, hits, now))
    peaks = [ratio for ratio in (demand.prefill_ratio, demand.kv_usage_ratio) if ratio is not None]
    return PoolScaling(
        pool.name,
        len(replicas),
        None if routed.prefill_ratio is None else max(routed.prefill_ratio, kv_usage or 0.0),
        routed.prefill_ratio,
        kv_usage,
        routed.waiting_s,
        None if demand.prefill_ratio is None else max(peaks),
        found.replicas if found else None,
        found.limit if found else None,
        found.reason if found else problem,
    )


def _problem(replicas: Sequence[Replica]) -> str:
    """Why there is no recommendation although the routers' figures are known; "": there is one."""
    if not replicas:
        return "No active replica was scraped lately."
    if any(replica.role != ReplicaRole.BOTH for replica in replicas):
        return "Prefill and decode replicas are scaled separately; their numbers are not recommended."
    return ""


# --- routers ---------------------------------------------------------------------------------------------------------


def _router_states(now: datetime) -> dict[str, dict[str, dict[str, float]] | None]:
    """Figures by pool of each connected router, by its name; None: not scraped lately."""
    rows = Router.objects.filter(lost_at=None).values_list(
        "name", "scrape_state__ok_at", "scrape_state__pool_loads", named=True
    )
    newest = now - timedelta(seconds=SILENT_INTERVALS * settings.SCRAPE_INTERVAL_S + 1)
    return {name: loads if ok_at is not None and ok_at >= newest else None for name, ok_at, loads in rows}


def _summed(routers: Mapping[str, dict[str, dict[str, float]] | None], pool: str) -> _RouterSums:
    if not routers:
        return _RouterSums(problem="No router is connected.")
    loads: list[dict[str, float]] = []
    for name, by_pool in routers.items():
        if by_pool is None:
            return _RouterSums(problem=f"Router {name} was not scraped lately.")
        load = by_pool.get(pool, {})
        if "saturation_ratio" not in load:
            return _RouterSums(
                problem=f"Router {name} has not measured the prefill rate of this pool: it learns it from streamed "
                "responses that report cached tokens, with at least 512 tokens to compute."
            )
        loads.append(load)
    return _RouterSums(
        min(1.0, sum(load["saturation_ratio"] for load in loads)),
        sum(load.get("waiting_s", 0.0) for load in loads),
        _mean([load.get("prefill_tokens_per_s") for load in loads]),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


# --- what a recommendation rests on ----------------------------------------------------------------------------------


def _demand(
    count: int,
    routed: _RouterSums,
    kv_usage: float | None,
    hits: Sequence[Hits],
    usage: Mapping[int, Sequence[tuple[int, float]]],
) -> Demand:
    """The peaks of the last hour and of the present.

    Of the past only the engines' counters are stored. They include requests of clients that bypass the routers.
    """
    ratios = [routed.prefill_ratio]
    if routed.tokens_per_s:
        ratios += [row / (STEP_S * routed.tokens_per_s) for row in map(_computed, hits) if row is not None]
    by_step: dict[int, list[float]] = defaultdict(list)
    for points in usage.values():
        for step, value in points:
            by_step[step].append(value)
    usages = [kv_usage, *(sum(values) / len(values) for values in by_step.values())]
    known = sum(row.state in {PointState.OK, PointState.NO_TRAFFIC} for row in hits)
    return Demand(
        count,
        None if routed.prefill_ratio is None else max(ratio for ratio in ratios if ratio is not None),
        max((value for value in usages if value is not None), default=None),
        known,
    )


def _computed(row: Hits) -> float | None:
    """Prompt tokens that the engines had to compute."""
    if row.queries is None:
        return None
    return max(0, row.queries - (row.hits or 0) - (row.external_hits or 0))


def _caching(
    pool: Pool, replicas: Sequence[Replica], curve: CapacityCurve | None, hits: Sequence[Hits], now: datetime
) -> Caching:
    queries = sum_known(row.queries for row in hits)
    cached = sum_known([*(row.hits for row in hits), *(row.external_hits for row in hits)])
    return Caching(
        _sizes(pool, now) if len(replicas) > 1 else {},
        curve.working_set["high"] if curve is not None and curve.working_set else None,
        _mean([replica.cache_tokens for replica in replicas]),
        (cached or 0) / queries if queries else None,
    )


def _curves(members: Mapping[Pool, Sequence[Replica]], now: datetime) -> dict[int, CapacityCurve]:
    curves = CapacityCurve.objects.filter(pool__in=list(members), at__gte=now - MAX_CURVE_AGE)
    return {curve.pool_id: curve for curve in curves.only("pool_id", "working_set")}


def _sizes(pool: Pool, now: datetime) -> dict[int, SizeFigures]:
    """Figures by number of replicas of a calibrated sweep that is not too old; {} without one. Two queries."""
    sweep = newest_sweep(pool)
    if sweep is None or not sweep.is_calibrated or sweep.end < now - MAX_SWEEP_AGE:
        return {}
    return {
        point.replicas: SizeFigures(
            point.figures["hit_rate"], point.figures["prefill_gpu_s"], is_overloaded=point.verdict == Verdict.OVERLOAD
        )
        for point in sweep.by_replicas
        if point.figures and point.figures["hit_rate"] is not None and point.figures["prefill_gpu_s"] is not None
    }
