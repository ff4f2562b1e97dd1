"""What is asked when a hit rate fell: sums by replica, revision and opening over one span of time, and openings.

The steps are those of ``sums``. Where a task group is named, routers' figures are of that group alone; engines know
no groups.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from telemetry.causes.evidence import EngineSums, Prefix, Route, Sums
from telemetry.causes.onset import Bin
from telemetry.storage.sums import rows_of

MOST_PREFIXES = 20_000  # by replica, those with the most tokens
MOST_OPENINGS = 400  # the newest
_SILENT = 0.5  # of a replica's readings without hits


def routes(pool: str, group: str | None, start: datetime, end: datetime) -> list[Route]:
    """What routers counted of a pool. One query."""
    rows = rows_of(
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


def engines(replicas: dict[int, str], start: datetime, end: datetime) -> list[EngineSums]:
    """What engines counted. A replica is silent whose readings come and mostly know no hits. One query."""
    rows = rows_of(
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


def prefixes(pool: str, group: str | None, start: datetime, end: datetime) -> list[Prefix]:
    """What became of each opening at each replica, by collected decisions. One query."""
    rows = rows_of(
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


def described(pool: str, group: str | None, start: datetime, end: datetime) -> list[tuple[str, datetime, Any]]:
    """(task group, time, opening) of the newest decisions with one. One query."""
    rows = rows_of(
        """
        select "group", at, opening::text from telemetry_decision
        where at > %(start)s and at <= %(end)s and pool = %(pool)s and (%(group)s::text is null or "group" = %(group)s)
            and opening is not null
        order by at desc limit %(most)s
        """,
        _asked(pool, group, start, end) | {"most": MOST_OPENINGS},
    )
    return [(row[0], row[1], row[2]) for row in rows]


def bins(pool: str, group: str | None, start: datetime, end: datetime, step_s: float) -> list[Bin]:
    """Tokens of answers by routers, in steps, ascending. One query."""
    rows = rows_of(
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
    rows = rows_of(
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
