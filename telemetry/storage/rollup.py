"""Making rollups: minutes of readings, 5 minutes of minutes, hours, 6 hours; each bin once, and anew where marked.

Theory of operation. One worker at a time, by an advisory lock. A run closes the minutes that are over, rolls up what
each resolution lacks, in chunks that are transactions of their own, and then makes marked bins anew, which marks the
bins that hold them one resolution further up. It ends when its time is over and goes on in the next run: a worker
that was away for days catches up, and one that is killed leaves a chunk undone and nothing half done.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import connection, transaction

from controlplane.isolation import Items, isolated_items
from controlplane.models import PeriodicTask
from telemetry.models import RollupRepair, RollupState
from telemetry.storage.locks import ROLLUP, advisory_lock
from telemetry.storage.partitions import ensure_rollups
from telemetry.storage.rollup_columns import (
    BY_PART,
    RESOLUTIONS_S,
    SUMS,
    TABLES,
    WHOLE,
    Histogram,
    Rollup,
    down,
    histograms,
    up,
)
from telemetry.storage.rollup_source import FINEST_S, close, mark, rolled_through

GRACE_S = 15.0  # after a minute's end: scrapes of it are still on their way
CHUNK_BINS = {60: 10, 300: 72, 3600: 48, 21_600: 28}  # that one transaction makes
REPAIRS = 200  # bins of a resolution in one run
FINER = {60: None, 300: 60, 3600: 300, 21_600: 3600}
BIN = "date_bin(make_interval(secs => %(res)s), at - interval '1 microsecond', timestamptz '2000-01-01Z')"
BIN_END = f"{BIN} + make_interval(secs => %(res)s)"


@dataclass(frozen=True, slots=True)
class Rolled:
    """What a run did."""

    bins: int
    repaired: int
    behind_s: float  # how far the finest resolution is behind its time


def roll_up(now: datetime, *, readings_kept_s: float, budget_s: float = 20.0) -> Rolled | None:
    """Roll up what is over and repair what is marked, for about ``budget_s``; None where somebody else is at it."""
    ends_s = time.monotonic() + budget_s
    with advisory_lock(ROLLUP) as ours:
        if not ours:
            return None
        over = down(now - timedelta(seconds=GRACE_S), FINEST_S)
        close(over)
        bins = repaired = 0
        with isolated_items(PeriodicTask.ROLLUPS) as item:
            for resolution_s in RESOLUTIONS_S:
                with item(f"{resolution_s} s"):
                    bins += _advance(resolution_s, over, ends_s)
            for resolution_s in RESOLUTIONS_S:
                repaired += _repair(resolution_s, now - timedelta(seconds=readings_kept_s), item)
        reached = rolled_through()[FINEST_S]
        return Rolled(bins, repaired, (over - reached).total_seconds() if reached else 0.0)


def _advance(resolution_s: int, over: datetime, ends_s: float) -> int:
    """Bins rolled up."""
    finer = FINER[resolution_s]
    reached = rolled_through()
    limit = over if finer is None else reached[finer]
    start = reached[resolution_s] or _first(resolution_s)
    if limit is None or start is None:
        return 0
    target, bins = down(limit, resolution_s), 0
    start = min(start, target)
    while start < target and (time.monotonic() < ends_s or not bins):
        end = min(start + timedelta(seconds=resolution_s * CHUNK_BINS[resolution_s]), target)
        with transaction.atomic():
            _make(resolution_s, start, end)
            RollupState.objects.update_or_create(pk=resolution_s, defaults={"rolled_through": end})
        bins += round((end - start).total_seconds() / resolution_s)
        start = end
    return bins


def _first(resolution_s: int) -> datetime | None:
    """Where rolling up begins: at the first reading there is; None where there is none."""
    tables = TABLES[finer] if (finer := FINER[resolution_s]) else [rollup.readings for rollup in SUMS]
    with connection.cursor() as cursor:
        cursor.execute("select least(" + ", ".join(f"(select min(at) from {table})" for table in tables) + ")")  # noqa: S608 - our own names
        (first,) = cursor.fetchone()
    return down(first - timedelta(microseconds=1), resolution_s) if first else None


def _repair(resolution_s: int, readings_since: datetime, item: Items) -> int:
    """Make marked bins anew; those whose readings are gone stay as they are."""
    marked = RollupRepair.objects.filter(resolution_s=resolution_s).order_by("at")[:REPAIRS]
    reached = rolled_through()
    coarser = next((res for res in RESOLUTIONS_S if FINER[res] == resolution_s), None)
    repaired = 0
    for repair in marked:
        made = reached[resolution_s]
        if made is None or repair.at > made:
            continue  # it is still to be made
        start = repair.at - timedelta(seconds=resolution_s)
        with item(f"{resolution_s} s until {repair.at:%Y-%m-%d %H:%M}"), transaction.atomic():
            repair.delete()
            if start >= readings_since:
                _make(resolution_s, start, repair.at)
                repaired += 1
                if coarser is not None and (through := reached[coarser]) and repair.at <= through:
                    mark(coarser, [up(repair.at, coarser)])
    return repaired


def _make(resolution_s: int, start: datetime, end: datetime) -> None:
    """All rows of the bins from ``start`` (excluded) to ``end`` (included), instead of those that are there."""
    ensure_rollups(resolution_s, start, end)
    finer = FINER[resolution_s]
    statements = [f"delete from {table} where at > %(start)s and at <= %(end)s" for table in TABLES[resolution_s]]  # noqa: S608 - our own names, here and below
    statements += [_sums(rollup, resolution_s, finer) for rollup in SUMS]
    if finer is None:
        statements += [_histogram_of_readings(kind) for kind in BY_PART]
        statements.append(_pools_together())
    else:
        statements.append(_histograms_of(finer, resolution_s))
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement, {"res": resolution_s, "start": start, "end": end})


def _sums(rollup: Rollup, resolution_s: int, finer: int | None) -> str:
    key = ", ".join(rollup.key)
    names = ", ".join(column.name for column in rollup.columns)
    parts = [
        f"{column.together}({column.of_reading if finer is None else column.name})::{column.sql_type}"
        for column in rollup.columns
    ]
    return f"""
        insert into {rollup.table(resolution_s)} (at, {key}, {names})
        select {BIN_END}, {key}, {", ".join(parts)} from {rollup.readings if finer is None else rollup.table(finer)}
        where at > %(start)s and at <= %(end)s
        group by 1, {key}
        """  # noqa: S608


def _histogram_of_readings(of: Histogram) -> str:
    return _positions(
        FINEST_S,
        f"'{of.kind}'",
        f"""
        select {BIN_END} as at, {of.pool} as pool, {of.part} as part, {of.reuse} as reuse,
            {of.column}_layout_id as layout_id, {of.column}_at as positions, {of.column}_counts as counts,
            {of.column}_sum_s as sum_s
        from {of.readings} where at > %(start)s and at <= %(end)s and {of.column}_layout_id is not null
        """,  # noqa: S608
    )


def _pools_together() -> str:
    return _positions(
        FINEST_S,
        f"kind || '{WHOLE}'",
        f"""
        select at, kind, pool, '' as part, '' as reuse, layout_id, positions, counts, sum_s
        from {histograms(FINEST_S)} where at > %(start)s and at <= %(end)s and reuse = ''
        """,  # noqa: S608
    )


def _histograms_of(finer: int, resolution_s: int) -> str:
    return _positions(
        resolution_s,
        "kind",
        f"""
        select {BIN_END} as at, kind, pool, part, reuse, layout_id, positions, counts, sum_s
        from {histograms(finer)} where at > %(start)s and at <= %(end)s
        """,  # noqa: S608
    )


def _positions(resolution_s: int, kind: str, rows: str) -> str:
    """Histograms of the same kind, key and layout added up, position by position."""
    return f"""
        insert into {histograms(resolution_s)} (at, kind, pool, part, reuse, layout_id, positions, counts, sum_s)
        with rows as ({rows}),
        sums as (
            select at, {kind} as kind, pool, part, reuse, layout_id, sum(sum_s) as sum_s
            from rows group by 1, 2, 3, 4, 5, 6
        ),
        buckets as (
            select at, {kind} as kind, pool, part, reuse, layout_id, position, sum(n)::bigint as n
            from rows, unnest(positions, counts) as bucket(position, n) group by 1, 2, 3, 4, 5, 6, 7
        )
        select at, kind, pool, part, reuse, layout_id,
            coalesce(array_agg(position order by position) filter (where n is not null), '{{}}'),
            coalesce(array_agg(n order by position) filter (where n is not null), '{{}}'), min(sum_s)
        from sums left join buckets using (at, kind, pool, part, reuse, layout_id)
        group by 1, 2, 3, 4, 5, 6
        """  # noqa: S608
