"""Tables of rollups: their columns, which of them a time window is read from, and SQL that reads them like readings.

Theory of operation. A ``Column`` says what one reading contributes (``of_reading``) and how contributions are
aggregated. An aggregate is a contribution again, so one list makes minutes from readings, 5 minutes from minutes and
hours from those, and one query reads any mixture of them. Nothing is averaged: a gauge has a sum and a count.
Numerators come from rows that also have the denominator, so that a ratio of sums describes the same requests. A failed
scrape counts in ``stale_scrapes`` and leaves every sum null; a reading without traffic leaves a sum of 0. Rows carry
the end of their bin as ``at``, like readings the end of their interval, so the same conditions on time apply to both.

A window is read from the coarsest resolution that was rolled up and fits, in its middle; from the next finer one at its
edges; and from readings where no bin fits. The spans touch and never overlap. A step of a chart must consist of whole
bins: a resolution fits when it divides the step and the window starts on its grid, or when it is so much finer than the
step that a bin across two steps hardly matters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from telemetry.metrics.engine_names import OPTIONAL_COUNTERS, WAITING_REASONS
from telemetry.metrics.windows import Window
from telemetry.models import RollupState

RESOLUTIONS_S = (60, 300, 3600, 21_600)  # each a multiple of the previous one, from which it is made
FINEST_S = RESOLUTIONS_S[0]
SUFFIXES = {60: "1m", 300: "5m", 3600: "1h", 21_600: "6h"}


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    sql_type: str
    of_reading: str  # SQL over a row of readings
    aggregate: str = "sum"


@dataclass(frozen=True, slots=True)
class Rollup:
    """A table of readings, and the columns of its rollups."""

    readings: str
    key: tuple[str, ...]  # identifies rows, with their time
    columns: tuple[Column, ...]

    def table(self, resolution_s: int) -> str:
        return f"{self.readings}_{SUFFIXES[resolution_s]}"


def _counts(*names: str) -> tuple[Column, ...]:
    return tuple(Column(name, "bigint", name) for name in names)


def _gauge(name: str) -> tuple[Column, ...]:
    return (
        Column(f"{name}_sum", "double precision", name),
        Column(f"{name}_n", "integer", f"({name} is not null)::integer"),
    )


SCRAPES = (
    Column("stale_scrapes", "integer", "(state = 'stale')::integer"),
    Column("covered_s", "double precision", "case when state <> 'stale' then interval_s end"),
)

ENGINES = Rollup(
    readings="telemetry_reading",
    key=("replica_id", "model", "engine"),
    columns=(
        *SCRAPES,
        Column("queries", "bigint", "case when hits is not null then queries end"),
        Column("hits", "bigint", "case when queries is not null then hits end"),
        *_counts("external_hits"),
        # The engine does not report what a hit rate needs.
        Column("not_reported", "boolean", "'queries' = any(not_reported) or 'hits' = any(not_reported)", "bool_and"),
        *_gauge("running"),
        *_gauge("waiting"),
        *_gauge("kv_usage_ratio"),
        Column("admitted_tokens", "bigint", "case when queries is not null then prompt_tokens end"),
        *_counts("device_tokens", "host_tokens", "p2p_tokens", "disk_tokens", "other_tokens"),
        *_counts("prompt_tokens", "generation_tokens", "preemptions", "finished", "first_tokens"),
        *_counts(*OPTIONAL_COUNTERS),
        *(column for name in WAITING_REASONS for column in _gauge(name)),
    ),
)

# Without the replica, which would multiply the rows for figures that engines report too.
ROUTERS = Rollup(
    readings="telemetry_routerreading",
    key=("router_id", "pool", '"group"', "policy", "revision"),
    columns=(
        *SCRAPES,
        *_counts("requests", "ok_requests", "client_error_requests", "replica_error_requests"),
        *_counts("router_error_requests", "cancelled_requests", "usage_reported"),
        Column("prompt_tokens", "bigint", "case when usage_reported > 0 then prompt_tokens end"),
        Column("cached_tokens", "bigint", "case when usage_reported > 0 then cached_tokens end"),
        *_counts("objective_requests", "objective_kept"),
        *_counts("cache_hits", "cache_misses", "cache_bypasses", "cache_prompt_tokens", "cache_generated_tokens"),
    ),
)

SUMS = (ENGINES, ROUTERS)


@dataclass(frozen=True, slots=True)
class Histogram:
    """One kind of histogram: SQL expressions over a row of readings."""

    kind: str
    column: str  # prefix of its columns in readings
    readings: str  # a table with the names that the next three use
    pool: str
    part: str  # within the pool
    reuse: str = "''"


# A replica that was removed since belonged to the pool that the event of its removal names.
_ENGINE = """telemetry_reading left join (
    select id as of_replica, pool_id as of_pool from controlplane_replica
    union all
    select (detail ->> 'replica_id')::bigint, pool_id from controlplane_event
    where kind = 'replica_removed' and pool_id is not null and detail ? 'replica_id'
        and at > (select min(at) from telemetry_reading)
) owners on of_replica = replica_id left join controlplane_pool on controlplane_pool.id = of_pool"""
_POOL = "coalesce(controlplane_pool.name, '')"
ENGINE_TTFT = Histogram("engine_ttft", "ttft", _ENGINE, _POOL, "replica_id::text")
_OF_ALL_POLICIES = "(select * from telemetry_routerreading where policy = '') readings"
ROUTER_TTFT = Histogram("router_ttft", "ttft", _OF_ALL_POLICIES, "pool", '"group"', "reuse")
STREAMED_LATENCY = Histogram("streamed_latency", "streamed_latency", _OF_ALL_POLICIES, "pool", '"group"')
PLAIN_LATENCY = Histogram("plain_latency", "plain_latency", _OF_ALL_POLICIES, "pool", '"group"')
BY_PART = (ENGINE_TTFT, ROUTER_TTFT, STREAMED_LATENCY, PLAIN_LATENCY)
POOL_SUFFIX = "_pool"  # of a kind: all parts of a pool added up, so that a chart of pools reads few rows


def histograms(resolution_s: int) -> str:
    return f"telemetry_histogram_{SUFFIXES[resolution_s]}"


TABLES = {res: (*(rollup.table(res) for rollup in SUMS), histograms(res)) for res in RESOLUTIONS_S}


ROLLED_FROM_S = 1800.0  # shorter windows are read often, and cheaply from readings
MUCH_FINER = 10  # times: at most a tenth of a step is counted in the neighbouring step
LONG_S = 6 * 3600.0  # windows with too many readings to read them all


@dataclass(frozen=True, slots=True)
class Span:
    """The time from ``start`` (excluded) to ``end`` (included), read from one resolution; None: from readings."""

    resolution_s: int | None
    start: datetime
    end: datetime


@dataclass(frozen=True, slots=True)
class Source:
    """A subselect, without an alias, and its parameters."""

    sql: str
    parameters: dict[str, Any] = field(default_factory=dict)


def usable_resolutions(window: Window, *, whole: bool) -> list[int]:
    """The resolutions that a window may be read from, ascending; [] if only from readings. ``whole``: as one step."""
    if window.length_s < ROLLED_FROM_S:
        return []
    if whole:
        return list(RESOLUTIONS_S)
    usable = [res for res in RESOLUTIONS_S if _fits(window, res)]
    return usable or ([FINEST_S] if window.length_s >= LONG_S else [])


def _fits(window: Window, resolution_s: int) -> bool:
    """Whether steps begin where bins begin, or are so long that the difference does not matter."""
    on_grid = window.step_s % resolution_s == 0 and window.start.timestamp() % resolution_s == 0
    return on_grid or window.step_s >= MUCH_FINER * resolution_s


def plan_spans(
    start: datetime, end: datetime, resolutions_s: Sequence[int], through: Mapping[int, datetime | None]
) -> list[Span]:
    """Spans that cover the time from start to end, ascending; ``through``: how far each resolution is rolled up."""
    if start >= end:
        return []
    if not resolutions_s:
        return [Span(None, start, end)]
    *finer, coarsest = sorted(resolutions_s)
    rolled = through.get(coarsest)
    first, last = ceil_to_bin(start, coarsest), floor_to_bin(min(end, rolled), coarsest) if rolled else start
    if last <= first:
        return plan_spans(start, end, finer, through)
    return [
        *plan_spans(start, first, finer, through),
        Span(coarsest, first, last),
        *plan_spans(last, end, finer, through),
    ]


def spans_of(window: Window, *, whole: bool = False) -> list[Span]:
    """The spans that a window is read from. One query if it may be read from rollups, else none."""
    resolutions = usable_resolutions(window, whole=whole)
    return plan_spans(window.start, window.end, resolutions, rolled_through() if resolutions else {})


def rolled_through() -> dict[int, datetime | None]:
    """How far each resolution has been rolled up; None: not at all. One query."""
    known: dict[int, datetime | None] = dict(RollupState.objects.values_list("pk", "rolled_through"))
    return {resolution_s: known.get(resolution_s) for resolution_s in RESOLUTIONS_S}


def fit_to_retention(window: Window, now: datetime, kept_s: Mapping[int, float], readings_retention_s: float) -> Window:
    """The window with steps no finer than the data that is still stored for its start.

    ``kept_s`` is how long each resolution is retained, ``readings_retention_s`` how long readings are.
    """
    age_s = (now - window.start).total_seconds()
    if age_s <= readings_retention_s:
        return window
    finest = next((res for res in sorted(kept_s) if age_s <= kept_s[res]), max(kept_s))
    if window.step_s >= finest:
        return window
    return Window(floor_to_bin(window.start, finest), window.end, float(finest))


def floor_to_bin(at: datetime, resolution_s: float) -> datetime:
    """The last end of a bin at or before a time."""
    return datetime.fromtimestamp(math.floor(at.timestamp() / resolution_s) * resolution_s, UTC)


def ceil_to_bin(at: datetime, resolution_s: float) -> datetime:
    """The first end of a bin at or after a time."""
    floor = floor_to_bin(at, resolution_s)
    return floor if floor == at else floor + timedelta(seconds=resolution_s)


def sums_in(rollup: Rollup, window: Window, names: Sequence[str] | None = None, *, whole: bool = False) -> Source:
    """Rows of ``at``, the key, and the columns of a rollup or those that are named."""
    columns = [column for column in rollup.columns if names is None or column.name in names]
    key = ", ".join(rollup.key)
    listed = ", ".join(column.name for column in columns)

    def select(span: Span) -> str:
        if span.resolution_s is None:
            return _select_readings(rollup, key, columns)
        return f"select at, {key}, {listed} from {rollup.table(span.resolution_s)} where true"  # noqa: S608 - our own names

    return _union(spans_of(window, whole=whole), select)


def readings_in(rollup: Rollup, window: Window, names: Sequence[str]) -> Source:
    """``sums_in`` from a router's readings alone, which have ``replica`` as a further key."""
    columns = [column for column in rollup.columns if column.name in {"requests", *names}]
    spans = [Span(None, window.start, window.end)]
    return _union(spans, lambda _: _select_readings(rollup, ", ".join((*rollup.key, "replica")), columns))


def histograms_in(histogram: Histogram, window: Window, *, by_part: bool, whole: bool = False) -> Source:
    """Rows of at, pool, part, reuse, layout_id, positions, counts.

    Without ``by_part``, rows from rollups are sums over all parts of a pool; rows from readings are of one part each.
    """

    def select(span: Span) -> str:
        if span.resolution_s is None:
            return f"{select_histograms(histogram)} where {histogram.column}_layout_id is not null"
        kind = histogram.kind if by_part else histogram.kind + POOL_SUFFIX
        return f"""
            select at, pool, part, reuse, layout_id, positions, counts from {histograms(span.resolution_s)}
            where kind = '{kind}'"""  # noqa: S608 - our own names

    return _union(spans_of(window, whole=whole), select)


def select_histograms(histogram: Histogram, at: str = "at", more: str = "") -> str:
    """SQL for the histograms of readings, without a condition."""
    return f"""
        select {at} as at, {histogram.pool} as pool, {histogram.part} as part, {histogram.reuse} as reuse,
            {histogram.column}_layout_id as layout_id, {histogram.column}_at as positions,
            {histogram.column}_counts as counts{more}
        from {histogram.readings}"""  # noqa: S608 - our own names


def _select_readings(rollup: Rollup, key: str, columns: Sequence[Column]) -> str:
    listed = ", ".join(f"{column.of_reading} as {column.name}" for column in columns)
    return f"select at, {key}, {listed} from {rollup.readings} where true"  # noqa: S608 - our own names


def _union(spans: Sequence[Span], select: Callable[[Span], str]) -> Source:
    selects = [
        f"{select(span)} and at > %(span{number}_start)s and at <= %(span{number}_end)s"
        for number, span in enumerate(spans)
    ]
    times = {f"span{number}_start": span.start for number, span in enumerate(spans)}
    times |= {f"span{number}_end": span.end for number, span in enumerate(spans)}
    return Source("(" + " union all ".join(selects) + ")", times)
