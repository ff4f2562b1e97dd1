"""``manage.py migrate``: Django's, as the owner of the database where there is one, and while everything serves.

Who asks for a lock on a table makes everybody wait who comes after, for as long as whoever has the table goes on. So a
migration asks for one second, steps back, and tries again; what it does once it has the lock is short, which a test of
the migrations holds us to. A statement itself may take as long as it takes: an index of many rows does.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from django.core.management.commands import migrate
from django.db import OperationalError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg import errors

from controlplane.database.roles import grant_application, owner_connection

LOCK_S = 1
TRIES = 30
PAUSE_S = 2.0  # between two, in which those who waited go on


class Command(migrate.Command):
    """Migrate, and give the application's role what it needs of what is there then."""

    def handle(self, *args: Any, **options: Any) -> None:
        """As Django's; the owner is named by ``WARMPATH_DATABASE_OWNER_URL``.

        OperationalError when a lock could not be had for a minute.
        """
        with owner_connection() as application:
            self._migrate(*args, **options)
            if application:
                grant_application(application)

    def _migrate(self, *args: Any, **options: Any) -> None:
        for left in reversed(range(TRIES)):
            try:
                with unhurried(connections[options["database"]]):
                    super().handle(*args, **options)
            except OperationalError as error:
                if not isinstance(error.__cause__, errors.LockNotAvailable) or not left:
                    raise
                self.stderr.write("A table is in use; trying again.")
                time.sleep(PAUSE_S)
            else:
                return


@contextlib.contextmanager
def unhurried(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """No time limit for statements, and one second for locks."""
    connection.ensure_connection()
    response_timeout_s, connection.connection.response_timeout_s = connection.connection.response_timeout_s, None
    _set(connection, statement="0", lock=f"{LOCK_S}s")
    try:
        yield
    finally:
        if connection.is_usable():
            _set(connection, statement="default", lock="default")
            connection.connection.response_timeout_s = response_timeout_s
        else:
            connection.close()


def _set(connection: BaseDatabaseWrapper, *, statement: str, lock: str) -> None:
    with connection.cursor() as cursor:
        for name, value in (("statement_timeout", statement), ("lock_timeout", lock)):
            cursor.execute(f"set {name} to {value if value == 'default' else repr(value)}")
