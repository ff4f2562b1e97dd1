"""Partitions by time: a table per UTC day of readings and decisions, created ahead and dropped after their retention.

Rollups have a table per day (minutes) or month (coarser ones), created with their first row. A partition is created as
a table of its own and then attached: attaching, unlike creating it in place, does not block readers and writers.
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
from telemetry.storage.locks import PARTITIONS
from telemetry.storage.rollup_tables import RESOLUTIONS_S, TABLES, rolled_through

READINGS = ("telemetry_reading", "telemetry_routerreading")
DECISIONS = ("telemetry_decision",)
PARENTS = (*READINGS, *DECISIONS)
MONTHLY = frozenset(TABLES[300] + TABLES[3600] + TABLES[21_600])
DAYS_AHEAD = 2
MAX_OVERDUE_DAYS = 7  # longest extra retention for rollups that are behind, so that the disk does not fill up


@dataclass(frozen=True, slots=True)
class Maintenance:
    """The tables that a run created and dropped."""

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
    """Create the partitions of today and the days ahead, and drop those beyond their retention.

    ``rollup_days`` is the retention by resolution. Data that is not rolled up yet stays, for a week at most.
    """
    today = now.astimezone(UTC).date()
    created = ensure_days(today + timedelta(days=ahead) for ahead in range(days_ahead + 1))
    oldest = (now - timedelta(hours=decisions_h)).astimezone(UTC).date()
    reached = rolled_through()
    retained_from = _first_needed(today - timedelta(days=retention_days), reached[RESOLUTIONS_S[0]])
    dropped = drop_before(retained_from, READINGS) + drop_before(oldest, DECISIONS)
    coarser = dict(pairwise(RESOLUTIONS_S))
    for resolution_s, days in rollup_days.items():
        first = today - timedelta(days=days)
        needed = _first_needed(first, reached[coarser[resolution_s]]) if resolution_s in coarser else first
        dropped += drop_before(needed, TABLES[resolution_s])
    return Maintenance(created, dropped)


def _first_needed(first_retained: date, reached: datetime | None) -> date:
    """The first day to retain; ``reached``: how far the next resolution is rolled up, None: not at all."""
    earliest = first_retained - timedelta(days=MAX_OVERDUE_DAYS)
    return earliest if reached is None else max(earliest, min(first_retained, reached.astimezone(UTC).date()))


@transaction.atomic
def ensure_days(days: Iterable[date]) -> list[str]:
    """Create the missing partitions of these days; their names."""
    return _ensure(PARENTS, days)


@transaction.atomic
def ensure_rollups(resolution_s: int, start: datetime, end: datetime) -> list[str]:
    """Create the missing partitions for bins that end between two times; their names."""
    first, last = (at.astimezone(UTC).date() for at in (start, end))
    return _ensure(TABLES[resolution_s], [first + timedelta(days=day) for day in range((last - first).days + 1)])


def _ensure(parents: Sequence[str], days: Iterable[date]) -> list[str]:
    needed: dict[str, tuple[str, date]] = {}
    for day in days:
        for parent in parents:
            first, _ = _period(parent, day)
            needed[partition_name(parent, first)] = (parent, first)
    if needed.keys() <= set(partitions_of(*parents)):
        return []
    with connection.cursor() as cursor:
        cursor.execute("select pg_advisory_xact_lock(%s)", [PARTITIONS])  # one worker at a time
    existing = set(partitions_of(*parents))
    created = [name for name in needed if name not in existing]
    for name in created:
        _create(name, *needed[name])
    return created


def _period(parent: str, day: date) -> tuple[date, date]:
    """The first day of a day's partition, and that of the next one."""
    if parent not in MONTHLY:
        return day, day + timedelta(days=1)
    first = day.replace(day=1)
    return first, (first + timedelta(days=31)).replace(day=1)


def drop_before(first_retained: date, parents: Sequence[str] = PARENTS) -> list[str]:
    """Drop the partitions that end before ``first_retained``; their names.

    A table that a long query holds locked stays until the next run.
    """
    names = partitions_of(*parents)
    expired = [name for name in names if _period(name[:-9], _first_day(name))[1] <= first_retained]
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
    """The table of a day, or of the month that begins with it."""
    return f"{parent}_{day:%Y%m%d}"


def _first_day(name: str) -> date:
    return datetime.strptime(name[-8:], "%Y%m%d").replace(tzinfo=UTC).date()


def partitions_of(*parents: str) -> list[str]:
    """The partitions of some tables, ascending."""
    with connection.cursor() as cursor:
        cursor.execute(
            "select inhrelid::regclass::text from pg_inherits where inhparent = any(%s::regclass[]) order by 1",
            [list(parents)],
        )
        return [row[0] for row in cursor.fetchall()]


def _create(name: str, parent: str, day: date) -> None:
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
