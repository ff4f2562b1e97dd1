"""Operations for migrations that run while everything serves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.contrib.postgres.operations import AddIndexConcurrently, NotInTransactionMixin
from django.db import migrations


class BuildIndex(AddIndexConcurrently):
    """``AddIndexConcurrently`` that may be run again. For a migration with ``atomic = False``.

    It waits for transactions that began before it, and keeps nobody waiting meanwhile, so it has all the time it needs.
    One that was cut short leaves an index that is of no use and in the way; it goes first.
    """

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Drop what a former try left, and build."""
        with _patiently(schema_editor, self.index.name):
            super().database_forwards(app_label, schema_editor, from_state, to_state)


class AddFieldOnce(migrations.AddField):
    """``AddField`` that may be run again, for a migration with ``atomic = False`` that was cut short after it."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Add the column where it is not there yet."""
        meta = to_state.apps.get_model(app_label, self.model_name)._meta  # noqa: SLF001 - as Django's own
        with schema_editor.connection.cursor() as cursor:
            columns = schema_editor.connection.introspection.get_table_description(cursor, meta.db_table)
        if meta.get_field(self.name).column not in {column.name for column in columns}:
            super().database_forwards(app_label, schema_editor, from_state, to_state)


class BuildUnique(NotInTransactionMixin, migrations.AddConstraint):
    """A ``UniqueConstraint`` whose index is built as ``BuildIndex`` builds one."""

    model_name: str
    constraint: Any  # a UniqueConstraint of plain fields

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:  # noqa: ARG002 - Django's own signature
        """Build the index and, where the constraint has no condition, make it the constraint's own."""
        self._ensure_not_in_transaction(schema_editor)
        model = to_state.apps.get_model(app_label, self.model_name)
        if not self.allow_migrate_model(schema_editor.connection.alias, model):
            return
        table, name = (schema_editor.quote_name(text) for text in (model._meta.db_table, self.constraint.name))  # noqa: SLF001 - as Django's own
        fields = [model._meta.get_field(field).column for field in self.constraint.fields]  # noqa: SLF001 - as above
        columns = ", ".join(schema_editor.quote_name(column) for column in fields)
        condition = self.constraint._get_condition_sql(model, schema_editor)  # noqa: SLF001 - as Django's own
        where = f" where {condition}" if condition else ""
        with _patiently(schema_editor, self.constraint.name):
            schema_editor.execute(f"create unique index concurrently {name} on {table} ({columns}){where}")
        if not condition:
            schema_editor.execute(f"alter table {table} add constraint {name} unique using index {name}")


@contextmanager
def _patiently(schema_editor: Any, index: str) -> Iterator[None]:
    """Drop what a former try left, and let a building take its time."""
    with schema_editor.connection.cursor() as cursor:
        cursor.execute("select current_setting('lock_timeout')")
        (before,) = cursor.fetchone()
        cursor.execute("set lock_timeout to 0")
        cursor.execute(f"drop index concurrently if exists {schema_editor.quote_name(index)}")
    try:
        yield
    finally:
        with schema_editor.connection.cursor() as cursor:
            cursor.execute("select set_config('lock_timeout', %s, false)", [before])
