"""Sums and means of what engines report, of several replicas together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from telemetry.metrics.engines.names import COUNTERS, OPTIONAL_COUNTERS, WAITING_REASONS
from telemetry.metrics.windows import Window
from telemetry.storage.rollups.columns import ENGINES
from telemetry.storage.rollups.source import sums_in
from telemetry.storage.sums import STEP, during, rows_of


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
    rows = rows_of(
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


def counted_by_replica(replica_ids: Sequence[int], window: Window, names: Sequence[str]) -> list[ReplicaTotals]:
    """Sums of some of COUNTERS and OPTIONAL_COUNTERS, per replica and step, ascending. Two queries at most.

    Raises:
        ValueError: for another name.
    """
    _check(names, (*COUNTERS, *OPTIONAL_COUNTERS))
    of_engine = ", ".join(f"sum({name}) as {name}" for name in names)
    sums = ", ".join(f"sum({name})::bigint" for name in names)
    source = sums_in(ENGINES, window, (*names, "covered_s", "stale_scrapes"))
    rows = rows_of(
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
    rows = rows_of(
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
