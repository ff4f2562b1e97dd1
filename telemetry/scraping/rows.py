"""Readings as rows of their tables, in the order of the columns that COPY names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from telemetry.metrics.engines.names import OPTIONAL_COUNTERS, WAITING_REASONS
from telemetry.metrics.histograms import Buckets
from telemetry.scraping.fold import EngineReading, RouteReading
from telemetry.storage.store import Edges, Table

ENGINE_COUNTERS = (
    "queries",
    "hits",
    "external_queries",
    "external_hits",
    "device_tokens",
    "host_tokens",
    "p2p_tokens",
    "disk_tokens",
    "other_tokens",
    "prompt_tokens",
    "generation_tokens",
    "preemptions",
    "finished",
    *OPTIONAL_COUNTERS,
)
GAUGES = ("running", "waiting", "kv_usage_ratio", *WAITING_REASONS)
ROUTE_COUNTERS = (
    "requests",
    "ok_requests",
    "client_error_requests",
    "replica_error_requests",
    "router_error_requests",
    "cancelled_requests",
    "usage_reported",
    "usage_without_details",
    "prompt_tokens",
    "cached_tokens",
    "spilled_requests",
    "predicted_answers",
    "predicted_prompt_tokens",
    "predicted_tokens",
    "predicted_cached_tokens",
)
ROUTE_HISTOGRAMS = ("ttft", "streamed_latency", "plain_latency")


def _histogram(name: str) -> tuple[str, ...]:
    return (f"{name}_layout_id", f"{name}_at", f"{name}_counts", f"{name}_sum_s")


ENGINE_TABLE = Table(
    "telemetry_reading",
    (
        *("at", "replica_id", "model", "engine", "state", "interval_s", "first_tokens", "not_reported"),
        *ENGINE_COUNTERS,
        *GAUGES,
        *_histogram("ttft"),
        *_histogram("itl"),
    ),
)
ROUTE_TABLE = Table(
    "telemetry_routerreading",
    (
        *("at", "router_id", "pool", "group", "replica", "policy", "revision", "reuse", "state", "interval_s"),
        *ROUTE_COUNTERS,
        *(column for name in ROUTE_HISTOGRAMS for column in _histogram(name)),
    ),
)


def edges_of(readings: Iterable[EngineReading | RouteReading]) -> set[Edges]:
    """Every layout that these readings need."""
    return {buckets.edges for reading in readings for buckets in reading.addition.histograms.values()}


def engine_row(replica_id: int, at: datetime, reading: EngineReading, layouts: Mapping[Edges, int]) -> tuple[Any, ...]:
    """A row of ENGINE_TABLE."""
    added = reading.addition
    return (
        at,
        replica_id,
        reading.key.model,
        reading.key.engine,
        added.state.value,
        added.interval_s,
        added.histograms["ttft"].total if "ttft" in added.histograms else None,
        None if reading.not_reported is None else sorted(reading.not_reported),
        *_counts(added.counters, ENGINE_COUNTERS),
        *(reading.gauges.get(name) for name in GAUGES),
        *_buckets(added.histograms.get("ttft"), layouts),
        *_buckets(added.histograms.get("itl"), layouts),
    )


def route_row(router_id: int, at: datetime, reading: RouteReading, layouts: Mapping[Edges, int]) -> tuple[Any, ...]:
    """A row of ROUTE_TABLE."""
    key, added = reading.key, reading.addition
    return (
        at,
        router_id,
        key.pool,
        key.group,
        key.replica,
        key.policy,
        key.revision,
        key.reuse,
        added.state.value,
        added.interval_s,
        *_counts(added.counters, ROUTE_COUNTERS),
        *(value for name in ROUTE_HISTOGRAMS for value in _buckets(added.histograms.get(name), layouts)),
    )


def _counts(counters: Mapping[str, float], names: Iterable[str]) -> Iterable[int | None]:
    return (None if (value := counters.get(name)) is None else round(value) for name in names)


def _buckets(buckets: Buckets | None, layouts: Mapping[Edges, int]) -> tuple[Any, ...]:
    if buckets is None:
        return (None, None, None, None)
    filled = sorted(buckets.counts.items())
    return (layouts[buckets.edges], [at for at, _ in filled], [count for _, count in filled], buckets.sum)
