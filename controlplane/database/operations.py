"""Operations for migrations that run while everything serves."""

from __future__ import annotations

from typing import Any

from django.contrib.postgres.operations import AddIndexConcurrently


class BuildIndex(AddIndexConcurrently):
    """``AddIndexConcurrently`` that may be run again. For a migration with ``atomic = False``.

    It waits for transactions that began before it, and keeps nobody waiting meanwhile, so it has all the time it needs.
    One that was cut short leaves an index that is of no use and in the way; it goes first.
    """

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Drop what a former try left, and build."""
        with schema_editor.connection.cursor() as cursor:
            cursor.execute("select current_setting('lock_timeout')")
            (before,) = cursor.fetchone()
            cursor.execute("set lock_timeout to 0")
            cursor.execute(f"drop index concurrently if exists {schema_editor.quote_name(self.index.name)}")
        try:
            super().database_forwards(app_label, schema_editor, from_state, to_state)
        finally:
            with schema_editor.connection.cursor() as cursor:
                cursor.execute("select set_config('lock_timeout', %s, false)", [before])
