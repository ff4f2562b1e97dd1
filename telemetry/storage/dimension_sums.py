"""What readings add up to by other keys than sums.py has: of a replica per rank, of routers per group and replica.

The rules are the same: additions are summed first and divided by whoever asked (H2), and a reading at ``t`` belongs to
the step that ends there.

Sums and means of what engines report, of several replicas together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from telemetry.metrics.engine_names import COUNTERS, OPTIONAL_COUNTERS, WAITING_REASONS
from telemetry.metrics.windows import Window
from telemetry.storage.rollup_columns import ENGINES, ROUTERS
from telemetry.storage.rollup_source import readings_of, sums_in
from telemetry.storage.sums import STEP, Coverage, during, fetch_rows

KEYS = {"pool": "pool", "group": '"group"', "replica": "replica", "revision": "policy || ' r' || revision"}
GAUGES = ("running", "waiting", "kv_usage_ratio")


@dataclass(frozen=True, slots=True)
class KeyedSums:
    """What was counted under one key over one step; None is unknown."""

    key: tuple[str, ...]
    start: datetime
    counts: dict[str, int | None] = field(default_factory=dict)
    covered_s: float | None = None  # of engines: seconds that the additions cover
    stale: bool = False  # of engines: a scrape failed in this step

    def get(self, name: str) -> int | None:
        """A count by its name."""
        return self.counts[name]


def rank_sums(replica_id: int, window: Window, names: Sequence[str], *, whole: bool = False) -> list[KeyedSums]:
    """Of each rank (key: model, engine) of a replica, per step, ascending. One query."""
    source = sums_in(ENGINES, window, ("covered_s", "stale_scrapes", *names), whole=whole)
    summed = ", ".join(f"sum({name})::bigint" for name in names)
    rows = fetch_rows(
        f"""
        select array[model, engine], {STEP} as start, sum(covered_s), bool_or(stale_scrapes > 0), {summed}
        from {source.sql} readings where replica_id = %(id)s
        group by model, engine, start order by model, engine, start
        """,  # noqa: S608 - names are columns of ENGINES
        during(window, whole=whole) | source.parameters | {"id": replica_id},
    )
    return [_added(row, names) for row in rows if any(row[0])]


def route_sums(
    pools: Sequence[str] | None,
    window: Window,
    names: Sequence[str],
    *,
    by: Sequence[str] = (),
    group: str | None = None,
    replica: str | None = None,
    whole: bool = False,
) -> list[KeyedSums]:
    """What routers counted for some pools (None: all), narrowed to a group or replica, per ``by`` and step. One query.

    ``by`` names some of ``KEYS``.
    """
    key = ", ".join(KEYS[name] for name in by) or "''"
    sums = ", ".join(f"sum({name})::bigint" for name in names)
    narrow = replica is not None or "replica" in by  # which replica it was is told by readings alone
    source = (
        readings_of(ROUTERS, window, names) if narrow else sums_in(ROUTERS, window, ("requests", *names), whole=whole)
    )
    rows = fetch_rows(
        f"""
        select array[{key}], {STEP} as start, null, false, {sums}
        from {source.sql} readings
        where pool <> '' and requests is not null
            and (%(pools)s::text[] is null or pool = any(%(pools)s))
            and (%(group)s::text is null or "group" = %(group)s)
            {"" if replica is None else "and replica = %(replica)s"}
        group by 1, start order by 1, start
        """,  # noqa: S608 - names are columns of ROUTERS and keys of KEYS
        during(window, whole=whole)
        | source.parameters
        | {"pools": None if pools is None else list(pools), "group": group, "replica": replica},
    )
    return [_added(row, names) for row in rows]


def coverage(window: Window, *, whole: bool = False) -> list[Coverage]:
    """How well routers were scraped, per step. One query."""
    source = sums_in(ROUTERS, window, ("scrapes", "covered_s", "stale_scrapes"), whole=whole)
    rows = fetch_rows(
        f"""
        select {STEP} as start, count(distinct router_id) filter (where scrapes > 0), coalesce(sum(covered_s), 0),
            bool_or(stale_scrapes > 0)
        from {source.sql} readings where pool = '' group by start order by start
        """,  # noqa: S608 - no part of it comes from outside
        during(window, whole=whole) | source.parameters,
    )
    return [Coverage(*row) for row in rows]


def engine_gauges(
    replica_id: int, window: Window, column: str
) -> list[tuple[tuple[str, ...], datetime, float | None, bool]]:
    """((model, engine), step, mean of a gauge, whether a scrape failed) of a replica's ranks, ascending. One query."""
    if column not in GAUGES:
        raise ValueError(f"{column!r} is no gauge of a reading")
    source = sums_in(ENGINES, window, (f"{column}_sum", f"{column}_n", "stale_scrapes"))
    rows = fetch_rows(
        f"""
        select array[model, engine], {STEP} as start, sum({column}_sum) / nullif(sum({column}_n), 0),
            bool_or(stale_scrapes > 0)
        from {source.sql} readings where replica_id = %(id)s
        group by model, engine, start order by model, engine, start
        """,  # noqa: S608 - the column is one of three
        during(window) | source.parameters | {"id": replica_id},
    )
    return [(tuple(row[0]), row[1], row[2], row[3]) for row in rows]


def total(rows: Iterable[KeyedSums], name: str) -> int | None:
    """The sum of what is known of a count; None where nothing is."""
    known = [value for row in rows if (value := row.get(name)) is not None]
    return sum(known) if known else None


def _added(row: tuple[object, ...], names: Sequence[str]) -> KeyedSums:
    key, start, covered_s, stale, *values = row
    return KeyedSums(tuple(key), start, dict(zip(names, values, strict=True)), covered_s, bool(stale))  # type: ignore[arg-type]  # as selected


@dataclass(frozen=True, slots=True)
class EngineTotals:
    """Values of one step by the names that were asked for; None is unknown."""

    start: datetime
    stale: bool  # a scrape failed in this step
    values: dict[str, float | None]


def counted(replica_ids: Sequence[int], window: Window, names: Sequence[str]) -> list[EngineTotals]:
    """Sums of some of OPTIONAL_COUNTERS, per step. Two queries at most; ValueError for another name."""
    _check(names, OPTIONAL_COUNTERS)
    sums = ", ".join(f"sum({name})::bigint" for name in names)
    source = sums_in(ENGINES, window, (*names, "stale_scrapes"))
    rows = fetch_rows(
        f"""
        select {STEP} as start, bool_or(stale_scrapes > 0), {sums}
        from {source.sql} readings where replica_id = any(%(ids)s::bigint[]) group by start order by start
        """,  # noqa: S608 - the names are of a fixed list
        during(window) | source.parameters | {"ids": list(replica_ids)},
    )
    return [_totals(row, names) for row in rows]


@dataclass(frozen=True, slots=True)
class ReplicaTotals:
    """Values of one replica and step."""

    replica_id: int
    covered_s: float | None  # seconds that the sums cover, of the engine that was read longest
    totals: EngineTotals


def counter_sums_by_replica(replica_ids: Sequence[int], window: Window, names: Sequence[str]) -> list[ReplicaTotals]:
    """Sums of some of COUNTERS and OPTIONAL_COUNTERS, per replica and step, ascending. Two queries at most.

    Raises:
        ValueError: for another name.
    """
    _check(names, (*COUNTERS, *OPTIONAL_COUNTERS))
    of_engine = ", ".join(f"sum({name}) as {name}" for name in names)
    sums = ", ".join(f"sum({name})::bigint" for name in names)
    source = sums_in(ENGINES, window, (*names, "covered_s", "stale_scrapes"))
    rows = fetch_rows(
        f"""
        with by_engine as (
            select replica_id, {STEP} as start, sum(covered_s) as covered_s, bool_or(stale_scrapes > 0) as stale,
                {of_engine}
            from {source.sql} readings where replica_id = any(%(ids)s::bigint[])
            group by replica_id, model, engine, start
        )
        select replica_id, max(covered_s), start, bool_or(stale), {sums}
        from by_engine group by replica_id, start order by replica_id, start
        """,  # noqa: S608 - the names are of a fixed list
        during(window) | source.parameters | {"ids": list(replica_ids)},
    )
    return [ReplicaTotals(pk, covered_s, _totals(tuple(row), names)) for pk, covered_s, *row in rows]


def waiting_by_reason(replica_ids: Sequence[int], window: Window) -> list[EngineTotals]:
    """Mean of WAITING_REASONS of each engine, summed over the engines, per step. Two queries at most."""
    source = sums_in(ENGINES, window, [f"{name}_{part}" for name in WAITING_REASONS for part in ("sum", "n")])
    means = ", ".join(f"sum({name}_sum) / nullif(sum({name}_n), 0) as {name}" for name in WAITING_REASONS)
    rows = fetch_rows(
        f"""
        with by_engine as (
            select {STEP} as start, {means}
            from {source.sql} readings where replica_id = any(%(ids)s::bigint[])
            group by replica_id, model, engine, start
        )
        select start, false, {", ".join(f"sum({name})" for name in WAITING_REASONS)}
        from by_engine group by start order by start
        """,  # noqa: S608 - no part of it comes from outside
        during(window) | source.parameters | {"ids": list(replica_ids)},
    )
    return [_totals(row, WAITING_REASONS) for row in rows]


def _check(names: Sequence[str], known: Sequence[str]) -> None:
    if unknown := set(names) - set(known):
        raise ValueError(f"{sorted(unknown)} are no counters that can be summed here")


def _totals(row: tuple[object, ...], names: Sequence[str]) -> EngineTotals:
    start, stale, *values = row
    return EngineTotals(start, bool(stale), dict(zip(names, values, strict=True)))  # type: ignore[arg-type]  # as selected
