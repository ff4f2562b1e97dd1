"""Sums of readings per step of a window: counters of engines and routers, gauges, and histograms.

Rates are never averaged: increases are summed here per step and target, and divided by the caller; quantiles come
from merged buckets. A reading at ``t`` covers the time before ``t``, so it belongs to the step that ends at or
after ``t``: hence the microsecond in ``STEP``. ``whole`` makes the window a single step. Rows are ascending by their
keys and time unless stated otherwise. Functions use one query for the sums, and one to find out what is rolled up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from django.db import connection

from telemetry.metrics.histograms import Buckets, Merged, merge
from telemetry.metrics.rates import accounted_ratio, sum_known
from telemetry.metrics.windows import PointState, Window
from telemetry.storage.rollup_tables import (
    ENGINE_TTFT,
    ENGINES,
    PLAIN_LATENCY,
    ROUTER_TTFT,
    ROUTERS,
    STREAMED_LATENCY,
    Histogram,
    histograms_in,
    select_histograms,
    sums_in,
)

Histograms = dict[tuple[Any, datetime], Merged]  # by (key, start of the step)
STEP = "date_bin(make_interval(secs => %(step)s), at - interval '1 microsecond', %(start)s)"
STEP_NUMBER = "(date_part('epoch', start - %(start)s) / %(step)s)::integer"  # of a step's start
OF_POOLS = "(%(pools)s::text[] is null or pool = any(%(pools)s))"
# Length of the union of the intervals of readings of routers: of two routers at a time each second counts once, and a
# router that replaces another one adds its time.
COVERED_S = """(select coalesce(sum(date_part('epoch', upper(piece) - lower(piece))), 0)
    from unnest(range_agg(tstzrange(at - make_interval(secs => covered_s), at))
        filter (where pool = '' and covered_s > 0)) piece)"""
OF_REPLICAS = "replica_id = any(%(ids)s::bigint[])"


@dataclass(frozen=True, slots=True)
class EngineSums:
    """Increases of a replica's engines over one step; None is unknown."""

    replica_id: int
    start: datetime
    covered_s: float | None  # seconds that the increases cover, of the engine with the longest time
    stale: bool  # a scrape failed in this step
    not_reported: bool | None  # the engines have no counters of queries or hits; None: no scrape succeeded
    queries: int | None  # of readings that know the hits too, so that numerator and denominator match
    hits: int | None
    external_hits: int | None
    finished: int | None
    first_tokens: int | None  # requests that got their first token
    prompt_tokens: int | None
    admitted_tokens: int | None  # prompt tokens of readings that know the queries, for what is not eligible
    device_tokens: int | None  # hits by tier
    host_tokens: int | None
    p2p_tokens: int | None
    disk_tokens: int | None
    other_tokens: int | None
    preemptions: int | None

    @property
    def requests(self) -> int | None:
        """Requests that got their first token, else those that finished."""
        return self.finished if self.first_tokens is None else self.first_tokens

    @property
    def state(self) -> PointState:
        """The state of this step's hit rate."""
        return point_state(self.queries, stale=self.stale, not_reported=bool(self.not_reported))


ENGINE_COUNTERS = tuple(EngineSums.__dataclass_fields__)[5:]


@dataclass(frozen=True, slots=True)
class RouterSums:
    """Increases of all routers for one pool and task group over one step."""

    pool: str
    group: str
    start: datetime
    requests: int | None
    failed: int | None  # by a replica or a router
    prompt_tokens: int | None  # of responses that reported their cached tokens
    cached_tokens: int | None
    usage_reported: int | None  # responses in prompt_tokens
    client_error_requests: int | None  # responses with 4xx
    ok_requests: int | None  # successful responses, whether or not they reported usage

    @property
    def accounted_ratio(self) -> float | None:
        """Share of the successful responses that the hit rate includes."""
        return accounted_ratio(self.usage_reported, self.ok_requests)


class Hits(NamedTuple):
    """Counters of one hit rate over one step; a tuple, because a chart of many has tens of thousands."""

    key: int  # a replica's id, or the number of a set of replicas
    step: int  # of the window, from 0
    queries: int | None
    hits: int | None
    external_hits: int | None
    stale: bool
    not_reported: bool | None

    @property
    def state(self) -> PointState:
        """The state of this step's hit rate."""
        return point_state(self.queries, stale=self.stale, not_reported=bool(self.not_reported))


@dataclass(frozen=True, slots=True)
class Coverage:
    """How well routers were scraped during one step."""

    start: datetime
    covered_s: float  # seconds that readings of at least one router cover
    stale: bool


@dataclass(frozen=True, slots=True)
class Gauges:
    """The newest gauges of a replica: sums over its engines; the mean, for the usage."""

    running: float | None
    waiting: float | None
    kv_usage_ratio: float | None


def per_second(count: float | None, coverage: Iterable[Coverage]) -> float | None:
    """What all routers counted, per second; 0 if they were scraped and counted nothing, None if they were not."""
    covered_s = sum(step.covered_s for step in coverage)
    return (count or 0) / covered_s if covered_s else None


def point_state(denominator: float | None, *, stale: bool, not_reported: bool = False) -> PointState:
    """The state of a rate, by its denominator."""
    if denominator is None and not_reported:
        return PointState.NOT_REPORTED
    if denominator is None:
        return PointState.STALE if stale else PointState.UNKNOWN
    return PointState.OK if denominator > 0 else PointState.NO_TRAFFIC


def combined_state(rows: Sequence[EngineSums]) -> PointState:
    """The state of a hit rate of several replicas: not reported if no scraped replica reports it."""
    reports = [row.not_reported for row in rows if row.not_reported is not None]
    return point_state(
        sum_known(row.queries for row in rows),
        stale=any(row.stale for row in rows),
        not_reported=bool(reports) and all(reports),
    )


def engine_sums(replica_ids: Sequence[int], window: Window, *, whole: bool = False) -> list[EngineSums]:
    """Sums per replica and step."""
    source = sums_in(ENGINES, window, whole=whole)
    by_engine = ", ".join(f"sum({name})::bigint as {name}" for name in ENGINE_COUNTERS)
    by_replica = ", ".join(f"sum({name})::bigint" for name in ENGINE_COUNTERS)
    rows = fetch_rows(
        f"""
        with by_engine as (
            select replica_id, model, engine, {STEP} as start, sum(covered_s) as covered_s,
                bool_or(stale_scrapes > 0) as stale, bool_and(not_reported) as not_reported,
                {by_engine}
            from {source.sql} readings where {OF_REPLICAS} group by replica_id, model, engine, start
        )
        select replica_id, start, max(covered_s), bool_or(stale), bool_and(not_reported), {by_replica}
        from by_engine group by replica_id, start order by replica_id, start
        """,  # noqa: S608 - no part of it comes from outside
        window_parameters(window, whole=whole) | source.parameters | {"ids": list(replica_ids)},
    )
    return [EngineSums(*row) for row in rows]


def hit_sums(replica_ids: Sequence[int], window: Window) -> list[Hits]:
    """Per replica and step, unordered."""
    return _hits(
        f"select replica_id, {STEP_NUMBER}, queries, hits, external_hits, stale, not_reported from by_step",  # noqa: S608 - no part of it comes from outside
        replica_ids,
        window,
    )


def hit_sums_by_set(sets: Sequence[Sequence[int]], window: Window) -> list[Hits]:
    """Per set of replicas and step, unordered. Replicas without known queries add no external hits."""
    members = [(pk, number) for number, ids in enumerate(sets) for pk in ids]
    return _hits(
        f"""
        select number, {STEP_NUMBER}, sum(queries)::bigint, sum(hits)::bigint,
            (sum(external_hits) filter (where queries is not null))::bigint, bool_or(stale), bool_and(not_reported)
        from by_step join unnest(%(ids)s::bigint[], %(numbers)s::integer[]) as member(replica_id, number)
            using (replica_id)
        group by number, start
        """,  # noqa: S608 - no part of it comes from outside
        [pk for pk, _ in members],
        window,
        numbers=[number for _, number in members],
    )


def _hits(select: str, replica_ids: Sequence[int], window: Window, **parameters: list[int]) -> list[Hits]:
    source = sums_in(ENGINES, window, ("queries", "hits", "external_hits", "stale_scrapes", "not_reported"))
    rows = fetch_rows(
        f"""
        with by_step as (
            select replica_id, {STEP} as start, sum(queries)::bigint as queries, sum(hits)::bigint as hits,
                sum(external_hits)::bigint as external_hits, bool_or(stale_scrapes > 0) as stale,
                bool_and(not_reported) as not_reported
            from {source.sql} readings where {OF_REPLICAS} group by 1, 2
        )
        {select}
        """,  # noqa: S608 - no part of it comes from outside
        window_parameters(window) | source.parameters | parameters | {"ids": list(replica_ids)},
    )
    return [Hits(*row) for row in rows]


def router_sums(
    pools: Sequence[str] | None, window: Window, *, whole: bool = False
) -> tuple[list[RouterSums], list[Coverage]]:
    """Sums of some pools by name, or all, per pool, task group and step; and the coverage of each step."""
    source = sums_in(ROUTERS, window, whole=whole)
    counters = ", ".join(f"sum({name})::bigint" for name in tuple(RouterSums.__dataclass_fields__)[5:-1])
    rows = fetch_rows(
        f"""
        select pool, "group", {STEP} as start, sum(requests)::bigint,
            sum(case when requests is not null then
                coalesce(replica_error_requests, 0) + coalesce(router_error_requests, 0) end)::bigint,
            {counters}, sum(ok_requests)::bigint,
            {COVERED_S}, sum(stale_scrapes) > 0
        from {source.sql} readings where (pool = '' or {OF_POOLS})
        group by pool, "group", start order by pool, "group", start
        """,  # noqa: S608 - no part of it comes from outside
        window_parameters(window, whole=whole, pools=pools) | source.parameters,
    )
    sums = [RouterSums(*row[:-2]) for row in rows if row[0]]
    return sums, [Coverage(row[2], *row[-2:]) for row in rows if not row[0]]


def newest_gauges(replica_ids: Sequence[int], since: datetime, until: datetime) -> dict[int, Gauges]:
    """Gauges of each replica's newest scrape between two times; a failed newest scrape is left out. One query."""
    rows = fetch_rows(
        f"""
        with newest as (
            select distinct on (replica_id) replica_id, at from telemetry_reading
            where at > %(since)s and at <= %(until)s and {OF_REPLICAS}
            order by replica_id, at desc
        )
        select r.replica_id, sum(r.running), sum(r.waiting), avg(r.kv_usage_ratio)
        from telemetry_reading r join newest n on r.replica_id = n.replica_id and r.at = n.at
        where r.at > %(since)s and r.at <= %(until)s and r.state <> 'stale' group by r.replica_id
        """,  # noqa: S608 - no part of it comes from outside
        {"since": since, "until": until, "ids": list(replica_ids)},
    )
    return {row[0]: Gauges(*row[1:]) for row in rows}


def mean_gauge(replica_ids: Sequence[int], window: Window, column: str) -> list[tuple[int, int, float | None, bool]]:
    """(replica id, number of the step, mean over the step, whether a scrape failed in it), unordered."""
    if column not in Gauges.__dataclass_fields__:
        raise ValueError(f"{column!r} is not a gauge of a reading")
    aggregate = "avg" if column == "kv_usage_ratio" else "sum"
    source = sums_in(ENGINES, window, (f"{column}_sum", f"{column}_n", "stale_scrapes"))
    return fetch_rows(
        f"""
        with by_engine as (
            select replica_id, {STEP} as start, sum({column}_sum) / nullif(sum({column}_n), 0) as value,
                bool_or(stale_scrapes > 0) as stale
            from {source.sql} readings where {OF_REPLICAS} group by replica_id, model, engine, start
        )
        select replica_id, {STEP_NUMBER}, {aggregate}(value), bool_or(stale) from by_engine group by replica_id, start
        """,  # noqa: S608 - the column is one of three
        window_parameters(window) | source.parameters | {"ids": list(replica_ids)},
    )


def engine_ttft(
    replica_ids: Sequence[int], window: Window, *, by: str | None = None, whole: bool = False
) -> Histograms:
    """TTFT by the engines' clock. Keys are "", or with ``by="replica"`` the replica's id."""
    source = histograms_in(ENGINE_TTFT, window, by_part=True, whole=whole)
    parameters = window_parameters(window, whole=whole) | source.parameters | {"parts": [str(pk) for pk in replica_ids]}
    key = {None: "''", "replica": "part::bigint"}[by]
    return _histograms(key, f"{source.sql} rows", "part = any(%(parts)s)", parameters)


def pools_engine_ttft(pools: Sequence[str] | None, window: Window, *, whole: bool = False) -> Histograms:
    """TTFT of the replicas of some pools by name, or of all, by the engines' clock. The key is ""."""
    source = histograms_in(ENGINE_TTFT, window, by_part=False, whole=whole)
    parameters = window_parameters(window, whole=whole, pools=pools) | source.parameters
    return _histograms("''", f"{source.sql} rows", OF_POOLS, parameters)


def router_ttft(
    pools: Sequence[str] | None, window: Window, *, by: str | None = None, whole: bool = False
) -> Histograms:
    """TTFT of streamed responses by the routers' clock.

    Keys are "", (pool, group), (pool, replica) or, by "reuse", (pool, group, "hit" or "miss").
    """
    return _router_histograms(ROUTER_TTFT, pools, window, by=by, whole=whole)


def router_latency(
    pools: Sequence[str] | None, window: Window, *, streamed: bool, by: str | None = None, whole: bool = False
) -> Histograms:
    """Seconds until the last byte of successful responses, streamed or not; keys as of ``router_ttft``."""
    return _router_histograms(STREAMED_LATENCY if streamed else PLAIN_LATENCY, pools, window, by=by, whole=whole)


def _router_histograms(
    histogram: Histogram, pools: Sequence[str] | None, window: Window, *, by: str | None, whole: bool
) -> Histograms:
    """Histograms of routers. Rows with a reuse repeat the requests of those without. Only readings have the replica."""
    parameters = window_parameters(window, whole=whole, pools=pools)
    if by == "replica":
        key = "array[pool, replica]"
        condition = f"at > %(start)s and at <= %(end)s and {histogram.column}_layout_id is not null"
        rows = f"({select_histograms(histogram, more=', replica')} where {condition}) rows"
    else:
        source = histograms_in(histogram, window, by_part=by is not None, whole=whole)
        parameters |= source.parameters
        key = {None: "''", "group": "array[pool, part]", "reuse": "array[pool, part, reuse]"}[by]
        rows = f"{source.sql} rows"
    return _histograms(key, rows, f"reuse {'<>' if by == 'reuse' else '='} '' and {OF_POOLS}", parameters)


def merged_by_start(parts: Histograms) -> dict[datetime, Merged]:
    """Histograms of all keys added up, per step."""
    return merged_by_step((start, part) for (_, start), part in parts.items())


def merged_by_step(parts: Iterable[tuple[datetime, Merged]]) -> dict[datetime, Merged]:
    """Histograms added up, per step."""
    by_start: dict[datetime, list[Merged]] = defaultdict(list)
    for start, part in parts:
        by_start[start].append(part)
    return {start: merged for start, of_step in by_start.items() if (merged := merge_histograms(of_step)) is not None}


def merge_histograms(parts: Iterable[Merged]) -> Merged | None:
    """Merge histograms that were merged before; inexact if any of them is."""
    histograms = list(parts)
    merged = merge([part.buckets for part in histograms])
    return merged and Merged(merged.buckets, exact=merged.exact and all(part.exact for part in histograms))


def _histograms(key: str, rows: str, condition: str, parameters: dict[str, Any]) -> Histograms:
    """The buckets of some rows that meet a condition, added up per key and step; one row for each and layout.

    The first row of a layout has its edges: the layout of a reading is stored before the reading.
    """
    rows_of_layouts = fetch_rows(
        f"""
        select key, start, layout_id, array_agg(position), array_agg(n), case when row_number()
            over (partition by layout_id) = 1 then (select edges from telemetry_bucketlayout where id = layout_id) end
        from (
            select {key} as key, {STEP} as start, layout_id, position, sum(n)::bigint as n
            from {rows}, unnest(positions, counts) as bucket(position, n) where {condition} group by 1, 2, 3, 4
        ) as buckets group by key, start, layout_id
        """,  # noqa: S608 - no part of it comes from outside
        parameters,
    )
    edges = {layout: tuple(values) for _, _, layout, _, _, values in rows_of_layouts if values is not None}
    parts: dict[tuple[Any, datetime], list[Buckets]] = defaultdict(list)
    for found, start, layout, positions, counts, _ in rows_of_layouts:
        buckets = Buckets(edges[layout], dict(zip(positions, counts, strict=True)))
        parts[tuple(found) if isinstance(found, list) else found, start].append(buckets)
    merged = {step: merge(of_step) for step, of_step in parts.items()}
    return {key: histogram for key, histogram in merged.items() if histogram is not None}


def window_parameters(window: Window, *, whole: bool = False, pools: Sequence[str] | None = None) -> dict[str, Any]:
    """The parameters of ``STEP``, of a condition on ``at``, and of ``OF_POOLS`` (None: all pools)."""
    step = window.length_s + 1 if whole else window.step_s
    listed = None if pools is None else list(pools)
    return {"start": window.start, "end": window.end, "step": float(step), "pools": listed}


def fetch_rows(sql: str, parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Run a query and return all its rows."""
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
        return rows
