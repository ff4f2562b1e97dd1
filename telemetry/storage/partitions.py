"""One table per day of readings, and of decisions: made ahead, dropped when their time is over. A day is a UTC day.

Rollups have a table per day (minutes) or month (the others), made when their first row comes.

A partition is built beside its parent and then attached, because attaching, unlike creating it in place, does not
keep readers and writers of the parent waiting.

Another primary key for a partitioned table while everything writes to it: an operation for migrations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from typing import Any, LiteralString

from django.db import connection, models, transaction
from django.db.migrations.operations.base import Operation
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


class ReplaceKey(Operation):
    """Replace a table's primary key. For a migration with ``atomic = False``; may be run again.

    The index of each partition is built beside writers; then the keys change places, which reads no row. A partition
    that was made meanwhile holds little and gets its index there. Backwards, rows that the old key cannot tell apart
    from another go: they are those whose new columns are not empty.
    """

    reversible = True

    def __init__(self, model_name: str, *, before: Sequence[str], after: Sequence[str]) -> None:
        self.model_name = model_name
        self.before = tuple(before)
        self.after = tuple(after)

    def state_forwards(self, app_label: str, state: Any) -> None:
        """The model has the new key."""
        fields = state.models[app_label, self.model_name.lower()].fields
        fields["pk"] = models.CompositePrimaryKey(
            *self.after, blank=True, editable=False, primary_key=True, serialize=False
        )
        state.reload_model(app_label, self.model_name.lower())

    def database_forwards(self, app_label: str, schema_editor: Any, *_states: Any) -> None:
        """Build the indexes of the new key, and change."""
        _replace(schema_editor.connection, f"{app_label}_{self.model_name}", self.after)

    def database_backwards(self, app_label: str, schema_editor: Any, *_states: Any) -> None:
        """Let go of the rows that only the new key tells apart, and change back."""
        table = f"{app_label}_{self.model_name}"
        new = [name for name in self.after if name not in self.before]
        condition = sql.SQL(" or ").join(sql.SQL("{} <> ''").format(sql.Identifier(name)) for name in new)
        with schema_editor.connection.cursor() as cursor:
            cursor.execute(sql.SQL("delete from {} where {}").format(sql.Identifier(table), condition))
        _replace(schema_editor.connection, table, self.before)

    def describe(self) -> str:
        """As ``migrate`` prints it."""
        return f"Replace the primary key of {self.model_name}"


def _replace(connection: Any, table: str, columns: Sequence[str]) -> None:
    key = sql.SQL(", ").join(map(sql.Identifier, columns))
    prepared = {partition: f"{partition}_next" for partition in partitions_of(table)}
    with connection.cursor() as cursor:
        for partition, index in prepared.items():
            cursor.execute(sql.SQL("drop index concurrently if exists {}").format(sql.Identifier(index)))
            cursor.execute(
                sql.SQL("create unique index concurrently {} on {} ({})").format(
                    sql.Identifier(index), sql.Identifier(partition), key
                )
            )
    with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
        cursor.execute(sql.SQL("lock table {} in access exclusive mode").format(sql.Identifier(table)))
        cursor.execute(_sql("alter table {} drop constraint {}", table, f"{table}_pkey"))
        cursor.execute(sql.SQL("alter table only {} add primary key ({})").format(sql.Identifier(table), key))
        for partition in partitions_of(table):
            _attach(cursor, table, partition, prepared.get(partition), key)


def _attach(cursor: Any, table: str, partition: str, index: str | None, key: sql.Composable) -> None:
    """Make a partition's index its primary key, and a part of its table's."""
    name = f"{partition}_pkey"
    if index is None:
        statement = sql.SQL("alter table {} add constraint {} primary key ({})").format(
            sql.Identifier(partition), sql.Identifier(name), key
        )
    else:
        statement = _sql("alter table {} add constraint {} primary key using index {}", partition, name, index)
    cursor.execute(statement)
    cursor.execute(_sql("alter index {} attach partition {}", f"{table}_pkey", name))


def _sql(statement: LiteralString, *names: str) -> sql.Composed:
    return sql.SQL(statement).format(*map(sql.Identifier, names))
