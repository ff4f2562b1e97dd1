"""Stores scrapes: readings, states and events in one transaction per batch, then the facts of engines' caches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import F

from controlplane.errors import ConflictError
from controlplane.isolation import Items, isolated_items
from controlplane.models import EventKind, PeriodicTask, Replica, Router
from controlplane.services.events import record_event
from controlplane.services.fleet.replicas import record_engine_facts
from controlplane.services.snapshots import single_snapshot
from telemetry.metrics import router as router_metrics
from telemetry.metrics.counters import SET_BACK_S
from telemetry.metrics.engine import EngineKey, ReplicaSample
from telemetry.metrics.engine_names import COUNTERS, GAUGES, OPTIONAL_COUNTERS, WAITING_REASONS, CacheFacts
from telemetry.metrics.histograms import Buckets
from telemetry.metrics.router import RouteKey, RouterSample
from telemetry.models import ScrapeState
from telemetry.scraping.merge import (
    MergedScrape,
    ScrapeFailure,
    ScrapeResult,
    SourceReading,
    TargetState,
    dump_raw_counters,
    load_raw_counters,
    merge_replica,
    merge_router,
)
from telemetry.storage.store import Edges, Row, Table, layout_ids, store_rows

log = logging.getLogger(__name__)
STATE_FIELDS = tuple(field.name for field in fields(TargetState))
SUMMARIES = {
    EventKind.REPLICA_DOWN: "Replica {} is down: {}.",
    EventKind.REPLICA_UP: "Replica {} responds again.",
    EventKind.REPLICA_RESTARTED: "Replica {} restarted: its cache is cold.",
}


@dataclass(frozen=True, slots=True)
class ReplicaScrape:
    target: Replica
    outcome: ScrapeResult[ReplicaSample] | ScrapeFailure


@dataclass(frozen=True, slots=True)
class RouterScrape:
    target: Router
    outcome: ScrapeResult[RouterSample] | ScrapeFailure


Scrape = ReplicaScrape | RouterScrape
CacheReports = list[tuple[Replica, CacheFacts]]


@dataclass(frozen=True)
class TargetKind:
    """How scrapes of replicas, or of routers, are merged and stored."""

    target: str  # "replica" or "router"
    key: type[EngineKey | RouteKey]
    merge: Callable[..., MergedScrape[Any]]
    table_name: str
    counters: tuple[str, ...]
    histograms: tuple[str, ...]
    gauges: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()

    @cached_property
    def key_columns(self) -> tuple[str, ...]:
        return tuple(field.name for field in fields(self.key))

    @cached_property
    def table(self) -> Table:
        buckets = (f"{name}_{part}" for name in self.histograms for part in ("layout_id", "at", "counts"))
        target = ("at", f"{self.target}_id", *self.key_columns, "state", "interval_s")
        return Table(self.table_name, (*target, *self.counters, *self.gauges, *self.tags, *buckets))

    def row(self, target_id: int, at: datetime, reading: SourceReading[Any], layouts: Mapping[Edges, int]) -> Row:
        """A row of the table."""
        added = reading.increase
        return (
            at,
            target_id,
            *(getattr(reading.key, name) for name in self.key_columns),
            added.state.value,
            added.interval_s,
            *(None if (count := added.counters.get(name)) is None else round(count) for name in self.counters),
            *(reading.gauges.get(name) for name in self.gauges),
            *(None if reading.not_reported is None else sorted(reading.not_reported) for _ in self.tags),
            *(value for name in self.histograms for value in _bucket_values(added.histograms.get(name), layouts)),
        )


REPLICAS = TargetKind(
    "replica",
    EngineKey,
    merge_replica,
    "telemetry_reading",
    counters=(*COUNTERS, *OPTIONAL_COUNTERS, "first_tokens"),
    gauges=(*GAUGES, *WAITING_REASONS),
    tags=("not_reported",),
    histograms=("ttft",),
)
ROUTERS = TargetKind(
    "router",
    RouteKey,
    merge_router,
    "telemetry_routerreading",
    counters=(
        "requests",
        router_metrics.SPILLED,
        *router_metrics.OUTCOMES.values(),
        *router_metrics.COUNTERS.values(),
        *router_metrics.OBJECTIVE_COUNTERS,
        *router_metrics.CACHE_COUNTERS,
    ),
    gauges=("cache_store_up",),
    histograms=("ttft", "streamed_latency", "plain_latency"),
)


def _bucket_values(buckets: Buckets | None, layouts: Mapping[Edges, int]) -> tuple[Any, ...]:
    if buckets is None:
        return (None, None, None)
    positions = sorted(buckets.counts)
    return (layouts[buckets.edges], positions, [buckets.counts[position] for position in positions])


def store_readings(kind: TargetKind, at: datetime, readings: Iterable[tuple[int, SourceReading[Any]]]) -> None:
    """Store readings of some targets, by id."""
    listed = list(readings)
    edges = {buckets.edges for _, reading in listed for buckets in reading.increase.histograms.values()}
    layouts = layout_ids(edges)
    store_rows(kind.table, [kind.row(target_id, at, reading, layouts) for target_id, reading in listed])


def record_scrapes(replicas: Sequence[ReplicaScrape], routers: Sequence[RouterScrape], *, due: datetime) -> None:
    """Store the readings of each target. A target that has readings for this time or a later one is skipped."""
    with isolated_items(PeriodicTask.SCRAPES) as item:
        _record_isolated(ROUTERS, routers, due, item)  # first: replicas' readings leave out routers' own requests
        reports = _record_isolated(REPLICAS, replicas, due, item)
    _record_facts(reports)  # last and separately: it may publish a new configuration


def _record_isolated(kind: TargetKind, scrapes: Sequence[Scrape], due: datetime, item: Items) -> CacheReports:
    """Record a batch; if that fails, each scrape separately, so that one failure costs no other target its reading."""
    if not scrapes:
        return []
    with item.all_of([scrape.target.name for scrape in scrapes]):
        return _record(kind, scrapes, due)
    reports: CacheReports = []
    for scrape in scrapes:
        with item(scrape.target.name):
            reports += _record(kind, [scrape], due)
    return reports


@transaction.atomic
def _record(kind: TargetKind, scrapes: Sequence[Scrape], due: datetime) -> CacheReports:
    """Record scrapes of different targets; returns the facts of engines' caches that changed."""
    rows = ScrapeState.objects.select_for_update().filter(**{f"{kind.target}__in": [s.target.pk for s in scrapes]})
    states = {getattr(state, f"{kind.target}_id"): state for state in rows.order_by("pk")}
    merged: list[tuple[Scrape, ScrapeState, MergedScrape[Any]]] = []
    for scrape in scrapes:
        state = states.get(scrape.target.pk) or ScrapeState(
            **{kind.target: scrape.target}, at=datetime.min.replace(tzinfo=UTC)
        )
        # A duplicate or an old scrape is skipped; a state far in the future means that the clock was set back.
        if not 0 <= (state.at - due).total_seconds() <= SET_BACK_S:
            merged.append((scrape, state, _merge(kind, scrape, state, due)))
    store_readings(kind, due, ((s.target.pk, reading) for s, _, result in merged for reading in result.readings))
    for _, state, result in merged:
        state.at = due
        state.raw_counters = dump_raw_counters(result.raw_counters)
        for name in STATE_FIELDS:
            setattr(state, name, getattr(result.state, name))
    ScrapeState.objects.bulk_create(  # one statement: an UPDATE per row would cost more than the scrapes
        [state for _, state, _ in merged],
        update_conflicts=True,
        unique_fields=[kind.target],
        update_fields=("at", "raw_counters", *STATE_FIELDS),
    )
    for _, _, result in merged:
        _add_own_requests(result.own_requests)
    reports: CacheReports = []
    for scrape, state, result in merged:
        if isinstance(scrape, ReplicaScrape):
            _record_events(scrape.target, state, result.events)
            if _reports_other_facts(scrape.target, result.facts):
                reports.append((scrape.target, result.facts))
    return reports


def _add_own_requests(counts: Mapping[str, Mapping[str, int]]) -> None:
    """Add a router's own requests to the states of the replicas that it sent them to."""
    states = ScrapeState.objects.filter(replica__name__in=counts).select_related("replica")
    for state in states.select_for_update(of=("self",)).order_by("pk") if counts else ():
        added = counts[state.replica.name if state.replica else ""]
        ScrapeState.objects.filter(pk=state.pk).update(**{name: F(name) + number for name, number in added.items()})


def _merge(kind: TargetKind, scrape: Scrape, state: ScrapeState, due: datetime) -> MergedScrape[Any]:
    before = TargetState(**{name: getattr(state, name) for name in STATE_FIELDS})
    previous = load_raw_counters(state.raw_counters, kind.key)
    interval_s = float(settings.SCRAPE_INTERVAL_S)
    return kind.merge(before, previous, scrape.outcome, due_s=due.timestamp(), interval_s=interval_s)


def _record_events(replica: Replica, state: ScrapeState, events: Iterable[str]) -> None:
    for kind in map(EventKind, events):
        summary = SUMMARIES[kind].format(replica.name, state.reason)
        record_event(kind, summary, pool=replica.pool, replica=replica)


def _reports_other_facts(replica: Replica, facts: CacheFacts) -> bool:
    return (facts.block_tokens not in {None, replica.block_tokens}) or (
        facts.capacity_blocks not in {None, replica.capacity_blocks}
    )


def _record_facts(reports: CacheReports) -> None:
    """Record the facts of engines' caches as one configuration, because a new fleet reports them all at once.

    If another transaction is changing the fleet, the next cycle records them: they still differ then.
    """
    if not reports:
        return
    one = len(reports) == 1
    reason = f"replica {reports[0][0].name} changed" if one else f"{len(reports)} replicas reported their caches"
    try:
        with single_snapshot(reason=reason):
            for replica, facts in reports:
                record_engine_facts(replica, block_tokens=facts.block_tokens, capacity_blocks=facts.capacity_blocks)
    except ConflictError:
        log.info("the fleet is being changed: cache sizes of %d replicas are recorded at the next scrape", len(reports))
