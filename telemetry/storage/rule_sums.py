"""Sums that only alert rules ask for; everything else is in sums.py.

What is asked when a hit rate fell: sums by replica, revision and opening over one span of time, and openings.

The steps are those of ``sums``. Where a task group is named, routers' figures are of that group alone; engines know
no groups.

What routers counted by the revision of a policy that placed a request: sums of readings, for the guard of a trial.

The steps and the sums are those of ``sums``; a row here says which router and which task group it is of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from telemetry.causes.evidence import Bin, EngineSums, Prefix, Route, Sums
from telemetry.metrics.histograms import Buckets
from telemetry.metrics.windows import Window
from telemetry.storage.sums import STEP, during, fetch_rows, merged_layouts


@dataclass(frozen=True, slots=True)
class PressureSums:
    """How full a replica was over one step."""

    replica_id: int
    start: datetime
    kv_usage_ratio: float | None  # mean over time and engines
    preemptions: int | None
    waiting: float | None  # requests in the queue, mean over time, summed over engines


def pressure_sums(replica_ids: Sequence[int], window: Window) -> list[PressureSums]:
    """Per replica and step, ascending. One query."""
    rows = fetch_rows(
        f"""
        select replica_id, {STEP} as start, avg(kv_usage_ratio), sum(preemptions)::bigint,
            sum(waiting) / count(distinct at) filter (where waiting is not null)
        from telemetry_reading
        where at > %(start)s and at <= %(end)s and replica_id = any(%(ids)s::bigint[]) and state <> 'stale'
        group by replica_id, start order by replica_id, start
        """,  # noqa: S608 - no part of it comes from outside
        during(window) | {"ids": list(replica_ids)},
    )
    return [PressureSums(*row) for row in rows]


MOST_PREFIXES = 20_000  # by replica, those with the most tokens
MOST_OPENINGS = 400  # the newest
_SILENT = 0.5  # of a replica's readings without hits


def route_totals(pool: str, group: str | None, start: datetime, end: datetime) -> list[Route]:
    """What routers counted of a pool. One query."""
    rows = fetch_rows(
        """
        select "group", replica, policy, revision, coalesce(sum(requests), 0)::float8,
            coalesce(sum(prompt_tokens) filter (where usage_reported > 0), 0)::float8,
            coalesce(sum(cached_tokens) filter (where usage_reported > 0), 0)::float8,
            sum(spilled_requests)::float8, coalesce(sum(predicted_prompt_tokens), 0)::float8,
            coalesce(sum(predicted_tokens), 0)::float8, coalesce(sum(predicted_cached_tokens), 0)::float8
        from telemetry_routerreading
        where at > %(start)s and at <= %(end)s and pool = %(pool)s and replica <> '' and policy <> '' and reuse = ''
            and (%(group)s::text is null or "group" = %(group)s)
        group by "group", replica, policy, revision
        """,
        _asked(pool, group, start, end),
    )
    return [Route(name, replica, policy, revision, Sums(*sums)) for name, replica, policy, revision, *sums in rows]


def engine_totals(replicas: dict[int, str], start: datetime, end: datetime) -> list[EngineSums]:
    """What engines counted. A replica is silent whose readings come and mostly know no hits. One query."""
    rows = fetch_rows(
        """
        select replica_id, sum(queries) filter (where hits is not null)::float8,
            sum(hits + coalesce(external_hits, 0)) filter (where queries is not null)::float8,
            count(*) filter (where hits is null or queries is null), count(*), avg(kv_usage_ratio),
            sum(preemptions)::float8
        from telemetry_reading
        where at > %(start)s and at <= %(end)s and replica_id = any(%(ids)s::bigint[])
            and state not in ('stale', 'first')
        group by replica_id
        """,
        {"start": start, "end": end, "ids": list(replicas)},
    )
    return [
        EngineSums(replicas[pk], queries, hits, unknown > _SILENT * readings, usage, preemptions)
        for pk, queries, hits, unknown, readings, usage, preemptions in rows
    ]


def prefix_totals(pool: str, group: str | None, start: datetime, end: datetime) -> list[Prefix]:
    """What became of each opening at each replica, by collected decisions. One query."""
    rows = fetch_rows(
        """
        select "group", prefix, replica, count(*)::float8, sum(prompt_tokens)::float8, sum(cached_tokens)::float8,
            bool_or(at < %(start)s + (%(end)s - %(start)s) / 2)
        from telemetry_decision
        where at > %(start)s and at <= %(end)s and pool = %(pool)s and (%(group)s::text is null or "group" = %(group)s)
            and prompt_tokens is not null and cached_tokens is not null
        group by "group", prefix, replica order by 5 desc limit %(most)s
        """,
        _asked(pool, group, start, end) | {"most": MOST_PREFIXES},
    )
    return [Prefix(name, prefix, replica, Sums(*sums), early) for name, prefix, replica, *sums, early in rows]


def described_prompts(pool: str, group: str | None, start: datetime, end: datetime) -> list[tuple[str, datetime, Any]]:
    """(task group, time, opening) of the newest decisions with one. One query."""
    rows = fetch_rows(
        """
        select "group", at, opening::text from telemetry_decision
        where at > %(start)s and at <= %(end)s and pool = %(pool)s and (%(group)s::text is null or "group" = %(group)s)
            and opening is not null
        order by at desc limit %(most)s
        """,
        _asked(pool, group, start, end) | {"most": MOST_OPENINGS},
    )
    return [(row[0], row[1], row[2]) for row in rows]


def router_bins(pool: str, group: str | None, start: datetime, end: datetime, step_s: float) -> list[Bin]:
    """Tokens of answers by routers, in steps, ascending. One query."""
    rows = fetch_rows(
        """
        select date_bin(make_interval(secs => %(step)s), at - interval '1 microsecond', %(start)s) as bin,
            sum(prompt_tokens)::float8, sum(cached_tokens)::float8
        from telemetry_routerreading
        where at > %(start)s and at <= %(end)s and pool = %(pool)s and (%(group)s::text is null or "group" = %(group)s)
            and usage_reported > 0 and reuse = ''
        group by bin order by bin
        """,
        _asked(pool, group, start, end) | {"step": step_s},
    )
    return [Bin(*row) for row in rows]


def engine_bins(replicas: dict[int, str], start: datetime, end: datetime, step_s: float) -> list[Bin]:
    """The same by engines. One query."""
    rows = fetch_rows(
        """
        select date_bin(make_interval(secs => %(step)s), at - interval '1 microsecond', %(start)s) as bin,
            sum(queries)::float8, sum(hits + coalesce(external_hits, 0))::float8
        from telemetry_reading
        where at > %(start)s and at <= %(end)s and replica_id = any(%(ids)s::bigint[])
            and queries > 0 and hits is not null
        group by bin order by bin
        """,
        {"start": start, "end": end, "ids": list(replicas), "step": step_s},
    )
    return [Bin(*row) for row in rows]


def _asked(pool: str, group: str | None, start: datetime, end: datetime) -> dict[str, Any]:
    return {"pool": pool, "group": group, "start": start, "end": end}


class LatencyKind(StrEnum):
    """What routers time: columns of their readings. Streamed responses have the one, plain ones the other (T1b)."""

    TTFT = "ttft"
    PLAIN_LATENCY = "plain_latency"


@dataclass(frozen=True, slots=True)
class RevisionSums:
    """Additions of one router for one task group and revision over one step; whole numbers until they are weighed."""

    start: datetime
    router_id: int
    group: str
    revision: int
    requests: int
    answered: float  # those that ended well or by our fault: not the client's, not cancelled
    failed: float  # by a replica's or the router's fault
    prompt_tokens: float  # of answers that reported their cached tokens (H16)
    cached_tokens: float


@dataclass(frozen=True, slots=True)
class RevisionLatency:
    """What one router timed for one task group over one step; ``revision`` is None where it was not told apart."""

    start: datetime
    router_id: int
    group: str
    revision: int | None
    waits: Buckets  # seconds


def revision_sums(policy: str, window: Window) -> list[RevisionSums]:
    """What the revisions of a policy placed, ascending by step. One query."""
    rows = fetch_rows(
        f"""
        select {STEP} as start, router_id, "group", revision, sum(requests)::bigint,
            sum(coalesce(ok_requests, 0) + coalesce(replica_error_requests, 0)
                + coalesce(router_error_requests, 0))::bigint,
            sum(coalesce(replica_error_requests, 0) + coalesce(router_error_requests, 0))::bigint,
            coalesce(sum(prompt_tokens) filter (where usage_reported > 0), 0)::bigint,
            coalesce(sum(cached_tokens) filter (where usage_reported > 0), 0)::bigint
        from telemetry_routerreading
        where at > %(start)s and at <= %(end)s and policy = %(policy)s and requests is not null
        group by start, router_id, "group", revision order by start, router_id, "group", revision
        """,  # noqa: S608 - no part of it comes from outside
        during(window) | {"policy": policy},
    )
    return [RevisionSums(*row) for row in rows]


def revision_latencies(pool: str, policy: str, window: Window, of: LatencyKind) -> list[RevisionLatency]:
    """A histogram of what a policy placed, by revision; with ``policy`` "" of all that the pool served. Two queries."""
    rows = fetch_rows(
        f"""
        select {STEP} as start, router_id, "group", revision, {of}_layout_id, position, sum(n)::bigint
        from telemetry_routerreading, unnest({of}_at, {of}_counts) as bucket(position, n)
        where at > %(start)s and at <= %(end)s and pool = %(pool)s and policy = %(policy)s
            and reuse = '' and {of}_layout_id is not null
        group by 1, 2, 3, 4, 5, 6 order by 1, 2, 3, 4
        """,  # noqa: S608 - no part of it comes from outside
        during(window) | {"pool": pool, "policy": policy},
    )
    merged = merged_layouts(((*key,), layout, position, count) for *key, layout, position, count in rows)
    return [
        RevisionLatency(start, router_id, group, revision if policy else None, histogram.buckets)
        for (start, router_id, group, revision), histogram in merged.items()
    ]


def requests_by_replica(pool: str, window: Window) -> dict[str, int]:
    """Requests that a pool's replicas were given. One query."""
    rows = fetch_rows(
        """
        select replica, sum(requests)::bigint from telemetry_routerreading
        where at > %(start)s and at <= %(end)s and pool = %(pool)s and replica <> '' and requests is not null
        group by replica
        """,
        during(window) | {"pool": pool},
    )
    return dict(rows)
