"""Readings stored directly in the tables, for tests of queries."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

from controlplane.models import Replica, Router
from telemetry.metrics.counters import Increase, ReadingState
from telemetry.metrics.engine import EngineKey
from telemetry.metrics.histograms import ROUTER_EDGES, Buckets
from telemetry.metrics.router import RouteKey
from telemetry.models import ScrapeState
from telemetry.scraping.merge import FAILED_SCRAPE, ROUTER_ITSELF, SourceReading
from telemetry.scraping.record import REPLICAS, ROUTERS, TargetKind, store_readings
from telemetry.storage.store import layout_ids, store_rows

EDGES = (0.1, 0.5, 1.0, 5.0)
Stored = tuple[TargetKind, datetime, int, SourceReading[Any]]
_batches: list[list[Stored]] = []  # of the open blocks of ``stored_together``


@contextmanager
def stored_together() -> Iterator[None]:
    """Store the readings of a block at its end, all replicas' and all routers' by one statement each."""
    _batches.append([])
    try:
        yield
    finally:
        stored = _batches.pop()
    for kind in (REPLICAS, ROUTERS):
        _store_rows(kind, [it for it in stored if it[0] is kind])


def _store_rows(kind: TargetKind, stored: Sequence[Stored]) -> None:
    layouts = layout_ids({buckets.edges for *_, it in stored for buckets in it.increase.histograms.values()})
    store_rows(kind.table, [kind.row(target_id, at, reading, layouts) for _, at, target_id, reading in stored])


def _store(kind: TargetKind, at: datetime, target_id: int, reading: SourceReading[Any]) -> None:
    if _batches:
        _batches[-1].append((kind, at, target_id, reading))
    else:
        store_readings(kind, at, [(target_id, reading)])


def engine_reading(
    replica: Replica,
    at: datetime,
    *,
    engine: str = "0",
    state: ReadingState = ReadingState.OK,
    interval_s: float = 5.0,
    ttft: dict[int, int] | None = None,
    edges: tuple[float, ...] = EDGES,
    gauges: dict[str, float] | None = None,
    not_reported: Collection[str] = (),
    **counters: float,
) -> None:
    """Store one engine's reading; counters by name, ``ttft`` as {position: count}."""
    histograms = {} if ttft is None else {"ttft": Buckets(edges, ttft)}
    if ttft is not None:
        counters["first_tokens"] = sum(ttft.values())
    increase = Increase(state, interval_s, counters, histograms)
    reading = SourceReading(EngineKey("tiny", engine), increase, gauges or {}, frozenset(not_reported))
    _store(REPLICAS, at, replica.pk, reading)


def gap(replica: Replica, at: datetime) -> None:
    """Store the reading of a failed scrape."""
    _store(REPLICAS, at, replica.pk, SourceReading(FAILED_SCRAPE, Increase(ReadingState.STALE)))


def route_reading(
    router: Router,
    at: datetime,
    *,
    pool: str = "chat",
    group: str = "",
    replica: str = "r1",
    ttft: dict[int, int] | None = None,
    streamed: dict[int, int] | None = None,
    plain: dict[int, int] | None = None,
    revision: int | None = None,
    reuse: str = "",
    **counters: float,
) -> None:
    """Store one key's reading of a router, by default of revision 1.

    ``ttft`` is of streamed responses, ``streamed`` and ``plain`` are latencies, {position: count}; with ``revision`` or
    ``reuse`` they are of all replicas together.
    """
    observed = {"ttft": ttft, "streamed_latency": streamed, "plain_latency": plain}
    histograms = {name: Buckets(ROUTER_EDGES, counts) for name, counts in observed.items() if counts is not None}
    is_timed = any(observed.values())
    key = RouteKey(pool, group, replica, "" if is_timed else "chat", 0 if is_timed else revision or 1)
    if is_timed and revision is not None:
        key = RouteKey(pool, group, "", "chat", revision)
    if reuse:
        key = RouteKey(pool, group, "", "", 0, reuse)
    reading = SourceReading(key, Increase(ReadingState.OK, 5.0, counters, histograms))
    _store(ROUTERS, at, router.pk, reading)


def cache_reading(router: Router, at: datetime, *, pool: str = "chat", group: str, **counters: float) -> None:
    """Store a router's reading of a task group's response cache."""
    increase = Increase(ReadingState.OK, 5.0, counters)
    _store(ROUTERS, at, router.pk, SourceReading(RouteKey(pool, group), increase))


def router_scraped(
    router: Router, at: datetime, *, stale: bool = False, store_up: float | None = None, covered_s: float = 5.0
) -> None:
    """Store the router's own reading: it was scraped, or that failed. ``store_up``: of response caches."""
    increase = Increase(ReadingState.STALE) if stale else Increase(ReadingState.OK, covered_s)
    gauges = {} if store_up is None else {"cache_store_up": store_up}
    _store(ROUTERS, at, router.pk, SourceReading(ROUTER_ITSELF, increase, gauges))


def scraped(replica: Replica, at: datetime, **fields: object) -> ScrapeState:
    """Store the scrape state of a replica."""
    values = {"at": at, "ok_at": at, "health": "up", **fields}
    return ScrapeState.objects.create(replica=replica, **values)


def steps(start: datetime, count: int, every_s: float = 5.0) -> list[datetime]:
    """Times of scrapes, the first one an interval after ``start``."""
    return [start + timedelta(seconds=every_s * number) for number in range(1, count + 1)]
