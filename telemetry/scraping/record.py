"""Readings as rows of their tables, in the order of the columns that COPY names.

What scrapes brought, folded into the database: readings, what to remember, events. One transaction a batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from django.conf import settings
from django.db import transaction

from controlplane.errors import ConflictError
from controlplane.isolation import Items, isolated_items
from controlplane.models import EventKind, PeriodicTask, Replica, Router
from controlplane.services.events import record_event
from controlplane.services.fleet.replicas import record_engine_facts
from controlplane.services.snapshots import single_snapshot
from telemetry.metrics.engine import ReplicaSample
from telemetry.metrics.engines.names import OPTIONAL_COUNTERS, WAITING_REASONS, CacheFacts
from telemetry.metrics.histograms import Buckets
from telemetry.metrics.rates import SET_BACK_S
from telemetry.metrics.router import RouterSample
from telemetry.models import ScrapeState
from telemetry.scraping.merge import (
    Condition,
    EngineReading,
    Failure,
    Folded,
    RouteReading,
    Taken,
    dump_marks,
    fold_replica,
    fold_router,
    load_engine_marks,
    load_route_marks,
)
from telemetry.storage.store import Edges, Table, layout_ids, store_rows

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


log = logging.getLogger(__name__)
KEPT = (
    "at",
    "ok_at",
    "health",
    "failures",
    "reason",
    "restarted_at",
    "asleep",
    "duration_s",
    "engine",
    "role",
    "lora_adapters",
    "raw_counters",
)
SUMMARIES = {
    EventKind.REPLICA_DOWN: "Replica {} is down: {}.",
    EventKind.REPLICA_UP: "Replica {} answers again.",
    EventKind.REPLICA_RESTARTED: "Replica {} restarted: its cache is cold.",
}


@dataclass(frozen=True, slots=True)
class ReplicaScrape:
    """One replica's scrape."""

    replica: Replica
    outcome: Taken[ReplicaSample] | Failure


@dataclass(frozen=True, slots=True)
class RouterScrape:
    """One router's scrape."""

    router: Router
    outcome: Taken[RouterSample] | Failure


Scrape = TypeVar("Scrape", ReplicaScrape, RouterScrape)
Facts = list[tuple[Replica, CacheFacts]]


def record_scrapes(replicas: Sequence[ReplicaScrape], routers: Sequence[RouterScrape], *, due: datetime) -> None:
    """Store one reading or one gap per target. A target that has one for this time, or a later one, is left alone."""
    with isolated_items(PeriodicTask.SCRAPES) as item:
        facts = _batch_or_singly(_record_replicas, replicas, due, item)
        _batch_or_singly(_record_routers, routers, due, item)
    _record_facts(facts)  # last, and by itself: it may freeze a new configuration


def _record_facts(facts: Facts) -> None:
    """What engines tell of their caches, which is news of a whole fleet at once when that is new: one configuration.

    Where somebody else changes the fleet in the same moment the next tick does it, as it is news still.
    """
    if not facts:
        return
    try:
        with single_snapshot(reason=_reason(facts)):
            for replica, told in facts:
                record_engine_facts(replica, block_tokens=told.block_tokens, capacity_blocks=told.capacity_blocks)
    except ConflictError:
        log.info("the fleet is being changed; what %d replicas tell of their caches waits", len(facts))


def _reason(facts: Facts) -> str:
    return f"replica {facts[0][0].name} changed" if len(facts) == 1 else f"{len(facts)} replicas told their caches"


def _batch_or_singly(
    record: Callable[[Sequence[Scrape], datetime], Facts], scrapes: Sequence[Scrape], due: datetime, item: Items
) -> Facts:
    """Record a batch; where that fails, each scrape by itself, so that one costs no other its reading."""
    names = [_name(scrape) for scrape in scrapes]
    facts: Facts = []
    with item.all_of(names):
        if scrapes:
            return record(scrapes, due)
    for name, scrape in zip(names, scrapes, strict=True):
        with item(name):
            facts += record([scrape], due)
    return facts


def _name(scrape: ReplicaScrape | RouterScrape) -> str:
    return scrape.replica.name if isinstance(scrape, ReplicaScrape) else scrape.router.name


@transaction.atomic
def _record_replicas(scrapes: Sequence[ReplicaScrape], due: datetime) -> Facts:
    """The facts that are news come back."""
    ids = [scrape.replica.pk for scrape in scrapes]
    states = {
        state.replica_id: state
        for state in ScrapeState.objects.select_for_update().filter(replica_id__in=ids).order_by("pk")
    }
    folded: dict[int, Folded] = {}
    for scrape in scrapes:
        state = states.setdefault(
            scrape.replica.pk, ScrapeState(replica=scrape.replica, at=datetime.min.replace(tzinfo=UTC))
        )
        if not _is_late(state, due):
            marks = load_engine_marks(state.raw_counters)
            folded[scrape.replica.pk] = fold_replica(_condition(state), marks, scrape.outcome, **_timing(due))
    layouts = layout_ids(edges_of(reading for fold in folded.values() for reading in fold.engines))
    rows = [engine_row(pk, due, reading, layouts) for pk, fold in folded.items() for reading in fold.engines]
    store_rows(ENGINE_TABLE, rows)
    for pk, fold in folded.items():
        _keep(states[pk], fold.condition, due)
        states[pk].raw_counters = dump_marks(fold.engine_marks)
    _save([states[pk] for pk in folded], "replica")
    _tell([(scrape.replica, folded[scrape.replica.pk]) for scrape in scrapes if scrape.replica.pk in folded])
    return [(scrape.replica, folded[scrape.replica.pk].facts) for scrape in scrapes if _news(scrape.replica, folded)]


@transaction.atomic
def _record_routers(scrapes: Sequence[RouterScrape], due: datetime) -> Facts:
    """A router tells no facts."""
    ids = [scrape.router.pk for scrape in scrapes]
    states = {
        state.router_id: state
        for state in ScrapeState.objects.select_for_update().filter(router_id__in=ids).order_by("pk")
    }
    folded: dict[int, Folded] = {}
    for scrape in scrapes:
        state = states.setdefault(
            scrape.router.pk, ScrapeState(router=scrape.router, at=datetime.min.replace(tzinfo=UTC))
        )
        if not _is_late(state, due):
            marks = load_route_marks(state.raw_counters)
            folded[scrape.router.pk] = fold_router(_condition(state), marks, scrape.outcome, **_timing(due))
    layouts = layout_ids(edges_of(reading for fold in folded.values() for reading in fold.routes))
    rows = [route_row(pk, due, reading, layouts) for pk, fold in folded.items() for reading in fold.routes]
    store_rows(ROUTE_TABLE, rows)
    for pk, fold in folded.items():
        _keep(states[pk], fold.condition, due)
        states[pk].raw_counters = dump_marks(fold.route_marks)
    _save([states[pk] for pk in folded], "router")
    return []


def _is_late(state: ScrapeState, due: datetime) -> bool:
    """A duplicate or an old scrape; one of long ago means that the clock was set back, and counts."""
    return 0 <= (state.at - due).total_seconds() <= SET_BACK_S


def _timing(due: datetime) -> dict[str, float]:
    return {"due_s": due.timestamp(), "interval_s": float(settings.SCRAPE_INTERVAL_S)}


def _condition(state: ScrapeState) -> Condition:
    return Condition(
        health=state.health,
        failures=state.failures,
        ok_at=state.ok_at,
        restarted_at=state.restarted_at,
        reason=state.reason,
        asleep=state.asleep,
        duration_s=state.duration_s,
        engine=state.engine,
        role=state.role,
        lora_adapters=None if state.lora_adapters is None else tuple(state.lora_adapters),
    )


def _keep(state: ScrapeState, condition: Condition, due: datetime) -> None:
    state.at = due
    state.ok_at = condition.ok_at
    state.health = condition.health
    state.failures = condition.failures
    state.reason = condition.reason
    state.restarted_at = condition.restarted_at
    state.asleep = condition.asleep
    state.duration_s = condition.duration_s
    state.engine = condition.engine
    state.role = condition.role
    state.lora_adapters = None if condition.lora_adapters is None else list(condition.lora_adapters)


def _save(states: list[ScrapeState], target: str) -> None:
    """As one statement: an update of a hundred rows in Django's way costs more than scraping them."""
    ScrapeState.objects.bulk_create(states, update_conflicts=True, unique_fields=[target], update_fields=KEPT)


def _tell(folds: list[tuple[Replica, Folded]]) -> None:
    for replica, fold in folds:
        for kind in map(EventKind, fold.happened):
            summary = SUMMARIES[kind].format(replica.name, fold.condition.reason)
            record_event(kind, summary, pool=replica.pool, replica=replica)


def _news(replica: Replica, folded: dict[int, Folded]) -> bool:
    facts = folded[replica.pk].facts if replica.pk in folded else CacheFacts()
    return (facts.block_tokens not in {None, replica.block_tokens}) or (
        facts.capacity_blocks not in {None, replica.capacity_blocks}
    )
