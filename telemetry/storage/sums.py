"""Sums of readings in steps of time: the one place where readings are aggregated in SQL.

Rates are never averaged: additions are summed here, per step and target, and divided afterwards (H2); quantiles come
from merged buckets (T4). A reading at ``t`` tells of the time before ``t``, so it belongs to the step that ends at or
after ``t``: hence the microsecond.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from django.db import connection

from telemetry.metrics.histograms import Buckets, Merged, merge
from telemetry.metrics.rates import accounted_ratio
from telemetry.metrics.windows import PointState, Window
from telemetry.models import BucketLayout
from telemetry.storage.rollup_columns import (
    ENGINE_TTFT,
    ENGINES,
    PLAIN_LATENCY,
    ROUTER_TTFT,
    ROUTERS,
    STREAMED_LATENCY,
    Histogram,
)
from telemetry.storage.rollup_source import histograms_in, sums_in

K = TypeVar("K", bound=Hashable)
STEP = "date_bin(make_interval(secs => %(step)s), at - interval '1 microsecond', %(start)s)"
STEP_NUMBER = "(date_part('epoch', start - %(start)s) / %(step)s)::integer"  # of a step's start


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
    spilled_requests: int | None  # placed away from the prefix's home or holder, for load; None where there is none
    usage_reported: int | None  # answers behind prompt_tokens
    predicted_answers: int | None  # those of which the router predicted a hit; the next three are theirs (H17)
    predicted_prompt_tokens: int | None
    predicted_tokens: int | None
    predicted_cached_tokens: int | None
    completed: int | None  # successful responses, whether or not they reported usage

    @property
    def accounted_ratio(self) -> float | None:
        """Share of the successful responses that the hit rate rests on."""
        return accounted_ratio(self.usage_reported, self.completed)


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


def combined_state(rows: Sequence[EngineSums]) -> PointState:
    """What a hit rate of several replicas is worth: not reported if nobody that was read reports it."""
    known = [row.queries for row in rows if row.queries is not None]
    told = [row.not_reported for row in rows if row.not_reported is not None]
    return point_state(
        sum(known) if known else None,
        stale=any(row.stale for row in rows),
        not_reported=bool(told) and all(told),
    )


def engine_sums(replica_ids: Sequence[int], window: Window, *, whole: bool = False) -> list[EngineSums]:
    """Per replica and step, ascending; ``whole`` takes the window as a single step. Two queries at most."""
    source = sums_in(ENGINES, window, whole=whole)
    counts = ("external_hits", "finished", "first_tokens", "prompt_tokens", "admitted_tokens", "preemptions")
    tiers = ("device_tokens", "host_tokens", "p2p_tokens", "disk_tokens", "other_tokens")
    summed = ", ".join(f"sum({name})::bigint as {name}" for name in ("queries", "hits", *counts, *tiers))
    rows = fetch_rows(
        f"""
        with by_engine as (
            select replica_id, model, engine, {STEP} as start, {summed}, sum(covered_s) as covered_s,
                bool_or(stale_scrapes > 0) as stale, bool_and(not_reported) as not_reported, max(gap_s) as gap_s
            from {source.sql} readings where replica_id = any(%(ids)s::bigint[])
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
        during(window, whole=whole) | source.parameters | {"ids": list(replica_ids)},
    )
    return [EngineSums(*row) for row in rows]


class Hits(NamedTuple):
    """What a hit rate of a replica, or of several, needs of one step; a chart of many holds tens of thousands."""

    key: int  # the replica's id, or the number of those that are told together
    step: int  # of the window's, from 0
    queries: int | None
    hits: int | None
    external_hits: int | None
    stale: bool
    not_reported: bool | None

    @property
    def state(self) -> PointState:
        """What the hit rate of this step is worth."""
        return point_state(self.queries, stale=self.stale, not_reported=bool(self.not_reported))


def hit_sums(replica_ids: Sequence[int], window: Window) -> list[Hits]:
    """Per replica and step, in no order. Two queries at most."""
    return _hits(
        f"select replica_id, {STEP_NUMBER}, queries, hits, external_hits, stale, not_reported from by_step",  # noqa: S608 - no part of it comes from outside
        replica_ids,
        window,
    )


def hit_sums_by_set(several: Sequence[Sequence[int]], window: Window) -> list[Hits]:
    """Per step and number of a list of replicas, in no order; who does not know the queries adds nothing (H3)."""
    replicas = [(pk, number) for number, ids in enumerate(several) for pk in ids]
    return _hits(
        f"""
        select number, {STEP_NUMBER}, sum(queries)::bigint, sum(hits)::bigint,
            (sum(external_hits) filter (where queries is not null))::bigint, bool_or(stale), bool_and(not_reported)
        from by_step join unnest(%(ids)s::bigint[], %(numbers)s::integer[]) as one(replica_id, number)
            using (replica_id)
        group by number, start
        """,  # noqa: S608 - no part of it comes from outside
        [pk for pk, _ in replicas],
        window,
        numbers=[number for _, number in replicas],
    )


def _hits(select: str, replica_ids: Sequence[int], window: Window, **parameters: list[int]) -> list[Hits]:
    source = sums_in(ENGINES, window, ("queries", "hits", "external_hits", "stale_scrapes", "not_reported"))
    rows = fetch_rows(
        f"""
        with by_step as (
            select replica_id, {STEP} as start, sum(queries)::bigint as queries, sum(hits)::bigint as hits,
                sum(external_hits)::bigint as external_hits, bool_or(stale_scrapes > 0) as stale,
                bool_and(not_reported) as not_reported
            from {source.sql} readings where replica_id = any(%(ids)s::bigint[]) group by 1, 2
        )
        {select}
        """,  # noqa: S608 - no part of it comes from outside
        during(window) | source.parameters | parameters | {"ids": list(replica_ids)},
    )
    return [Hits(*row) for row in rows]


def router_sums(
    pools: Sequence[str] | None, window: Window, *, whole: bool = False
) -> tuple[list[RouterSums], list[Coverage]]:
    """Of some pools by name, or all: per pool, task group and step, ascending, and how well a step is covered."""
    source = sums_in(ROUTERS, window, whole=whole)
    rows = fetch_rows(
        f"""
        select pool, "group", {STEP} as start, sum(requests)::bigint,
            sum(case when requests is not null then
                coalesce(replica_error_requests, 0) + coalesce(router_error_requests, 0) end)::bigint,
            sum(prompt_tokens)::bigint, sum(cached_tokens)::bigint,
            sum(spilled_requests)::bigint, sum(usage_reported)::bigint, sum(predicted_answers)::bigint,
            sum(predicted_prompt_tokens)::bigint, sum(predicted_tokens)::bigint, sum(predicted_cached_tokens)::bigint,
            sum(ok_requests)::bigint,
            count(distinct router_id) filter (where scrapes > 0), coalesce(sum(covered_s), 0), sum(stale_scrapes) > 0
        from {source.sql} readings where (pool = '' or %(pools)s::text[] is null or pool = any(%(pools)s))
        group by pool, "group", start order by pool, "group", start
        """,  # noqa: S608 - no part of it comes from outside
        during(window, whole=whole) | source.parameters | {"pools": None if pools is None else list(pools)},
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
    rows = fetch_rows(
        """
        with newest as (
            select distinct on (replica_id) replica_id, at from telemetry_reading
            where at > %(since)s and at <= %(until)s and replica_id = any(%(ids)s::bigint[])
            order by replica_id, at desc
        )
        select r.replica_id, sum(r.running), sum(r.waiting), avg(r.kv_usage_ratio)
        from telemetry_reading r join newest n on r.replica_id = n.replica_id and r.at = n.at
        where r.at > %(since)s and r.at <= %(until)s and r.state <> 'stale' group by r.replica_id
        """,
        {"since": since, "until": until, "ids": list(replica_ids)},
    )
    return {row[0]: Gauges(*row[1:]) for row in rows}


def mean_gauge(replica_ids: Sequence[int], window: Window, column: str) -> list[tuple[int, int, float | None, bool]]:
    """(replica, number of the step, mean of a gauge over the step, whether a scrape failed in it), in no order."""
    if column not in {"running", "waiting", "kv_usage_ratio"}:
        raise ValueError(f"{column!r} is no gauge of a reading")
    together = "avg" if column == "kv_usage_ratio" else "sum"
    source = sums_in(ENGINES, window, (f"{column}_sum", f"{column}_n", "stale_scrapes"))
    rows = fetch_rows(
        f"""
        with by_engine as (
            select replica_id, {STEP} as start, sum({column}_sum) / nullif(sum({column}_n), 0) as value,
                bool_or(stale_scrapes > 0) as stale
            from {source.sql} readings where replica_id = any(%(ids)s::bigint[])
            group by replica_id, model, engine, start
        )
        select replica_id, {STEP_NUMBER}, {together}(value), bool_or(stale) from by_engine group by replica_id, start
        """,  # noqa: S608 - the column is one of three
        during(window) | source.parameters | {"ids": list(replica_ids)},
    )
    return [(row[0], row[1], row[2], row[3]) for row in rows]


def engine_ttft(
    replica_ids: Sequence[int], window: Window, *, by: str | None = None, whole: bool = False
) -> dict[tuple[Any, datetime], Merged]:
    """TTFT by the engines' clock, per (key, start of the step); the key is "" or, by "replica", its id."""
    source = histograms_in(ENGINE_TTFT, window, by_part=True, whole=whole)
    key = {None: "''", "replica": "part::bigint"}[by]
    return _merged(
        f"{key}, {{}} from {source.sql} rows, unnest(positions, counts) as bucket(position, n) "
        "where part = any(%(parts)s)",
        during(window, whole=whole) | source.parameters | {"parts": [str(pk) for pk in replica_ids]},
    )


def pools_engine_ttft(
    pools: Sequence[str] | None, window: Window, *, whole: bool = False
) -> dict[tuple[Any, datetime], Merged]:
    """TTFT of the replicas of some pools by name, or of all, by the engines' clock; per ("", start of the step)."""
    source = histograms_in(ENGINE_TTFT, window, by_part=False, whole=whole)
    return _merged(
        f"'', {{}} from {source.sql} rows, unnest(positions, counts) as bucket(position, n) "
        "where (%(pools)s::text[] is null or pool = any(%(pools)s))",
        during(window, whole=whole) | source.parameters | {"pools": None if pools is None else list(pools)},
    )


def router_ttft(
    pools: Sequence[str] | None, window: Window, *, by: str | None = None, whole: bool = False
) -> dict[tuple[Any, datetime], Merged]:
    """TTFT of streamed responses by the routers' clock, per (key, start of the step).

    The key is "", (pool, group), (pool, replica) or, by "reuse", (pool, group, "hit" or "miss").
    """
    return _routed(ROUTER_TTFT, pools, window, by=by, whole=whole)


def router_latency(
    pools: Sequence[str] | None, window: Window, *, streamed: bool, by: str | None = None, whole: bool = False
) -> dict[tuple[Any, datetime], Merged]:
    """Seconds until the last byte of successful responses, per (key, start of the step); keys as of ``router_ttft``.

    ``streamed``: of those that were streamed, else of those that were not.
    """
    return _routed(STREAMED_LATENCY if streamed else PLAIN_LATENCY, pools, window, by=by, whole=whole)


def _routed(
    of: Histogram, pools: Sequence[str] | None, window: Window, *, by: str | None, whole: bool
) -> dict[tuple[Any, datetime], Merged]:
    """A histogram of routers. Rows with a policy are the same requests once more, by revision, while one is on trial.

    So are those with a reuse. Readings alone tell which replica answered.
    """
    parameters = during(window, whole=whole) | {"pools": None if pools is None else list(pools)}
    if by == "replica":
        readings, key = _by_replica(of), "array[pool, replica]"
    else:
        source = histograms_in(of, window, by_part=by is not None, whole=whole)
        parameters |= source.parameters
        key = {None: "''", "group": "array[pool, part]", "reuse": "array[pool, part, reuse]"}[by]
        readings = f"{source.sql} rows"
    return _merged(
        f"{key}, {{}} from {readings}, unnest(positions, counts) as bucket(position, n) "
        f"where reuse {'<>' if by == 'reuse' else '='} '' and (%(pools)s::text[] is null or pool = any(%(pools)s))",
        parameters,
    )


def _by_replica(of: Histogram) -> str:
    return f"""(
        select at, pool, replica, reuse,
            {of.column}_layout_id as layout_id, {of.column}_at as positions, {of.column}_counts as counts
        from telemetry_routerreading
        where at > %(start)s and at <= %(end)s and policy = '' and {of.column}_layout_id is not null
    ) rows"""  # noqa: S608 - our own names


def merged_by_start(parts: dict[tuple[Any, datetime], Merged]) -> dict[datetime, Merged]:
    """The same per step alone: buckets of all keys added up (T4)."""
    return merged_by_step((start, part) for (_, start), part in parts.items())


def merged_by_step(parts: Iterable[tuple[datetime, Merged]]) -> dict[datetime, Merged]:
    """Histograms of one step added up."""
    by_start: dict[datetime, list[Merged]] = defaultdict(list)
    for start, part in parts:
        by_start[start].append(part)
    return {start: merged for start, of_step in by_start.items() if (merged := merge_histograms(of_step)) is not None}


def merge_histograms(parts: Iterable[Merged]) -> Merged | None:
    """Merge what was merged before; inexact if any part is."""
    known = list(parts)
    merged = merge([part.buckets for part in known])
    return merged and Merged(merged.buckets, exact=merged.exact and all(part.exact for part in known))


def _merged(select: str, parameters: dict[str, Any]) -> dict[tuple[Any, datetime], Merged]:
    """Buckets of a step added up: ``select`` begins with the key, leaves a place for the rest, and goes on."""
    sql = "select " + select.format(f"{STEP} as start, layout_id, position, sum(n)::bigint") + " group by 1, 2, 3, 4"
    return merged_layouts(
        ((tuple(key) if isinstance(key, list) else key, start), layout, position, count)
        for key, start, layout, position, count in fetch_rows(sql, parameters)
    )


def merged_layouts(rows: Iterable[tuple[K, int, int, int]]) -> dict[K, Merged]:
    """Rows of (key, layout, position, count) as a histogram per key. One query beside the one that the rows are of.

    Layouts are asked for after the rows: one that a reading brings while this runs is there before the reading is.
    """
    counts: dict[K, dict[int, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
    for key, layout, position, count in rows:
        counts[key][layout][position] = count
    edges = {pk: tuple(values) for pk, values in BucketLayout.objects.values_list("pk", "edges")}
    merged = {
        key: merge([Buckets(edges[layout], of_layout) for layout, of_layout in layouts.items()])
        for key, layouts in counts.items()
    }
    return {key: histogram for key, histogram in merged.items() if histogram is not None}


def during(window: Window, *, whole: bool = False) -> dict[str, Any]:
    """What ``STEP`` and a query's condition on ``at`` ask for."""
    step = window.length_s + 1 if whole else window.step_s
    return {"start": window.start, "end": window.end, "step": float(step)}


def fetch_rows(sql: str, parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Ask the database."""
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
        return rows
