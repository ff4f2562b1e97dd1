"""Details of replicas: ranks, heat strips of the hit rate, and events and cold periods for charts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django.db.models import Q

from controlplane.models import Event, Replica
from controlplane.services.events import OBSERVED
from telemetry.metrics.rates import hit_rate_ratio, ratio
from telemetry.metrics.windows import PointState, Window
from telemetry.models import Reading
from telemetry.services.figures.overview import Kind, Subject
from telemetry.storage import sums
from telemetry.storage.dimension_sums import KeyedSums, rank_sums
from telemetry.storage.replica_facts import cold_bands

COUNTED = ("queries", "hits", "external_hits", "preemptions", "finished", "prompt_tokens", "generation_tokens")


@dataclass(frozen=True, slots=True)
class RankRow:
    """One data-parallel rank of an engine over a window, with its newest gauges."""

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


def rank_rows(replica: Replica, window: Window) -> list[RankRow]:
    """A row for each rank scraped in the window, by model and rank. Three queries."""
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
    """The newest reading of each rank; none after a scrape that failed."""
    readings = Reading.objects.filter(replica=replica, at__gt=window.start, at__lte=window.end)
    last = readings.order_by("-at").values_list("at", flat=True).first()
    return {(row.model, row.engine): row for row in readings.filter(at=last) if row.state != "stale"} if last else {}


CELLS = 36
LEVELS = 10


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive cells with the same style."""

    first: int  # number of the first cell, from 0
    cells: int
    style: str  # "h0" (cold) to "h9", "cold" after a restart, or a reason: "no_traffic", "stale", "unknown"


@dataclass(frozen=True, slots=True)
class HeatStrip:
    """A replica's cells in order of time."""

    runs: tuple[Run, ...]
    lowest_ratio: float | None  # of the cells with traffic
    highest_ratio: float | None


def heat_strips(replicas: Sequence[Replica], window: Window) -> dict[str, HeatStrip]:
    """The hit rate of each replica as a strip, by name. Two queries."""
    cells = Window(window.start, window.end, window.length_s / CELLS)
    rates: dict[int, dict[int, tuple[float | None, PointState]]] = defaultdict(dict)
    for row in sums.hit_sums([replica.pk for replica in replicas], cells):
        value = hit_rate_ratio(row.queries, row.hits, row.external_hits)
        rates[row.key][row.step] = (value, row.state)
    cold = _cold_cells([replica.pk for replica in replicas], cells)
    return {replica.name: _strip(rates[replica.pk], cold[replica.pk]) for replica in replicas}


def _cold_cells(replica_ids: Sequence[int], cells: Window) -> dict[int, set[int]]:
    """Cells in which a cache was cold after a restart."""
    cells_by_replica: dict[int, set[int]] = defaultdict(set)
    for band in cold_bands(replica_ids, cells):
        cells_by_replica[band.replica_id] |= set(range(_cell(band.start, cells), _cell(band.end, cells) + 1))
    return cells_by_replica


def _cell(at: datetime, cells: Window) -> int:
    return int((at - cells.start).total_seconds() // cells.step_s)


def _strip(rates: dict[int, tuple[float | None, PointState]], cold: set[int]) -> HeatStrip:
    runs: list[Run] = []
    for number in range(CELLS):
        style = _style(*rates.get(number, (None, PointState.UNKNOWN)), cold=number in cold)
        if runs and runs[-1].style == style:
            runs[-1] = Run(runs[-1].first, runs[-1].cells + 1, style)
        else:
            runs.append(Run(number, 1, style))
    known = [value for value, _ in rates.values() if value is not None]
    return HeatStrip(tuple(runs), min(known, default=None), max(known, default=None))


def _style(ratio: float | None, state: PointState, *, cold: bool) -> str:
    if ratio is None:
        return str(state)
    return "cold" if cold else f"h{min(int(ratio * LEVELS), LEVELS - 1)}"


LIMIT = 500  # more do not fit on a chart


def events_of(subject: Subject, window: Window, limit: int = LIMIT) -> list[Event]:
    """The newest events of a window that concern a subject, ascending. One query.

    Pool: its own events and those of routers. Replica: its own, and those of its pool without a replica. Task group:
    those of its pool, whose policies and replicas serve it.
    """
    events = Event.objects.filter(at__gt=window.start, at__lte=window.end).select_related("pool", "replica", "router")
    if subject.pools is not None:
        concerns = Q(pool__in=subject.pools) | Q(pool=None, kind__in=OBSERVED)
        if subject.kind is Kind.REPLICA:
            concerns &= Q(replica=subject.replica) | Q(replica=None)
        events = events.filter(concerns)
    return list(events.order_by("-at", "-pk")[:limit])[::-1]


def cold_periods(subject: Subject, window: Window) -> list[tuple[datetime, datetime]]:
    """(start, end) of a replica's cold periods after restarts, ascending; [] for other subjects."""
    if subject.replica is None:
        return []
    return [(band.start, band.end) for band in cold_bands([subject.replica.pk], window)]
