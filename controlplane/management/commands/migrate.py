"""``manage.py migrate``: Django's command, run as the database's owner if one is set, and safe while the site serves.

A statement that waits for a table's lock blocks every later user of the table. So a migration waits at most one second
for a lock, then gives up, pauses and retries. Migrations hold locks only briefly, which a test of the migrations
verifies. Statements themselves have no time limit, because an index of many rows takes long. Between statements a slow
machine may compute for ``IDLE_TIMEOUT_S``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from django.core.management.base import CommandError
from django.core.management.commands import migrate
from django.db import OperationalError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg import errors

from controlplane.database.roles import grant_application, owner_connection
from controlplane.database.schema_check import schema_fault

LOCK_TIMEOUT_S = 1
IDLE_TIMEOUT_S = 60
ATTEMPTS = 30
PAUSE_S = 2.0  # lets queries continue that waited behind the migration


class Command(migrate.Command):
    """Migrate, then grant the application's role access to the tables."""

    def handle(self, *args: Any, **options: Any) -> None:
        """Migrate as the owner in ``WARMPATH_DATABASE_OWNER_URL``. OperationalError if a lock is held for a minute.

        CommandError, before anything is changed, for a database of another history.
        """
        with owner_connection() as application:
            if fault := schema_fault():
                raise CommandError(fault)
            self._migrate(*args, **options)
            if application:
                grant_application(application)

    def _migrate(self, *args: Any, **options: Any) -> None:
        for remaining in reversed(range(ATTEMPTS)):
            try:
                with migration_timeouts(connections[options["database"]]):
                    super().handle(*args, **options)
            except OperationalError as error:
                if not isinstance(error.__cause__, errors.LockNotAvailable) or not remaining:
                    raise
                self.stderr.write("A table is in use; trying again.")
                time.sleep(PAUSE_S)
            else:
                return


@contextlib.contextmanager
def migration_timeouts(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """Set no time limit for statements, ``LOCK_TIMEOUT_S`` for locks and ``IDLE_TIMEOUT_S`` between statements."""
    connection.ensure_connection()
    response_timeout_s, connection.connection.response_timeout_s = connection.connection.response_timeout_s, None
    _set_timeouts(connection, "0", f"{LOCK_TIMEOUT_S}s", f"{IDLE_TIMEOUT_S}s")
    try:
        yield
    finally:
        if connection.is_usable():
            _set_timeouts(connection, "default", "default", "default")
            connection.connection.response_timeout_s = response_timeout_s
        else:
            connection.close()


def _set_timeouts(connection: BaseDatabaseWrapper, *values: str) -> None:
    names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
    with connection.cursor() as cursor:
        for name, value in zip(names, values, strict=True):
            cursor.execute(f"set {name} to {value if value == 'default' else repr(value)}")
