"""Writing readings: COPY in the ordinary case, row by row where something stands in its way."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import IntegrityError, connection, transaction
from psycopg import errors, sql

from telemetry.models import BucketLayout
from telemetry.storage.partitions import ensure_days
from telemetry.storage.rollup_source import mark_late

Row = tuple[Any, ...]
Edges = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A table of readings, and what its rows hold."""

    name: str
    columns: tuple[str, ...]


@transaction.atomic
def store_rows(table: Table, rows: Sequence[Row]) -> None:
    """Add readings; those that exist already stay as they are. A day without a table gets one.

    Rollups that lack them are made anew.
    """
    if not rows:
        return
    mark_late({row[0] for row in rows})
    try:
        _copy(table, rows)
    except IntegrityError as error:
        if isinstance(error.__cause__, errors.CheckViolation):  # no partition holds their time
            ensure_days({row[0].date() for row in rows})
        elif not isinstance(error.__cause__, errors.UniqueViolation):
            raise
        _insert(table, rows)


@transaction.atomic
def _copy(table: Table, rows: Sequence[Row]) -> None:
    statement = sql.SQL("copy {} ({}) from stdin").format(sql.Identifier(table.name), _columns(table))
    # Django turns psycopg's errors into its own where it runs a statement, and does not see what a COPY says.
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


def layout_ids(wanted: Iterable[Edges]) -> dict[Edges, int]:
    """The ids of these layouts, new ones made. One query where all are known."""
    digests = {_digest(edges): edges for edges in wanted}
    known = _known(digests)
    if len(known) < len(digests):
        missing = [BucketLayout(edges=list(edges), digest=digest) for digest, edges in digests.items()]
        BucketLayout.objects.bulk_create(missing, ignore_conflicts=True)
        known = _known(digests)
    return {digests[digest]: pk for digest, pk in known.items()}


def _known(digests: Iterable[str]) -> dict[str, int]:
    return dict(BucketLayout.objects.filter(digest__in=digests).values_list("digest", "pk"))


def _digest(edges: Edges) -> str:
    return hashlib.sha256(",".join(map(repr, edges)).encode()).hexdigest()
