"""What rollups keep: one list for each table, from which everything else that is said about them is derived.

Theory of operation. A ``Column`` says what a single reading contributes (``of_reading``) and how contributions are put
together. What was put together is a contribution again, so one list makes 1-minute rows of readings, 5-minute rows of
1-minute rows and hours of those, and one query reads any mixture of them. Nothing is averaged (H2): gauges keep a sum
and a number. Numerators are kept of the rows that know their denominator, so that a ratio of sums stays a ratio of
the same requests. A failed scrape and a reading without traffic stay what they were: the first counts in
``stale_scrapes`` and leaves every sum null, the second leaves a sum of 0.

Rows carry the end of their bin as ``at``, as readings do with their interval.

Which tables a question about a span of time reads: coarse bins in its middle, finer ones at its edges. Pure.

Theory of operation. A span is covered by bins of the coarsest resolution that was rolled up and fits; what is left on
either side by the next finer one, and the last by readings themselves. The parts touch and never overlap, so what is
read twice or not at all is nothing. A step of a chart must consist of whole bins: a resolution fits when it divides
the step and the window begins on its grid, or where it is so much finer than the step that a bin which lies across
two steps hardly matters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from telemetry.metrics.engine_names import OPTIONAL_COUNTERS, WAITING_REASONS
from telemetry.metrics.windows import Window

RESOLUTIONS_S = (60, 300, 3600, 21_600)  # each a multiple of the one before, of which it is made
SUFFIXES = {60: "1m", 300: "5m", 3600: "1h", 21_600: "6h"}


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a rollup."""

    name: str
    sql_type: str
    of_reading: str  # SQL over a row of readings
    together: str = "sum"  # the aggregate


@dataclass(frozen=True, slots=True)
class Rollup:
    """A table of readings, and what its rollups keep of it."""

    readings: str
    key: tuple[str, ...]  # what rows are told apart by, beside their time
    columns: tuple[Column, ...]

    def table(self, resolution_s: int) -> str:
        """The table of one resolution."""
        return f"{self.readings}_{SUFFIXES[resolution_s]}"


def _counts(*names: str) -> tuple[Column, ...]:
    return tuple(Column(name, "bigint", name) for name in names)


def _gauge(name: str) -> tuple[Column, ...]:
    return (
        Column(f"{name}_sum", "double precision", name),
        Column(f"{name}_n", "integer", f"({name} is not null)::integer"),
        Column(f"{name}_min", "double precision", name, "min"),
        Column(f"{name}_max", "double precision", name, "max"),
    )


SCRAPES = (
    Column("scrapes", "integer", "(state <> 'stale')::integer"),
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
        Column(
            "not_reported", "boolean", "'queries' = any(not_reported) or 'hits' = any(not_reported)", "bool_and"
        ),  # no hit rate can be had of this engine
        *_gauge("running"),
        *_gauge("waiting"),
        *_gauge("kv_usage_ratio"),
        Column("gap_s", "double precision", "case when state in ('gap', 'reset') then interval_s end", "max"),
        Column("admitted_tokens", "bigint", "case when queries is not null then prompt_tokens end"),
        *_counts("external_queries", "device_tokens", "host_tokens", "p2p_tokens", "disk_tokens", "other_tokens"),
        *_counts("prompt_tokens", "generation_tokens", "preemptions", "finished", "first_tokens"),
        *_counts(*OPTIONAL_COUNTERS),
        *(column for name in WAITING_REASONS for column in _gauge(name)),
    ),
)

# Without the replica: a fleet's share of rows would be lost on a figure that engines tell too.
ROUTERS = Rollup(
    readings="telemetry_routerreading",
    key=("router_id", "pool", '"group"', "policy", "revision"),
    columns=(
        *SCRAPES,
        *_counts("requests", "ok_requests", "client_error_requests", "replica_error_requests"),
        *_counts("router_error_requests", "cancelled_requests", "usage_reported"),
        Column("prompt_tokens", "bigint", "case when usage_reported > 0 then prompt_tokens end"),
        Column("cached_tokens", "bigint", "case when usage_reported > 0 then cached_tokens end"),
        *_counts("spilled_requests"),
        *_counts("predicted_answers", "predicted_prompt_tokens", "predicted_tokens", "predicted_cached_tokens"),
    ),
)

SUMS = (ENGINES, ROUTERS)


@dataclass(frozen=True, slots=True)
class Histogram:
    """One kind of histogram: of which readings, and by what it is told apart."""

    kind: str
    column: str  # prefix of its columns in a row of readings
    readings: str  # SQL: a table with the names that the next ones use
    pool: str
    part: str  # within the pool
    reuse: str = "''"


HISTOGRAMS = "telemetry_histogram"  # the tables' name, before the resolution's
_ENGINE = (
    "telemetry_reading left join controlplane_replica on controlplane_replica.id = replica_id "
    "left join controlplane_pool on controlplane_pool.id = pool_id"
)
_POOL = "coalesce(controlplane_pool.name, '')"
ENGINE_TTFT = Histogram("engine_ttft", "ttft", _ENGINE, _POOL, "replica_id::text")
ENGINE_ITL = Histogram("engine_itl", "itl", _ENGINE, _POOL, "replica_id::text")
_OF_ALL_POLICIES = "(select * from telemetry_routerreading where policy = '') readings"
ROUTER_TTFT = Histogram("router_ttft", "ttft", _OF_ALL_POLICIES, "pool", '"group"', "reuse")
STREAMED_LATENCY = Histogram("streamed_latency", "streamed_latency", _OF_ALL_POLICIES, "pool", '"group"')
PLAIN_LATENCY = Histogram("plain_latency", "plain_latency", _OF_ALL_POLICIES, "pool", '"group"')
BY_PART = (ENGINE_TTFT, ENGINE_ITL, ROUTER_TTFT, STREAMED_LATENCY, PLAIN_LATENCY)
WHOLE = "_pool"  # after a kind: all parts of a pool together, so that a chart of many needs few rows


def histograms(resolution_s: int) -> str:
    """The table of histograms of one resolution."""
    return f"{HISTOGRAMS}_{SUFFIXES[resolution_s]}"


TABLES = {res: (*(rollup.table(res) for rollup in SUMS), histograms(res)) for res in RESOLUTIONS_S}


ROLLED_FROM_S = 1800.0  # shorter windows are cheap to read from readings, and asked for most often
MUCH_FINER = 10  # times, so that a tenth of a step at most is told with its neighbour
LONG_S = 6 * 3600.0  # windows that readings themselves would be too many for


@dataclass(frozen=True, slots=True)
class Part:
    """The span from ``start`` (excluded) to ``end`` (included), read from one resolution; None: from readings."""

    resolution_s: int | None
    start: datetime
    end: datetime


def fitting(window: Window, resolutions_s: Sequence[int], *, whole: bool) -> list[int]:
    """The resolutions that a window may be read from, ascending; none: from readings alone."""
    if window.length_s < ROLLED_FROM_S:
        return []
    if whole:
        return sorted(resolutions_s)
    found = [res for res in sorted(resolutions_s) if _fits(window, res)]
    return found or ([min(resolutions_s)] if window.length_s >= LONG_S else [])


def _fits(window: Window, resolution_s: int) -> bool:
    on_grid = window.step_s % resolution_s == 0 and window.start.timestamp() % resolution_s == 0
    return on_grid or window.step_s >= MUCH_FINER * resolution_s


def cover(
    start: datetime, end: datetime, resolutions_s: Sequence[int], through: Mapping[int, datetime | None]
) -> list[Part]:
    """Parts that are the span together, ascending; ``through`` says how far each resolution has been rolled up."""
    if start >= end:
        return []
    if not resolutions_s:
        return [Part(None, start, end)]
    *finer, coarsest = sorted(resolutions_s)
    rolled = through.get(coarsest)
    first, last = up(start, coarsest), down(min(end, rolled), coarsest) if rolled else start
    if last <= first:
        return cover(start, end, finer, through)
    return [
        *cover(start, first, finer, through),
        Part(coarsest, first, last),
        *cover(last, end, finer, through),
    ]


def fit_to_retention(window: Window, now: datetime, kept_s: Mapping[int, float], readings_kept_s: float) -> Window:
    """The window in steps that what is still kept of its beginning can fill; ``kept_s`` by resolution."""
    age_s = (now - window.start).total_seconds()
    if age_s <= readings_kept_s:
        return window
    finest = next((res for res in sorted(kept_s) if age_s <= kept_s[res]), max(kept_s))
    if window.step_s >= finest:
        return window
    step_s = float(finest)
    return Window(down(window.start, finest), window.end, step_s)


def down(at: datetime, resolution_s: float) -> datetime:
    """The end of a bin, at or before."""
    return datetime.fromtimestamp(math.floor(at.timestamp() / resolution_s) * resolution_s, UTC)


def up(at: datetime, resolution_s: float) -> datetime:
    """The end of a bin, at or after."""
    floor = down(at, resolution_s)
    return floor if floor == at else floor + timedelta(seconds=resolution_s)
