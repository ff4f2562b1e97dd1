"""Refuses a database whose tables are not those of its recorded migrations.

Before the first release the migrations were rewritten several times. A database of an older history records the same
or other names, so Django would find nothing to do, or add to tables that are not what it believes. A database with
all migrations that the first ones replace is up to date. Migrations of a newer release are no fault: the previous
release runs with its schema, so that an upgrade can be rolled back.
"""

from __future__ import annotations

from collections.abc import Iterable

from django.db import OperationalError, connection
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder

APPS = ("controlplane", "telemetry")
MAX_NAMED = 3  # in one sentence
TO_DO = (
    "Nothing was changed. This release cannot use or migrate it: set WARMPATH_DATABASE_URL to an empty database and "
    "run `manage.py migrate`, or go back to the release that created this one. Routers keep their configuration."
)


def schema_fault() -> str | None:
    """What is wrong with the database's history or columns, with what to do; None if nothing is, or it is empty."""
    ours = {key: migration for key, migration in MigrationLoader(None).disk_migrations.items() if key[0] in APPS}
    applied = {key for key in MigrationRecorder(connection).applied_migrations() if key[0] in APPS}
    for key, migration in ours.items():
        if migration.replaces and applied.issuperset(migration.replaces):
            applied = applied.difference(migration.replaces) | {key}
    names = {app: sorted(name for of, name in ours if of == app) for app in APPS}
    unknown = sorted(
        f"{app}.{name}"
        for app, name in applied.difference(ours)
        if name[:4] <= names[app][-1][:4] or (app, names[app][0]) not in applied
    )
    if unknown:
        return f"The database records migrations of another history of Warmpath: {_listed(unknown)}. {TO_DO}"
    missing = _missing_columns(applied & ours.keys())
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


def _missing_columns(applied: Iterable[tuple[str, str]]) -> list[str]:
    """Columns (``table.column``) of the models at the applied migrations that the database does not have."""
    loader, nodes = MigrationLoader(None), list(applied)
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
