"""Sums of readings in steps of time: the one place where readings are aggregated in SQL.

Rates are never averaged: additions are summed here, per step and target, and divided afterwards (H2); quantiles come
from merged buckets (T4). A reading at ``t`` tells of the time before ``t``, so it belongs to the step that ends at or
after ``t``: hence the microsecond.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db import connection

from telemetry.metrics.histograms import Buckets, Merged, merge
from telemetry.metrics.windows import PointState, Window
from telemetry.models import BucketLayout

STEP = "date_bin(make_interval(secs => %(step)s), at - interval '1 microsecond', %(start)s)"


@dataclass(frozen=True, slots=True)
class EngineSums:
    """Additions of a replica's engines over one step; None is unknown."""

    replica_id: int
    start: datetime
    queries: int | None  # of readings that know the hits too, so that numerator and denominator match
    hits: int | None
    external_hits: int | None
    finished: int | None
    first_tokens: int | None  # requests that got their first token
    prompt_tokens: int | None
    covered_s: float | None  # seconds that the additions cover, longest engine
    stale: bool  # a scrape failed in this step
    not_reported: bool | None  # its engines have no counters of queries or hits; None where no scrape told
    gap_s: float | None  # the longest time that one reading covers after missed scrapes or a restart (H10)
    admitted_tokens: int | None  # prompt tokens of readings that know the queries, for what was not eligible (H5, H6)
    device_tokens: int | None  # hits by tier (H4)
    host_tokens: int | None
    p2p_tokens: int | None
    disk_tokens: int | None
    other_tokens: int | None
    preemptions: int | None

    @property
    def requests(self) -> int | None:
        """Requests of this step: those that got their first token, else those that finished."""
        return self.finished if self.first_tokens is None else self.first_tokens

    @property
    def state(self) -> PointState:
        """What the hit rate of this step is worth."""
        return point_state(self.queries, stale=self.stale, not_reported=bool(self.not_reported))


@dataclass(frozen=True, slots=True)
class RouterSums:
    """Additions of all routers for one pool and task group over one step."""

    pool: str
    group: str
    start: datetime
    requests: int | None
    failed: int | None  # by a replica's or a router's fault
    prompt_tokens: int | None  # of answers that reported their cached tokens (H16)
    cached_tokens: int | None
    ceiling_prompt_tokens: int | None  # those of them whose ceiling is known
    cacheable_tokens: int | None
    spilled_requests: int | None  # placed away from the prefix's home or holder, for load; None where there is none
    usage_reported: int | None  # answers behind prompt_tokens
    predicted_answers: int | None  # those of which the router predicted a hit; the next three are theirs (H17)
    predicted_prompt_tokens: int | None
    predicted_tokens: int | None
    predicted_cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class Coverage:
    """How well routers were scraped during one step."""

    start: datetime
    routers: int  # that were read
    covered_s: float  # router-seconds
    stale: bool


def point_state(asked: float | None, *, stale: bool, not_reported: bool = False) -> PointState:
    """The state of a rate whose denominator is ``asked`` (H11, H12)."""
    if asked is None and not_reported:
        return PointState.NOT_REPORTED
    if asked is None:
        return PointState.STALE if stale else PointState.UNKNOWN
    return PointState.OK if asked > 0 else PointState.NO_TRAFFIC


def state_together(rows: Sequence[EngineSums]) -> PointState:
    """What a hit rate of several replicas is worth: not reported if nobody that was read reports it."""
    known = [row.queries for row in rows if row.queries is not None]
    told = [row.not_reported for row in rows if row.not_reported is not None]
    return point_state(
        sum(known) if known else None,
        stale=any(row.stale for row in rows),
        not_reported=bool(told) and all(told),
    )


def engine_sums(replica_ids: Sequence[int], window: Window, *, whole: bool = False) -> list[EngineSums]:
    """Per replica and step, ascending; ``whole`` takes the window as a single step. One query."""
    rows = rows_of(
        f"""
        with by_engine as (
            select replica_id, model, engine, {STEP} as start,
                sum(queries) filter (where hits is not null) as queries,
                sum(hits) filter (where queries is not null) as hits,
                sum(external_hits) as external_hits, sum(finished) as finished,
                sum(first_tokens) as first_tokens,
                sum(prompt_tokens) as prompt_tokens,
                sum(interval_s) filter (where state <> 'stale') as covered_s, bool_or(state = 'stale') as stale,
                bool_and('queries' = any(not_reported) or 'hits' = any(not_reported)) as not_reported,
                max(interval_s) filter (where state in ('gap', 'reset')) as gap_s,
                sum(prompt_tokens) filter (where queries is not null) as admitted_tokens,
                sum(device_tokens) as device_tokens, sum(host_tokens) as host_tokens, sum(p2p_tokens) as p2p_tokens,
                sum(disk_tokens) as disk_tokens, sum(other_tokens) as other_tokens, sum(preemptions) as preemptions
            from telemetry_reading
            where at > %(start)s and at <= %(end)s and replica_id = any(%(ids)s)
            group by replica_id, model, engine, start
        )
        select replica_id, start, sum(queries)::bigint, sum(hits)::bigint, sum(external_hits)::bigint,
            sum(finished)::bigint, sum(first_tokens)::bigint, sum(prompt_tokens)::bigint, max(covered_s),
            bool_or(stale), bool_and(not_reported), max(gap_s), sum(admitted_tokens)::bigint,
            sum(device_tokens)::bigint,
            sum(host_tokens)::bigint, sum(p2p_tokens)::bigint, sum(disk_tokens)::bigint, sum(other_tokens)::bigint,
            sum(preemptions)::bigint
        from by_engine group by replica_id, start order by replica_id, start
        """,  # noqa: S608 - no part of it comes from outside
        during(window, whole=whole) | {"ids": list(replica_ids)},
    )
    return [EngineSums(*row) for row in rows]


def router_sums(
    pools: Sequence[str] | None, window: Window, *, whole: bool = False
) -> tuple[list[RouterSums], list[Coverage]]:
    """Of some pools by name, or all: per pool, task group and step, ascending, and how well a step is covered."""
    rows = rows_of(
        f"""
        select pool, "group", {STEP} as start, sum(requests)::bigint,
            sum(case when requests is not null then
                coalesce(replica_error_requests, 0) + coalesce(router_error_requests, 0) end)::bigint,
            sum(prompt_tokens) filter (where usage_reported > 0)::bigint,
            sum(cached_tokens) filter (where usage_reported > 0)::bigint,
            sum(prompt_tokens) filter (where cacheable_tokens is not null)::bigint, sum(cacheable_tokens)::bigint,
            sum(spilled_requests)::bigint, sum(usage_reported)::bigint, sum(predicted_answers)::bigint,
            sum(predicted_prompt_tokens)::bigint, sum(predicted_tokens)::bigint, sum(predicted_cached_tokens)::bigint,
            count(distinct router_id) filter (where state <> 'stale'),
            coalesce(sum(interval_s) filter (where state <> 'stale'), 0), bool_or(state = 'stale')
        from telemetry_routerreading
        where at > %(start)s and at <= %(end)s and (pool = '' or %(pools)s::text[] is null or pool = any(%(pools)s))
        group by pool, "group", start order by pool, "group", start
        """,  # noqa: S608 - no part of it comes from outside
        during(window, whole=whole) | {"pools": None if pools is None else list(pools)},
    )
    sums = [RouterSums(*row[:-3]) for row in rows if row[0]]
    return sums, [Coverage(row[2], *row[-3:]) for row in rows if not row[0]]


@dataclass(frozen=True, slots=True)
class Gauges:
    """The newest gauges of a replica: sums over its engines, except for the usage, which is their mean."""

    running: float | None
    waiting: float | None
    kv_usage_ratio: float | None


def newest_gauges(replica_ids: Sequence[int], *, since: datetime, until: datetime) -> dict[int, Gauges]:
    """Of each replica's newest scrape in a span of time; replicas whose newest scrape failed are left out (H12)."""
    rows = rows_of(
        """
        with newest as (
            select distinct on (replica_id) replica_id, at from telemetry_reading
            where at > %(since)s and at <= %(until)s and replica_id = any(%(ids)s) order by replica_id, at desc
        )
        select r.replica_id, sum(r.running), sum(r.waiting), avg(r.kv_usage_ratio)
        from telemetry_reading r join newest n on r.replica_id = n.replica_id and r.at = n.at
        where r.at > %(since)s and r.at <= %(until)s and r.state <> 'stale' group by r.replica_id
        """,
        {"since": since, "until": until, "ids": list(replica_ids)},
    )
    return {row[0]: Gauges(*row[1:]) for row in rows}


def mean_gauge(
    replica_ids: Sequence[int], window: Window, column: str
) -> list[tuple[int, datetime, float | None, bool]]:
    """(replica, start of the step, mean of a gauge over the step, whether a scrape failed in it), ascending."""
    if column not in {"running", "waiting", "kv_usage_ratio"}:
        raise ValueError(f"{column!r} is no gauge of a reading")
    together = "avg" if column == "kv_usage_ratio" else "sum"
    rows = rows_of(
        f"""
        with by_engine as (
            select replica_id, model, engine, {STEP} as start, avg({column}) as value,
                bool_or(state = 'stale') as stale
            from telemetry_reading where at > %(start)s and at <= %(end)s and replica_id = any(%(ids)s)
            group by replica_id, model, engine, start
        )
        select replica_id, start, {together}(value), bool_or(stale)
        from by_engine group by replica_id, start order by replica_id, start
        """,  # noqa: S608 - the column is one of three
        during(window) | {"ids": list(replica_ids)},
    )
    return [(row[0], row[1], row[2], row[3]) for row in rows]


def engine_ttft(
    replica_ids: Sequence[int], window: Window, *, by: str | None = None, whole: bool = False
) -> dict[tuple[Any, datetime], Merged]:
    """TTFT by the engines' clock, per (key, start of the step); the key is "" or, by "replica", its id."""
    key = {None: "''", "replica": "replica_id"}[by]
    return _merged(
        f"""
        select {key}, {STEP} as start, ttft_layout_id, position, sum(n)::bigint
        from telemetry_reading, unnest(ttft_at, ttft_counts) as bucket(position, n)
        where at > %(start)s and at <= %(end)s and replica_id = any(%(ids)s) and ttft_layout_id is not null
        group by 1, 2, 3, 4
        """,  # noqa: S608 - the key is one of two
        during(window, whole=whole) | {"ids": list(replica_ids)},
    )


def router_ttft(
    pools: Sequence[str] | None, window: Window, *, by: str | None = None, whole: bool = False
) -> dict[tuple[Any, datetime], Merged]:
    """TTFT by the routers' clock, per (key, start of the step).

    The key is "", (pool, group), (pool, replica) or, by "reuse", (pool, group, "hit" or "miss"). Rows with a policy are
    the same requests once more, by revision, while one is on trial; so are those with a reuse.
    """
    key, reuse = {
        None: ("''", "reuse = ''"),
        "group": ("""array[pool, "group"]""", "reuse = ''"),
        "replica": ("array[pool, replica]", "reuse = ''"),
        "reuse": ("""array[pool, "group", reuse]""", "reuse <> ''"),
    }[by]
    return _merged(
        f"""
        select {key}, {STEP} as start, ttft_layout_id, position, sum(n)::bigint
        from telemetry_routerreading, unnest(ttft_at, ttft_counts) as bucket(position, n)
        where at > %(start)s and at <= %(end)s and (%(pools)s::text[] is null or pool = any(%(pools)s))
            and policy = '' and {reuse} and ttft_layout_id is not null
        group by 1, 2, 3, 4
        """,  # noqa: S608 - the key is one of four
        during(window, whole=whole) | {"pools": None if pools is None else list(pools)},
    )


def merged_over_keys(parts: dict[tuple[Any, datetime], Merged]) -> dict[datetime, Merged]:
    """The same per step alone: buckets of all keys added up (T4)."""
    return merged_by_step((start, part) for (_, start), part in parts.items())


def merged_by_step(parts: Iterable[tuple[datetime, Merged]]) -> dict[datetime, Merged]:
    """Histograms of one step added up."""
    by_start: dict[datetime, list[Merged]] = defaultdict(list)
    for start, part in parts:
        by_start[start].append(part)
    return {start: merged for start, of_step in by_start.items() if (merged := remerged(of_step)) is not None}


def remerged(parts: Iterable[Merged]) -> Merged | None:
    """Merge what was merged before; inexact if any part is."""
    known = list(parts)
    merged = merge([part.buckets for part in known])
    return merged and Merged(merged.buckets, exact=merged.exact and all(part.exact for part in known))


def _merged(sql: str, parameters: dict[str, Any]) -> dict[tuple[Any, datetime], Merged]:
    """Rows of (key, start, layout, position, count) -> histograms."""
    edges = {pk: tuple(values) for pk, values in BucketLayout.objects.values_list("pk", "edges")}
    counts: dict[tuple[Any, datetime], dict[int, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
    for key, start, layout, position, count in rows_of(sql, parameters):
        counts[tuple(key) if isinstance(key, list) else key, start][layout][position] = count
    merged = {
        key: merge([Buckets(edges[layout], of_layout) for layout, of_layout in layouts.items()])
        for key, layouts in counts.items()
    }
    return {key: histogram for key, histogram in merged.items() if histogram is not None}


def during(window: Window, *, whole: bool = False) -> dict[str, Any]:
    """What ``STEP`` and a query's condition on ``at`` ask for."""
    step = window.length_s + 1 if whole else window.step_s
    return {"start": window.start, "end": window.end, "step": float(step)}


def rows_of(sql: str, parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Ask the database."""
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
        return rows
