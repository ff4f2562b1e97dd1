"""One replica: what its engine's ranks count, and how scraping it goes.

How warm each replica was over a window, in a few cells: what a strip in a table shows.

Events to draw on charts, and the times at which a cache was cold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django.db.models import Q
from django.utils import timezone

from controlplane.models import Event, Replica
from controlplane.services.events import OBSERVED
from telemetry.metrics.rates import hit_rate_ratio, ratio
from telemetry.metrics.windows import PointState, Window
from telemetry.models import Reading, ScrapeState
from telemetry.services.figures.overview import HealthWord, Kind, Subject, health_of
from telemetry.storage import sums
from telemetry.storage.dimension_sums import KeyedSums, rank_sums
from telemetry.storage.replica_facts import cold_bands

COUNTED = ("queries", "hits", "external_hits", "preemptions", "finished", "prompt_tokens", "generation_tokens")


@dataclass(frozen=True, slots=True)
class RankRow:
    """One data-parallel rank of an engine over a window, with its newest gauges (H15)."""

    model: str
    engine: str
    hit_rate_ratio: float | None
    hit_rate_state: PointState
    requests_per_s: float | None
    prompt_tokens_per_s: float | None
    generation_tokens_per_s: float | None
    preemptions: int | None
    running: float | None
    waiting: float | None
    kv_usage_ratio: float | None


@dataclass(frozen=True, slots=True)
class Scraping:
    """How reading a replica goes."""

    health: HealthWord
    read_at: datetime | None = None  # the newest scrape that succeeded
    restarted_at: datetime | None = None
    lag_s: float | None = None  # how long the last scrape took
    failures: int = 0  # in a row
    lora_adapters: list[str] | None = None  # with requests at the last scrape; None: unknown


def scraping_of(replica: Replica) -> Scraping:
    """One query."""
    state = ScrapeState.objects.filter(replica=replica).defer("raw_counters").first()
    health = health_of(state, timezone.now(), added_at=replica.created_at)
    if state is None:
        return Scraping(health)
    return Scraping(health, state.ok_at, state.restarted_at, state.duration_s, state.failures, state.lora_adapters)


def rank_rows(replica: Replica, window: Window) -> list[RankRow]:
    """A row for each rank that was read in a window, by model and rank. Three queries."""
    newest = _newest(replica, window)
    return [_rank(row, newest.get(row.key)) for row in rank_sums(replica.pk, window, COUNTED, whole=True)]


def _rank(row: KeyedSums, gauges: Reading | None) -> RankRow:
    queries = row.get("queries")
    state = PointState.UNKNOWN if queries is None else PointState.OK if queries else PointState.NO_TRAFFIC
    return RankRow(
        model=row.key[0],
        engine=row.key[1],
        hit_rate_ratio=hit_rate_ratio(queries, row.get("hits"), row.get("external_hits")),
        hit_rate_state=state,
        requests_per_s=ratio(row.get("finished"), row.covered_s),
        prompt_tokens_per_s=ratio(row.get("prompt_tokens"), row.covered_s),
        generation_tokens_per_s=ratio(row.get("generation_tokens"), row.covered_s),
        preemptions=row.get("preemptions"),
        running=gauges.running if gauges else None,
        waiting=gauges.waiting if gauges else None,
        kv_usage_ratio=gauges.kv_usage_ratio if gauges else None,
    )


def _newest(replica: Replica, window: Window) -> dict[tuple[str, ...], Reading]:
    """The newest reading of each rank; none after a scrape that failed (H12)."""
    readings = Reading.objects.filter(replica=replica, at__gt=window.start, at__lte=window.end)
    last = readings.order_by("-at").values_list("at", flat=True).first()
    return {(one.model, one.engine): one for one in readings.filter(at=last) if one.state != "stale"} if last else {}


CELLS = 36
LEVELS = 10


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring cells that look the same."""

    first: int  # number of the first cell, from 0
    cells: int
    look: str  # "h0" (cold) to "h9", "cold" after a restart (H18), or a reason: "no_traffic", "stale", "unknown"


@dataclass(frozen=True, slots=True)
class Strip:
    """A replica's cells, ascending in time."""

    runs: tuple[Run, ...]
    lowest_ratio: float | None  # of the cells with traffic
    highest_ratio: float | None


def heat_strips(replicas: Sequence[Replica], window: Window) -> dict[str, Strip]:
    """A strip a replica, by name, from its engines' hit rate. Two queries."""
    cells = Window(window.start, window.end, window.length_s / CELLS)
    rates: dict[int, dict[int, tuple[float | None, PointState]]] = defaultdict(dict)
    for row in sums.hit_sums([replica.pk for replica in replicas], cells):
        value = hit_rate_ratio(row.queries, row.hits, row.external_hits)
        rates[row.key][row.step] = (value, row.state)
    cold = _cold_cells([replica.pk for replica in replicas], cells)
    return {replica.name: _strip(rates[replica.pk], cold[replica.pk]) for replica in replicas}


def _cold_cells(replica_ids: Sequence[int], cells: Window) -> dict[int, set[int]]:
    """The cells in which a cache was filling anew."""
    found: dict[int, set[int]] = defaultdict(set)
    for band in cold_bands(replica_ids, cells):
        found[band.replica_id] |= set(range(_cell(band.start, cells), _cell(band.end, cells) + 1))
    return found


def _cell(at: datetime, cells: Window) -> int:
    return int((at - cells.start).total_seconds() // cells.step_s)


def _strip(rates: dict[int, tuple[float | None, PointState]], cold: set[int]) -> Strip:
    runs: list[Run] = []
    for number in range(CELLS):
        look = _look(*rates.get(number, (None, PointState.UNKNOWN)), cold=number in cold)
        if runs and runs[-1].look == look:
            runs[-1] = Run(runs[-1].first, runs[-1].cells + 1, look)
        else:
            runs.append(Run(number, 1, look))
    known = [value for value, _ in rates.values() if value is not None]
    return Strip(tuple(runs), min(known, default=None), max(known, default=None))


def _look(ratio: float | None, state: PointState, *, cold: bool) -> str:
    if ratio is None:
        return str(state)
    return "cold" if cold else f"h{min(int(ratio * LEVELS), LEVELS - 1)}"


LIMIT = 500  # a chart cannot show more


def events_of(subject: Subject, window: Window, limit: int = LIMIT) -> list[Event]:
    """The newest events of a window that concern a subject, ascending. One query.

    Of a pool: its own and what was observed of routers. Of a replica: its own and those of its pool that name none.
    Of a task group: those of its pool, because the policies and replicas that serve it are there.
    """
    events = Event.objects.filter(at__gt=window.start, at__lte=window.end).select_related("pool", "replica", "router")
    if subject.among is not None:
        concerns = Q(pool__in=subject.among) | Q(pool=None, kind__in=OBSERVED)
        if subject.kind is Kind.REPLICA:
            concerns &= Q(replica=subject.replica) | Q(replica=None)
        events = events.filter(concerns)
    return list(events.order_by("-at", "-pk")[:limit])[::-1]


def cold_stretches(subject: Subject, window: Window) -> list[tuple[datetime, datetime]]:
    """When a replica's cache was filling anew after a restart (H18), ascending; of other subjects [], without a query.

    A part of a fleet that is cold is no reason to call the whole so.
    """
    if subject.replica is None:
        return []
    return [(band.start, band.end) for band in cold_bands([subject.replica.pk], window)]
