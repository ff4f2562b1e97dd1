"""Refuses a database whose tables are not those of its recorded migrations.

Before the first release the migrations were rewritten several times. A database of an older history records the same
or other names, so Django would find nothing to do, or add to tables that are not what it believes. Migrations of a
newer release are no fault: the previous release runs with its schema, so that an upgrade can be rolled back.
"""

from __future__ import annotations

from collections.abc import Iterable

from django.db import OperationalError, connection
from django.db.migrations.loader import MigrationLoader

APPS = ("controlplane", "telemetry")
MAX_NAMED = 3  # in one sentence
TO_DO = (
    "Nothing was changed. This release cannot use or migrate it: set WARMPATH_DATABASE_URL to an empty database and "
    "run `manage.py migrate`, or go back to the release that created this one. Routers keep their configuration."
)


def schema_fault() -> str | None:
    """What is wrong with the database's history or columns, with what to do; None if nothing is, or it is empty."""
    loader = MigrationLoader(connection)
    applied = {key for key in loader.applied_migrations if key[0] in APPS}
    known = set(loader.disk_migrations)
    newest = {app: max(name for of, name in known if of == app) for app in APPS}
    unknown = sorted(f"{app}.{name}" for app, name in applied - known if name[:4] <= newest[app][:4])
    if unknown:
        return f"The database records migrations of another history of Warmpath: {_listed(unknown)}. {TO_DO}"
    missing = _missing_columns(loader, applied & known)
    if missing:
        return f"The database lacks {len(missing)} columns that its migrations create: {_listed(missing)}. {TO_DO}"
    return None


def refuse_foreign_database() -> None:
    """SystemExit with a sentence if the database is not ours; called at the start of web processes and workers.

    An unavailable database is no reason not to start: ``/readyz`` checks it later.
    """
    try:
        fault = schema_fault()
    except OperationalError:
        return
    finally:
        connection.close()
    if fault:
        raise SystemExit(fault)


def _missing_columns(loader: MigrationLoader, applied: Iterable[tuple[str, str]]) -> list[str]:
    """Columns (``table.column``) of the models at the applied migrations that the database does not have."""
    nodes = [key for key in applied if key in loader.graph.nodes]
    if not nodes:
        return []
    models = loader.project_state(nodes).apps.get_models()
    expected = {
        (model._meta.db_table, field.column)  # noqa: SLF001 - Django's documented way
        for model in models
        if model._meta.app_label in APPS  # noqa: SLF001
        for field in model._meta.concrete_fields  # noqa: SLF001
    }
    with connection.cursor() as cursor:
        cursor.execute(
            "select table_name, column_name from information_schema.columns where table_schema = current_schema()"
        )
        return sorted(f"{table}.{column}" for table, column in expected - set(cursor.fetchall()))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
