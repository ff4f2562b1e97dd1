"""Django's PostgreSQL backend with connections that give up on an unresponsive server; ``ENGINE`` names this package.

The server's own timeout ends a slow statement, but not one whose server is frozen or cut off by a network that drops
packets: no message arrives then, and TCP considers a frozen process alive. So the client waits slightly longer than the
server's timeout, closes the connection and reports that the server is unavailable.
"""

from __future__ import annotations

from typing import Any, Self, TypeVar

from django.db.backends.postgresql import base
from psycopg import Connection, Error, IsolationLevel, OperationalError, errors
from psycopg.abc import PQGen

RV = TypeVar("RV")
WAIT_INTERVAL_S = 0.1  # psycopg's default: how often it checks for an interrupt
UNAVAILABLE_STATES = frozenset({"57P01", "57P02", "57P03", "53300"})  # SQLSTATE: server stops, starts or is full


class TimeoutConnection(Connection[Any]):
    """Waits at most ``response_timeout_s`` seconds for any one statement; None: without limit."""

    response_timeout_s: float | None = None

    @classmethod
    def connect(cls, conninfo: str = "", **options: Any) -> Self:
        """Connect, with libpq's options and ``response_timeout_s``; OperationalError."""
        timeout_s = options.pop("response_timeout_s", None)
        connection = super().connect(conninfo, **options)
        connection.response_timeout_s = timeout_s
        return connection

    def wait(self, gen: PQGen[RV], interval: float = WAIT_INTERVAL_S, timeout: float | None = None) -> RV:
        """Wait for the server's response to a statement; OperationalError after the timeout."""
        try:
            return super().wait(gen, interval, self.response_timeout_s if timeout is None else timeout)
        except errors._WaitTimeout:  # noqa: SLF001 - documented as what wait() raises
            if timeout is not None:
                raise
            self.pgconn.finish()  # a late response would belong to an abandoned statement
            raise OperationalError(f"no response from the server within {self.response_timeout_s:g} s") from None


class DatabaseWrapper(base.DatabaseWrapper):
    """Django's backend, with ``TimeoutConnection``."""

    def get_new_connection(self, conn_params: dict[str, Any]) -> Any:
        """A connection from the pool, whose settings name the class, or a new one if there is no pool."""
        if self.settings_dict["OPTIONS"].get("pool"):
            return super().get_new_connection(conn_params)
        self.isolation_level = IsolationLevel.READ_COMMITTED
        return TimeoutConnection.connect(**conn_params)


def is_unavailable(error: BaseException) -> bool:
    """Whether an error of Django or psycopg means that the server is unavailable, rather than a failed statement."""
    cause = error if isinstance(error, Error) else error.__cause__
    if cause is not None and not isinstance(cause, Error):
        return False
    state = getattr(cause, "sqlstate", None)
    return state is None or state in UNAVAILABLE_STATES or state.startswith("08")


def is_disk_full(error: BaseException) -> bool:
    """Whether an error of Django or psycopg means that the server's disk is full: reads work, writes fail."""
    cause = error if isinstance(error, Error) else error.__cause__
    return isinstance(cause, errors.DiskFull)
