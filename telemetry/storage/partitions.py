"""One table per day of readings, and of decisions: made ahead, dropped when their time is over. A day is a UTC day.

Rollups have a table per day (minutes) or month (the others), made when their first row comes.

A partition is built beside its parent and then attached, because attaching, unlike creating it in place, does not
keep readers and writers of the parent waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise

from django.db import connection, transaction
from psycopg import sql

from controlplane.isolation import isolated_items
from controlplane.models import PeriodicTask
from telemetry.storage.rollup_columns import RESOLUTIONS_S, TABLES
from telemetry.storage.rollup_source import rolled_through

READINGS = ("telemetry_reading", "telemetry_routerreading")
DECISIONS = ("telemetry_decision",)
PARENTS = (*READINGS, *DECISIONS)
MONTHLY = frozenset(TABLES[300] + TABLES[3600] + TABLES[21_600])
DAYS_AHEAD = 2
WAITS_DAYS = 7  # beyond their time, for rollups that are behind: a disk is not filled for them
LOCK_KEY = 0x7770_7061_7274  # any number that no other advisory lock of ours has


@dataclass(frozen=True, slots=True)
class Maintenance:
    """What a run did, by table name."""

    created: list[str]
    dropped: list[str]


def maintain(
    now: datetime,
    *,
    retention_days: int,
    decisions_h: int,
    rollup_days: Mapping[int, int],
    days_ahead: int = DAYS_AHEAD,
) -> Maintenance:
    """Make the partitions of today and the days ahead, drop those that ended before the time that is kept.

    ``rollup_days`` is what is kept of each resolution. What is still to be rolled up stays, for a week at most.
    """
    today = now.astimezone(UTC).date()
    created = ensure_days(today + timedelta(days=ahead) for ahead in range(days_ahead + 1))
    oldest = (now - timedelta(hours=decisions_h)).astimezone(UTC).date()
    reached = rolled_through()
    kept_from = _first_needed(today - timedelta(days=retention_days), reached[RESOLUTIONS_S[0]])
    dropped = drop_before(kept_from, READINGS) + drop_before(oldest, DECISIONS)
    coarser = dict(pairwise(RESOLUTIONS_S))
    for resolution_s, days in rollup_days.items():
        first = today - timedelta(days=days)
        needed = _first_needed(first, reached[coarser[resolution_s]]) if resolution_s in coarser else first
        dropped += drop_before(needed, TABLES[resolution_s])
    return Maintenance(created, dropped)


def _first_needed(first_kept: date, reached: datetime | None) -> date:
    """The first day to keep where the next resolution was rolled up so far; None: not at all."""
    latest = first_kept - timedelta(days=WAITS_DAYS)
    return latest if reached is None else max(latest, min(first_kept, reached.astimezone(UTC).date()))


@transaction.atomic
def ensure_days(days: Iterable[date]) -> list[str]:
    """Make the partitions of these days where they are missing; the names of those made."""
    return _ensure(PARENTS, days)


@transaction.atomic
def ensure_rollups(resolution_s: int, start: datetime, end: datetime) -> list[str]:
    """Make the partitions that bins which end within a span need, where they are missing; the names of those made."""
    first, last = (at.astimezone(UTC).date() for at in (start, end))
    return _ensure(TABLES[resolution_s], [first + timedelta(days=day) for day in range((last - first).days + 1)])


def _ensure(parents: Sequence[str], days: Iterable[date]) -> list[str]:
    wanted = {(parent, _period(parent, day)[0]): None for day in days for parent in parents}
    if not _missing(wanted):
        return []
    with connection.cursor() as cursor:
        cursor.execute("select pg_advisory_xact_lock(%s)", [LOCK_KEY])  # two workers, one maker
    return [_create(parent, day) for parent, day in _missing(wanted)]


def _missing(wanted: Iterable[tuple[str, date]]) -> list[tuple[str, date]]:
    existing = _partitions(tuple({parent for parent, _ in wanted}))
    return [(parent, day) for parent, day in wanted if partition_name(parent, day) not in existing]


def _period(parent: str, day: date) -> tuple[date, date]:
    """The first day of a day's partition, and that of the next one."""
    if parent not in MONTHLY:
        return day, day + timedelta(days=1)
    first = day.replace(day=1)
    return first, (first + timedelta(days=31)).replace(day=1)


def drop_before(first_kept: date, parents: Sequence[str] = PARENTS) -> list[str]:
    """Drop the partitions of the days before ``first_kept``, of months when all their days are; their names.

    A table that a long query keeps stays until the next run, and only that one.
    """
    expired = [name for name, day in _partitions(parents).items() if _period(name[:-9], day)[1] <= first_kept]
    dropped: list[str] = []
    with isolated_items(PeriodicTask.PARTITIONS) as item:
        for name in expired:
            with item(name):
                _drop(name)
                dropped.append(name)
    return dropped


@transaction.atomic
def _drop(name: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute("set local lock_timeout = '2s'")
        cursor.execute(sql.SQL("drop table if exists {}").format(sql.Identifier(name)))


def partition_name(parent: str, day: date) -> str:
    """The table that holds the day, or the month that begins with it."""
    return f"{parent}_{day:%Y%m%d}"


def partitions_of(*parents: str) -> list[str]:
    """The tables of some partitioned ones, ascending."""
    with connection.cursor() as cursor:
        cursor.execute(
            "select inhrelid::regclass::text from pg_inherits where inhparent = any(%s::regclass[]) order by 1",
            [list(parents)],
        )
        return [row[0] for row in cursor.fetchall()]


def _partitions(parents: Sequence[str] = PARENTS) -> dict[str, date]:
    """Every partition, ascending, and its first day."""
    names = partitions_of(*parents)
    return {name: datetime.strptime(name[-8:], "%Y%m%d").replace(tzinfo=UTC).date() for name in names}


def _create(parent: str, day: date) -> str:
    name = partition_name(parent, day)
    start, end = (datetime.combine(at, datetime.min.time(), UTC) for at in _period(parent, day))
    with connection.cursor() as cursor:
        cursor.execute(
            sql.SQL("create table {} (like {} including all)").format(sql.Identifier(name), sql.Identifier(parent))
        )
        cursor.execute(
            sql.SQL("alter table {} attach partition {} for values from ({}) to ({})").format(
                sql.Identifier(parent), sql.Identifier(name), start.isoformat(), end.isoformat()
            )
        )
    return name
