"""Which lines ``/series`` can draw: (metric, by) -> the query."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from controlplane.errors import InvalidError
from telemetry.metrics.windows import Series, Window
from telemetry.services.figures import engine_details, routed, series, tiers
from telemetry.services.figures.overview import Pools
from telemetry.services.figures.subjects import Subject

Query = Callable[[Pools, Window], list[Series]]


def _of_pools(query: Callable[[Subject, Window], list[Series]]) -> Query:
    """A chart of pages, of pools together."""
    return lambda pools, window: query(Subject(pools), series.still_kept(window))


# The first ``by`` of a metric is its default.
CHARTS: dict[str, dict[str, Query]] = {
    "hit_rate": {
        "replica": series.hit_rate_by_replica,
        "group": series.hit_rate_by_group,
        "pool": series.hit_rate_by_pool,
        "tier": tiers.reuse_by_tier,
    },
    "reachable": {
        "pool": partial(series.reachable_by, by="pool"),
        "group": partial(series.reachable_by, by="group"),
    },
    "local_hit_rate": {"replica": partial(series.hit_rate_by_replica, local=True)},
    "ttft": {"quantile": series.ttft_quantiles, "reuse": series.ttft_by_reuse},
    "engine_ttft": {
        "quantile": partial(series.ttft_quantiles, source="engine"),
        "phase": _of_pools(engine_details.queue_and_prefill),
    },
    "kv_usage": {"replica": partial(series.utilization_by_replica, what="kv_usage")},
    "running": {"replica": partial(series.utilization_by_replica, what="running")},
    "waiting": {
        "replica": partial(series.utilization_by_replica, what="waiting"),
        "reason": _of_pools(engine_details.waiting_by_reason),
    },
    "prompt_share": {"source": _of_pools(engine_details.prompt_sources)},
    "mm_hit_rate": {"pools": _of_pools(engine_details.mm_hit_rate)},
    "block_time": {"phase": _of_pools(engine_details.block_times)},
    "sampled_evictions": {"replica": _of_pools(engine_details.sampled_evictions)},  # a minute
    "cache_churn": {"replica": _of_pools(engine_details.cache_churn)},  # turnovers an hour
    **{
        what: {"group": partial(routed.by_group, what=what), "pool": partial(routed.by_pool, what=what)}
        for what in routed.VALUES  # sums over each step, not rates
    },
    "latency": {"plain": partial(routed.latency, streamed=False), "streamed": partial(routed.latency, streamed=True)},
}


def chart(metric: str, by: str | None) -> tuple[str, Query]:
    """The query and what it is drawn by; InvalidError for a chart that does not exist."""
    if metric not in CHARTS:
        raise InvalidError("$.metric", f"expected one of {', '.join(CHARTS)}")
    ways = CHARTS[metric]
    by = by or next(iter(ways))
    if by not in ways:
        raise InvalidError("$.by", f"{metric} is drawn by {' or '.join(ways)}")
    return by, ways[by]
