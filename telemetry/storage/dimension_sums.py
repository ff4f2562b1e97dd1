"""Sums of readings by other dimensions than ``sums.py``: per rank, task group, replica or revision, and usage reports.

The same rules hold: increases are summed and the caller divides, and a reading at ``t`` belongs to the step that
ends there. Functions use one query for the sums, and one to find out what is rolled up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from telemetry.metrics.engine_names import COUNTERS, GAUGES, OPTIONAL_COUNTERS, WAITING_REASONS
from telemetry.metrics.rates import RouterCounts, accounted_ratio, sum_known
from telemetry.metrics.windows import Window
from telemetry.storage.rollup_tables import ENGINES, ROUTERS, readings_in, sums_in
from telemetry.storage.sums import COVERED_S, OF_POOLS, OF_REPLICAS, STEP, Coverage, fetch_rows, window_parameters

ENGINE_KEYS = {"": "array[]::text[]", "replica": "array[replica_id::text]", "rank": "array[model, engine]"}
KEYS = {"pool": "pool", "group": '"group"', "replica": "replica", "revision": "policy || ' r' || revision"}
CACHE_COUNTS = ("cache_hits", "cache_misses", "cache_bypasses", "cache_prompt_tokens", "cache_generated_tokens")
_USAGE = """sum(requests)::bigint, sum(usage_reported)::bigint,
    sum(prompt_tokens) filter (where usage_reported > 0)::bigint,
    sum(cached_tokens) filter (where usage_reported > 0)::bigint,
    sum(predicted_responses)::bigint, sum(predicted_prompt_tokens)::bigint, sum(predicted_tokens)::bigint,
    sum(predicted_cached_tokens)::bigint"""
_FROM_REPLICAS = f"""from telemetry_routerreading
    where at > %(start)s and at <= %(end)s and replica <> '' and requests is not null and {OF_POOLS}"""


@dataclass(frozen=True, slots=True)
class KeyedSums:
    """Counters of one key over one step; None is unknown."""

    key: tuple[str, ...]
    start: datetime
    counts: dict[str, int | None] = field(default_factory=dict)
    covered_s: float | None = None  # of engines: seconds that the sums cover
    stale: bool = False  # of engines: a scrape failed in this step

    def get(self, name: str) -> int | None:
        return self.counts[name]


@dataclass(frozen=True, slots=True)
class RouterCountsStep:
    """What the responses of one replica reported over one step."""

    pool: str
    replica: str
    start: datetime
    responses: RouterCounts


@dataclass(frozen=True, slots=True)
class UsageReports:
    """How many responses of one replica reported usage over a window; None where no router was scraped."""

    completed: int | None  # successful responses
    reported: int | None  # of those, the ones that reported their cached tokens
    without_details: int | None  # of those, the ones with usage but without cached tokens

    @property
    def accounted_ratio(self) -> float | None:
        """Share of the successful responses that task groups' figures include."""
        return accounted_ratio(self.reported, self.completed)

    @property
    def lacks_details(self) -> bool:
        """Whether the engine reports usage but never cached tokens."""
        return bool(self.without_details) and not self.reported


def engine_counter_sums(
    replica_ids: Sequence[int], window: Window, names: Sequence[str], *, by: str = "", whole: bool = False
) -> list[KeyedSums]:
    """Sums of some counters of engines per step, ascending; ValueError for another name.

    The key is empty, or ``by`` "replica" the replica's id, and ``by`` "rank" model and engine. ``covered_s`` is that of
    the engine with the longest time.
    """
    _check(names, (*COUNTERS, *OPTIONAL_COUNTERS))
    source = sums_in(ENGINES, window, (*names, "covered_s", "stale_scrapes"), whole=whole)
    of_engine = ", ".join(f"sum({name}) as {name}" for name in names)
    rows = fetch_rows(
        f"""
        with by_engine as (
            select replica_id, model, engine, {STEP} as start, sum(covered_s) as covered_s,
                bool_or(stale_scrapes > 0) as stale, {of_engine}
            from {source.sql} readings where {OF_REPLICAS} group by replica_id, model, engine, start
        )
        select {ENGINE_KEYS[by]} as key, start, max(covered_s), bool_or(stale), {_sums(names)}
        from by_engine group by key, start order by key, start
        """,  # noqa: S608 - the names are of a fixed list
        window_parameters(window, whole=whole) | source.parameters | {"ids": list(replica_ids)},
    )
    return [_keyed_sums(row, names) for row in rows]


def rank_sums(replica_id: int, window: Window, names: Sequence[str], *, whole: bool = False) -> list[KeyedSums]:
    """Sums per rank of a replica that was read, and step."""
    rows = engine_counter_sums([replica_id], window, names, by="rank", whole=whole)
    return [row for row in rows if any(row.key)]


def route_sums(
    pools: Sequence[str] | None,
    window: Window,
    names: Sequence[str],
    *,
    by: Sequence[str] = (),
    group: str | None = None,
    replica: str | None = None,
    whole: bool = False,
    counted: str = "requests",
) -> list[KeyedSums]:
    """Routers' sums of some pools (None: all) per key and step, ascending; of one task group or replica if named.

    ``by`` names some of ``KEYS``; ``whole`` makes the window a single step; rows without ``counted`` are left out.
    """
    key = ", ".join(KEYS[name] for name in by) or "''"
    if replica is not None or "replica" in by:  # rollups do not have the replica of a request
        source = readings_in(ROUTERS, window, names)
    else:
        source = sums_in(ROUTERS, window, (counted, *names), whole=whole)
    rows = fetch_rows(
        f"""
        select array[{key}], {STEP} as start, null, false, {_sums(names)}
        from {source.sql} readings
        where pool <> '' and {counted} is not null and {OF_POOLS}
            and (%(group)s::text is null or "group" = %(group)s)
            {"" if replica is None else "and replica = %(replica)s"}
        group by 1, start order by 1, start
        """,  # noqa: S608 - names are columns of ROUTERS and keys of KEYS
        window_parameters(window, whole=whole, pools=pools) | source.parameters | {"group": group, "replica": replica},
    )
    return [_keyed_sums(row, names) for row in rows]


def response_cache_sums(
    pools: Sequence[str] | None,
    window: Window,
    *,
    group: str | None = None,
    by_group: bool = False,
    whole: bool = False,
) -> list[KeyedSums]:
    """Sums of CACHE_COUNTS per pool (the key; ``by_group``: pool and task group) and step, ascending.

    Of one task group if it is named.

    Steps without a request of a group with a response cache are left out. Requests that are unknown beside known ones
    are 0: routers have a series for each result once they have counted it. Tokens are unknown if no hit knew them.
    """
    source = sums_in(ROUTERS, window, CACHE_COUNTS, whole=whole)
    *results, prompt, generated = CACHE_COUNTS
    counts = [f"coalesce(sum({name}), 0)::bigint" for name in results]
    tokens = [
        f"coalesce(sum({name}), case when coalesce(sum(cache_hits), 0) = 0 then 0 end)::bigint"
        for name in (prompt, generated)
    ]
    sums = ", ".join((*counts, *tokens))
    rows = fetch_rows(
        f"""
        select array[{'pool, "group"' if by_group else "pool"}], {STEP} as start, null, false, {sums}
        from {source.sql} readings
        where pool <> '' and coalesce(cache_hits, cache_misses, cache_bypasses) is not null and {OF_POOLS}
            and (%(group)s::text is null or "group" = %(group)s)
        group by 1, start order by 1, start
        """,  # noqa: S608 - names are columns of ROUTERS
        window_parameters(window, whole=whole, pools=pools) | source.parameters | {"group": group},
    )
    return [_keyed_sums(row, CACHE_COUNTS) for row in rows]


def coverage(window: Window, *, whole: bool = False) -> list[Coverage]:
    """How well routers were scraped, per step."""
    source = sums_in(ROUTERS, window, ("covered_s", "stale_scrapes"), whole=whole)
    rows = fetch_rows(
        f"""
        select {STEP} as start, {COVERED_S}, bool_or(stale_scrapes > 0)
        from {source.sql} readings where pool = '' group by start order by start
        """,  # noqa: S608 - no part of it comes from outside
        window_parameters(window, whole=whole) | source.parameters,
    )
    return [Coverage(*row) for row in rows]


def engine_gauges(
    replica_id: int, window: Window, column: str
) -> list[tuple[tuple[str, ...], datetime, float | None, bool]]:
    """((model, engine), step, mean of a gauge, whether a scrape failed) per rank of a replica and step, ascending."""
    _check((column,), GAUGES)
    source = sums_in(ENGINES, window, (f"{column}_sum", f"{column}_n", "stale_scrapes"))
    rows = fetch_rows(
        f"""
        select array[model, engine], {STEP} as start, sum({column}_sum) / nullif(sum({column}_n), 0),
            bool_or(stale_scrapes > 0)
        from {source.sql} readings where replica_id = %(id)s
        group by model, engine, start order by model, engine, start
        """,  # noqa: S608 - the column is one of three
        window_parameters(window) | source.parameters | {"id": replica_id},
    )
    return [(tuple(key), start, mean, stale) for key, start, mean, stale in rows]


def total(rows: Iterable[KeyedSums], name: str) -> int | None:
    """The sum of the known counts of a name; None where none is known."""
    return sum_known(row.get(name) for row in rows)


def waiting_by_reason(replica_ids: Sequence[int], window: Window) -> list[tuple[datetime, tuple[float | None, ...]]]:
    """(start of the step, the mean of each of WAITING_REASONS per engine, summed over the engines), ascending."""
    source = sums_in(ENGINES, window, [f"{name}_{part}" for name in WAITING_REASONS for part in ("sum", "n")])
    means = ", ".join(f"sum({name}_sum) / nullif(sum({name}_n), 0) as {name}" for name in WAITING_REASONS)
    rows = fetch_rows(
        f"""
        with by_engine as (
            select {STEP} as start, {means} from {source.sql} readings where {OF_REPLICAS}
            group by replica_id, model, engine, start
        )
        select start, {", ".join(f"sum({name})" for name in WAITING_REASONS)}
        from by_engine group by start order by start
        """,  # noqa: S608 - no part of it comes from outside
        window_parameters(window) | source.parameters | {"ids": list(replica_ids)},
    )
    return [(row[0], row[1:]) for row in rows]


def usage_reports(pool: str, replica: str, window: Window) -> UsageReports:
    """Usage reports of one replica, from readings. One query."""
    rows = fetch_rows(
        """
        select sum(ok_requests)::bigint, sum(usage_reported)::bigint, sum(usage_without_details)::bigint
        from telemetry_routerreading
        where at > %(start)s and at <= %(end)s and pool = %(pool)s and replica = %(replica)s and requests is not null
        """,
        window_parameters(window) | {"pool": pool, "replica": replica},
    )
    return UsageReports(*rows[0])


def router_counts_by_replica(pools: Sequence[str] | None, window: Window) -> dict[tuple[str, str], RouterCounts]:
    """Reported and predicted tokens over a window by (pool, replica), of some pools by name or of all. One query."""
    sql = f"select pool, replica, {_USAGE} {_FROM_REPLICAS} group by pool, replica"
    return {(row[0], row[1]): RouterCounts(*row[2:]) for row in fetch_rows(sql, window_parameters(window, pools=pools))}


def router_counts_by_step(pools: Sequence[str], window: Window) -> list[RouterCountsStep]:
    """``router_counts_by_replica`` per step, ascending; steps without a request are left out. One query."""
    keys = "pool, replica, start"
    sql = f"select pool, replica, {STEP} as start, {_USAGE} {_FROM_REPLICAS} group by {keys} order by {keys}"
    rows = fetch_rows(sql, window_parameters(window, pools=pools))
    return [RouterCountsStep(pool, replica, start, RouterCounts(*sums)) for pool, replica, start, *sums in rows]


def newest_prompt_structures(
    pools: Sequence[str] | None, window: Window, *, most: int, group: str | None = None
) -> list[tuple[str, str, Any, int | None, int | None]]:
    """Each group's newest ``most`` described prompts. One query.

    (pool, task group, prompt structure as JSON, prompt tokens, tokens of the engine's cache blocks)
    """
    rows = fetch_rows(
        f"""
        select pool, "group", prompt_structure::text, prompt_tokens, block_tokens from (
            select pool, "group", at, prompt_structure, prompt_tokens, block_tokens,
                row_number() over (partition by pool, "group" order by at desc) as number
            from telemetry_decision
            where at > %(start)s and at <= %(end)s and prompt_structure is not null and {OF_POOLS}
                and (%(group)s::text is null or "group" = %(group)s)
        ) as described
        where number <= %(most)s order by pool, "group", at
        """,  # noqa: S608 - no part of it comes from outside
        window_parameters(window, pools=pools) | {"group": group, "most": most},
    )
    return [(row[0], row[1], row[2], row[3], row[4]) for row in rows]


def _sums(names: Sequence[str]) -> str:
    return ", ".join(f"sum({name})::bigint" for name in names)


def _check(names: Sequence[str], known: Sequence[str]) -> None:
    if unknown := set(names) - set(known):
        raise ValueError(f"{sorted(unknown)} cannot be read here; expected some of {known}")


def _keyed_sums(row: tuple[Any, ...], names: Sequence[str]) -> KeyedSums:
    key, start, covered_s, stale, *values = row
    return KeyedSums(tuple(key), start, dict(zip(names, values, strict=True)), covered_s, bool(stale))
