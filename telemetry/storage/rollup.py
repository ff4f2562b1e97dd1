"""Makes rollups: minutes from readings, 5 minutes from minutes, then hours and 6 hours; re-aggregates marked bins.

Theory of operation. One worker runs at a time, by an advisory lock. A run closes the minutes that are over, and rolls
up what each resolution lacks, in chunks that are separate transactions. Then it re-aggregates marked bins, and marks
the bins of the next resolution that contain them. A run stops when its time is over, and the next run continues: a
worker that was stopped for days catches up, and one that is killed leaves no incomplete bin.

Late readings mark their minute. A transaction that stores readings takes a shared lock until it ends, and then reads
which minutes are closed. Closing takes the lock exclusively: it waits for all transactions that did not see the new
time, and later ones see it. So a reading is either stored when its minute is rolled up, or its minute is marked.
Storing waits while minutes are closed, never while they are rolled up. A mark is deleted before its bin is
re-aggregated: the deletion waits for transactions that rely on the mark, and later ones create another.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import connection, transaction

from controlplane.isolation import Items, isolated_items
from controlplane.models import PeriodicTask
from telemetry.models import RollupRepair, RollupState
from telemetry.storage.locks import ROLLUP, STORING, advisory_lock
from telemetry.storage.partitions import ensure_rollups
from telemetry.storage.rollup_tables import (
    BY_PART,
    FINEST_S,
    POOL_SUFFIX,
    RESOLUTIONS_S,
    SUMS,
    TABLES,
    Rollup,
    ceil_to_bin,
    floor_to_bin,
    histograms,
    rolled_through,
    select_histograms,
)

GRACE_S = 15.0  # after a minute's end: its scrapes are still arriving
CHUNK_BINS = {60: 10, 300: 72, 3600: 48, 21_600: 28}  # per transaction
REPAIRS = 200  # bins of a resolution per run
FINER: dict[int, int | None] = {60: None, 300: 60, 3600: 300, 21_600: 3600}
COARSER = {60: 300, 300: 3600, 3600: 21_600}
BIN_END = (
    "date_bin(make_interval(secs => %(res)s), at - interval '1 microsecond', timestamptz '2000-01-01Z')"
    " + make_interval(secs => %(res)s)"
)


@dataclass(frozen=True, slots=True)
class RollupRun:
    """The result of a run."""

    bins: int
    repaired: int
    behind_s: float  # how far the finest resolution lags behind


def roll_up(now: datetime, *, readings_retention_s: float, budget_s: float = 20.0) -> RollupRun | None:
    """Roll up completed bins and re-aggregate marked ones, for about ``budget_s``; None if another worker does it."""
    ends_s = time.monotonic() + budget_s
    with advisory_lock(ROLLUP) as acquired:
        if not acquired:
            return None
        closed_through = floor_to_bin(now - timedelta(seconds=GRACE_S), FINEST_S)
        close(closed_through)
        bins = repaired = 0
        with isolated_items(PeriodicTask.ROLLUPS) as item:
            for resolution_s in RESOLUTIONS_S:
                with item(f"{resolution_s} s"):
                    bins += _advance(resolution_s, closed_through, ends_s)
            for resolution_s in RESOLUTIONS_S:
                repaired += _repair(resolution_s, now - timedelta(seconds=readings_retention_s), item)
        reached = rolled_through()[FINEST_S]
        return RollupRun(bins, repaired, (closed_through - reached).total_seconds() if reached else 0.0)


@transaction.atomic
def close(through: datetime) -> None:
    """From now on, storing a reading of this time or before marks its minute."""
    with connection.cursor() as cursor:
        cursor.execute("select pg_advisory_xact_lock(%s)", [STORING])
    RollupState.objects.update_or_create(pk=FINEST_S, defaults={"closed_through": through})


def mark_late(times: Iterable[datetime]) -> None:
    """Mark the closed minutes of these readings, in the transaction that stores them. Two queries."""
    with connection.cursor() as cursor:
        cursor.execute("select pg_advisory_xact_lock_shared(%s)", [STORING])
    closed = RollupState.objects.filter(pk=FINEST_S).values_list("closed_through", flat=True).first()
    _mark(FINEST_S, {ceil_to_bin(at, FINEST_S) for at in times if closed is not None and at <= closed})


def _mark(resolution_s: int, bins: Iterable[datetime]) -> None:
    """Mark bins for re-aggregation. An existing mark is locked until the transaction ends."""
    repairs = [RollupRepair(resolution_s=resolution_s, at=at) for at in sorted(bins)]
    if repairs:
        key = ["resolution_s", "at"]
        RollupRepair.objects.bulk_create(repairs, update_conflicts=True, unique_fields=key, update_fields=["at"])


def _advance(resolution_s: int, closed_through: datetime, ends_s: float) -> int:
    """Roll up the bins that a resolution lacks; how many."""
    finer = FINER[resolution_s]
    reached = rolled_through()
    limit = closed_through if finer is None else reached[finer]
    start = reached[resolution_s] or _first_bin(resolution_s)
    if limit is None or start is None:
        return 0
    target, bins = floor_to_bin(limit, resolution_s), 0
    start = min(start, target)
    while start < target and (time.monotonic() < ends_s or not bins):
        end = min(start + timedelta(seconds=resolution_s * CHUNK_BINS[resolution_s]), target)
        with transaction.atomic():
            _replace_bins(resolution_s, start, end)
            RollupState.objects.update_or_create(pk=resolution_s, defaults={"rolled_through": end})
        bins += round((end - start).total_seconds() / resolution_s)
        start = end
    return bins


def _first_bin(resolution_s: int) -> datetime | None:
    """Start of the bin with the first reading; None if there is none."""
    tables = TABLES[finer] if (finer := FINER[resolution_s]) else [rollup.readings for rollup in SUMS]
    with connection.cursor() as cursor:
        cursor.execute("select least(" + ", ".join(f"(select min(at) from {table})" for table in tables) + ")")  # noqa: S608 - our own names
        (first,) = cursor.fetchone()
    return floor_to_bin(first - timedelta(microseconds=1), resolution_s) if first else None


def _repair(resolution_s: int, readings_since: datetime, item: Items) -> int:
    """Re-aggregate marked bins; the number of them. Bins whose readings were dropped stay as they are."""
    reached, repaired = rolled_through(), 0
    for repair in RollupRepair.objects.filter(resolution_s=resolution_s).order_by("at")[:REPAIRS]:
        through = reached[resolution_s]
        if through is None or repair.at > through:
            continue  # not aggregated yet
        start = repair.at - timedelta(seconds=resolution_s)
        with item(f"{resolution_s} s until {repair.at:%Y-%m-%d %H:%M}"), transaction.atomic():
            repair.delete()
            if start >= readings_since:
                _replace_bins(resolution_s, start, repair.at)
                repaired += 1
                coarser = COARSER.get(resolution_s)
                if coarser and (coarser_through := reached[coarser]) and repair.at <= coarser_through:
                    _mark(coarser, [ceil_to_bin(repair.at, coarser)])
    return repaired


def _replace_bins(resolution_s: int, start: datetime, end: datetime) -> None:
    """Replace all rows of the bins from ``start`` (excluded) to ``end`` (included)."""
    ensure_rollups(resolution_s, start, end)
    finer = FINER[resolution_s]
    within = "at > %(start)s and at <= %(end)s"
    statements = [f"delete from {table} where {within}" for table in TABLES[resolution_s]]  # noqa: S608 - our own names, here and below
    statements += [_insert_sums(rollup, resolution_s, finer) for rollup in SUMS]
    if finer is None:
        for histogram in BY_PART:
            rows = select_histograms(histogram, BIN_END)
            rows += f" where {within} and {histogram.column}_layout_id is not null"
            statements.append(_insert_histograms(resolution_s, f"'{histogram.kind}'", rows))
        rows = f"""
            select at, kind, pool, '' as part, '' as reuse, layout_id, positions, counts
            from {histograms(FINEST_S)} where {within} and reuse = ''"""  # noqa: S608
        statements.append(_insert_histograms(resolution_s, f"kind || '{POOL_SUFFIX}'", rows))
    else:
        rows = f"""
            select {BIN_END} as at, kind, pool, part, reuse, layout_id, positions, counts
            from {histograms(finer)} where {within}"""  # noqa: S608
        statements.append(_insert_histograms(resolution_s, "kind", rows))
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement, {"res": resolution_s, "start": start, "end": end})


def _insert_sums(rollup: Rollup, resolution_s: int, finer: int | None) -> str:
    key = ", ".join(rollup.key)
    names = ", ".join(column.name for column in rollup.columns)
    values = ", ".join(
        f"{column.aggregate}({column.of_reading if finer is None else column.name})::{column.sql_type}"
        for column in rollup.columns
    )
    return f"""
        insert into {rollup.table(resolution_s)} (at, {key}, {names})
        select {BIN_END}, {key}, {values} from {rollup.readings if finer is None else rollup.table(finer)}
        where at > %(start)s and at <= %(end)s
        group by 1, {key}
        """  # noqa: S608


def _insert_histograms(resolution_s: int, kind: str, rows: str) -> str:
    """Add up histograms of the same kind, key and layout, position by position."""
    return f"""
        insert into {histograms(resolution_s)} (at, kind, pool, part, reuse, layout_id, positions, counts)
        with rows as ({rows}),
        keys as (select distinct at, {kind} as kind, pool, part, reuse, layout_id from rows),
        buckets as (
            select at, {kind} as kind, pool, part, reuse, layout_id, position, sum(n)::bigint as n
            from rows, unnest(positions, counts) as bucket(position, n) group by 1, 2, 3, 4, 5, 6, 7
        )
        select at, kind, pool, part, reuse, layout_id,
            coalesce(array_agg(position order by position) filter (where n is not null), '{{}}'),
            coalesce(array_agg(n order by position) filter (where n is not null), '{{}}')
        from keys left join buckets using (at, kind, pool, part, reuse, layout_id)
        group by 1, 2, 3, 4, 5, 6
        """  # noqa: S608
