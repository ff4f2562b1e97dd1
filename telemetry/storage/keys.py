"""Another primary key for a partitioned table while everything writes to it: an operation for migrations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, LiteralString

from django.db import models, transaction
from django.db.migrations.operations.base import Operation
from psycopg import sql

from telemetry.storage.partitions import partitions_of


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
