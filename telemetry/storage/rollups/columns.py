"""What rollups keep: one list for each table, from which everything else that is said about them is derived.

Theory of operation. A ``Column`` says what a single reading contributes (``of_reading``) and how contributions are put
together. What was put together is a contribution again, so one list makes 1-minute rows of readings, 5-minute rows of
1-minute rows and hours of those, and one query reads any mixture of them. Nothing is averaged (H2): gauges keep a sum
and a number. Numerators are kept of the rows that know their denominator, so that a ratio of sums stays a ratio of
the same requests. A failed scrape and a reading without traffic stay what they were: the first counts in
``stale_scrapes`` and leaves every sum null, the second leaves a sum of 0.

Rows carry the end of their bin as ``at``, as readings do with their interval.
"""

from __future__ import annotations

from dataclasses import dataclass

from telemetry.metrics.engines.names import OPTIONAL_COUNTERS, WAITING_REASONS

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
