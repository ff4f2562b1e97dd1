"""Sums of readings and decisions for alert rules and for the analysis of hit-rate drops.

Where a task group is named, routers' figures are of that group alone; engines do not know groups. Each function runs
one query unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from telemetry.causes.evidence import Bin, EngineSums, Prefix, Route, Sums
from telemetry.metrics.windows import Window
from telemetry.models import ScrapeState
from telemetry.storage.sums import OF_POOLS, STEP, fetch_rows, window_parameters


@dataclass(frozen=True, slots=True)
class PressureSums:
    """Load of a replica's KV cache over one step."""

    replica_id: int
    start: datetime
    kv_usage_ratio: float | None  # mean over time and engines
    preemptions: int | None
    waiting: float | None  # requests in the queue, mean over time, summed over engines


def pressure_sums(replica_ids: Sequence[int], window: Window) -> list[PressureSums]:
    """Per replica and step, ascending."""
    rows = fetch_rows(
        f"""
        select replica_id, {STEP} as start, avg(kv_usage_ratio), sum(preemptions)::bigint,
            sum(waiting) / count(distinct at) filter (where waiting is not null)
        from telemetry_reading
        where at > %(start)s and at <= %(end)s and replica_id = any(%(ids)s::bigint[]) and state <> 'stale'
        group by replica_id, start order by replica_id, start
        """,  # noqa: S608 - no part of it comes from outside
        window_parameters(window) | {"ids": list(replica_ids)},
    )
    return [PressureSums(*row) for row in rows]


@dataclass(frozen=True, slots=True)
class StoreSums:
    """What scrapes of one router found about the store of response caches over one step."""

    router: str
    start: datetime
    down_ratio: float  # share of the scrapes that found it down


def store_sums(window: Window) -> list[StoreSums]:
    """Per router and step, ascending; nothing of routers without a store."""
    rows = fetch_rows(
        f"""
        select controlplane_router.name, {STEP} as start, avg((cache_store_up = 0)::integer)::float8
        from telemetry_routerreading join controlplane_router on controlplane_router.id = router_id
        where at > %(start)s and at <= %(end)s and pool = '' and cache_store_up is not null
        group by controlplane_router.name, start order by controlplane_router.name, start
        """,  # noqa: S608 - no part of it comes from outside
        window_parameters(window),
    )
    return [StoreSums(*row) for row in rows]


@dataclass(frozen=True, slots=True)
class StreamSums:
    """Streams with a first token that began within one step."""

    pool: str
    failed_replica: str  # the last one that failed during them, whether or not another one continued; "": none
    start: datetime
    streams: int


def stream_sums(pools: Sequence[str], window: Window) -> list[StreamSums]:
    """Per pool, failed replica and step."""
    rows = fetch_rows(
        f"""
        select pool, coalesce(
            case when outcome = 'replica_error' then replica end, continued_after -> -1 ->> 'replica', ''
        ) as failed, {STEP} as start, count(*)
        from telemetry_decision
        where at > %(start)s and at <= %(end)s and streamed and ttft_s is not null and {OF_POOLS}
        group by pool, failed, start
        """,  # noqa: S608 - no part of it comes from outside
        window_parameters(window, pools=list(pools)),
    )
    return [StreamSums(*row) for row in rows]


MAX_PREFIXES = 20_000  # by replica, those with the most tokens
MAX_DESCRIBED = 400  # the newest
SILENT_SHARE = 0.5  # of a replica's readings that lack hits


def route_totals(pool: str, group: str | None, start: datetime, end: datetime) -> list[Route]:
    """Routers' sums per task group, replica and revision."""
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
        _parameters(pool, group, start, end),
    )
    return [Route(name, replica, policy, revision, Sums(*sums)) for name, replica, policy, revision, *sums in rows]


def engine_totals(replicas: dict[int, str], start: datetime, end: datetime) -> list[EngineSums]:
    """Sums per replica. A replica is silent if most of its readings have no hits. Two queries."""
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
    states = ScrapeState.objects.filter(replica__in=list(replicas), lacks_prefix_cache=True)
    without = set(states.values_list("replica_id", flat=True))
    return [
        EngineSums(replicas[pk], queries, hits, unknown > SILENT_SHARE * readings, usage, preemptions, pk in without)
        for pk, queries, hits, unknown, readings, usage, preemptions in rows
    ]


def prefix_totals(pool: str, group: str | None, start: datetime, end: datetime) -> list[Prefix]:
    """Sums of collected decisions per task group, tier-1 prefix and replica."""
    rows = fetch_rows(
        """
        select "group", prefix, replica, count(*)::float8, sum(prompt_tokens)::float8, sum(cached_tokens)::float8,
            bool_or(at < %(start)s + (%(end)s - %(start)s) / 2)
        from telemetry_decision
        where at > %(start)s and at <= %(end)s and pool = %(pool)s and (%(group)s::text is null or "group" = %(group)s)
            and prompt_tokens is not null and cached_tokens is not null
        group by "group", prefix, replica order by 5 desc limit %(most)s
        """,
        _parameters(pool, group, start, end) | {"most": MAX_PREFIXES},
    )
    return [Prefix(name, prefix, replica, Sums(*sums), early) for name, prefix, replica, *sums, early in rows]


def described_prompts(pool: str, group: str | None, start: datetime, end: datetime) -> list[tuple[str, datetime, Any]]:
    """(task group, time, prompt structure as JSON) of the newest decisions that have one."""
    rows = fetch_rows(
        """
        select "group", at, prompt_structure::text from telemetry_decision
        where at > %(start)s and at <= %(end)s and pool = %(pool)s and (%(group)s::text is null or "group" = %(group)s)
            and prompt_structure is not null
        order by at desc limit %(most)s
        """,
        _parameters(pool, group, start, end) | {"most": MAX_DESCRIBED},
    )
    return [(row[0], row[1], row[2]) for row in rows]


def router_bins(pool: str, group: str | None, start: datetime, end: datetime, step_s: float) -> list[Bin]:
    """Reported prompt and cached tokens of a pool per step, from routers, ascending."""
    rows = fetch_rows(
        """
        select date_bin(make_interval(secs => %(step)s), at - interval '1 microsecond', %(start)s) as bin,
            sum(prompt_tokens)::float8, sum(cached_tokens)::float8
        from telemetry_routerreading
        where at > %(start)s and at <= %(end)s and pool = %(pool)s and (%(group)s::text is null or "group" = %(group)s)
            and usage_reported > 0 and reuse = ''
        group by bin order by bin
        """,
        _parameters(pool, group, start, end) | {"step": step_s},
    )
    return [Bin(*row) for row in rows]


def engine_bins(replicas: dict[int, str], start: datetime, end: datetime, step_s: float) -> list[Bin]:
    """Queried and cached tokens of replicas per step, from engines, ascending."""
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


def _parameters(pool: str, group: str | None, start: datetime, end: datetime) -> dict[str, Any]:
    return {"pool": pool, "group": group, "start": start, "end": end}
