"""Writes readings and decisions: COPY, or row by row where a partition is missing or a row exists already."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import IntegrityError, connection, transaction
from psycopg import errors, sql

from telemetry.models import BucketLayout
from telemetry.storage.partitions import ensure_days
from telemetry.storage.rollup import mark_late

Row = tuple[Any, ...]
Edges = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A table, and the columns of its rows; the first one is the time."""

    name: str
    columns: tuple[str, ...]


@transaction.atomic
def store_rows(table: Table, rows: Sequence[Row]) -> None:
    """Insert rows; those that exist already stay as they are. A missing partition is created.

    Rollups of minutes that were closed already are re-aggregated.
    """
    if not rows:
        return
    mark_late({row[0] for row in rows})
    try:
        _copy(table, rows)
    except IntegrityError as error:
        if isinstance(error.__cause__, errors.CheckViolation):  # there is no partition for their time
            ensure_days({row[0].date() for row in rows})
        elif not isinstance(error.__cause__, errors.UniqueViolation):
            raise
        _insert(table, rows)


@transaction.atomic
def _copy(table: Table, rows: Sequence[Row]) -> None:
    statement = sql.SQL("copy {} ({}) from stdin").format(sql.Identifier(table.name), _columns(table))
    # Django converts psycopg's errors where it runs a statement itself, which it does not for COPY.
    with connection.cursor() as cursor, connection.wrap_database_errors, cursor.copy(statement) as copy:
        for row in rows:
            copy.write_row(row)


@transaction.atomic
def _insert(table: Table, rows: Sequence[Row]) -> None:
    statement = sql.SQL("insert into {} ({}) values ({}) on conflict do nothing").format(
        sql.Identifier(table.name), _columns(table), sql.SQL(", ").join([sql.Placeholder()] * len(table.columns))
    )
    with connection.cursor() as cursor:
        cursor.executemany(statement, rows)


def _columns(table: Table) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, table.columns))


def layout_ids(layouts: Iterable[Edges]) -> dict[Edges, int]:
    """The ids of histogram layouts, which are created if they are new. One query if none is."""
    digests = {hashlib.sha256(",".join(map(repr, edges)).encode()).hexdigest(): edges for edges in layouts}
    existing = BucketLayout.objects.filter(digest__in=digests).values_list("digest", "pk")
    if len(existing) < len(digests):
        created = [BucketLayout(edges=list(edges), digest=digest) for digest, edges in digests.items()]
        BucketLayout.objects.bulk_create(created, ignore_conflicts=True)
        existing = existing.all()
    return {digests[digest]: pk for digest, pk in existing}
