"""Writing readings: COPY in the ordinary case, row by row where something stands in its way."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import connection, transaction
from psycopg import errors, sql

from telemetry.models import BucketLayout
from telemetry.storage.partitions import ensure_days

Row = tuple[Any, ...]
Edges = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A table of readings, and what its rows hold."""

    name: str
    columns: tuple[str, ...]


def store_rows(table: Table, rows: Sequence[Row]) -> None:
    """Add readings; those that exist already stay as they are. A day without a table gets one."""
    if not rows:
        return
    try:
        _copy(table, rows)
    except errors.CheckViolation:  # no partition holds their time
        ensure_days({row[0].date() for row in rows})
        _insert(table, rows)
    except errors.UniqueViolation:
        _insert(table, rows)


@transaction.atomic
def _copy(table: Table, rows: Sequence[Row]) -> None:
    statement = sql.SQL("copy {} ({}) from stdin").format(sql.Identifier(table.name), _columns(table))
    with connection.cursor() as cursor, cursor.copy(statement) as copy:
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
