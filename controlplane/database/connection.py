"""A connection that gives up on a server which says nothing.

A timeout of the server's own ends a statement that takes too long, but not one whose server is frozen, or cut off by
a network that drops what is sent. Nothing then arrives to say so, and TCP takes a frozen process for a live one. So
the client waits a moment longer than the server is allowed, closes the connection, and says that the server is away.
"""

from __future__ import annotations

from typing import Any, Self, TypeVar

from psycopg import Connection, Error, OperationalError, errors
from psycopg.abc import PQGen

RV = TypeVar("RV")
WAIT_INTERVAL_S = 0.1  # psycopg's own: how often an interrupt is looked for
# What a server says that is going down or coming up; what says nothing at all has no code.
AWAY = frozenset({"57P01", "57P02", "57P03", "53300"})


class PatientConnection(Connection[Any]):
    """Waits ``patience_s`` seconds for any one statement; None: for ever."""

    patience_s: float | None = None

    @classmethod
    def connect(cls, conninfo: str = "", **options: Any) -> Self:
        """Connect, with libpq's options and ``patience_s``; OperationalError."""
        patience_s = options.pop("patience_s", None)
        connection = super().connect(conninfo, **options)
        connection.patience_s = patience_s
        return connection

    def wait(self, gen: PQGen[RV], interval: float = WAIT_INTERVAL_S, timeout: float | None = None) -> RV:
        """Wait for the server's part of a statement; OperationalError when it says nothing for too long."""
        try:
            return super().wait(gen, interval, self.patience_s if timeout is None else timeout)
        except errors._WaitTimeout:  # noqa: SLF001 - documented as what wait() raises
            if timeout is not None:
                raise
            self.pgconn.finish()  # whatever it may still say belongs to a statement that nobody waits for
            raise OperationalError(f"the server said nothing for {self.patience_s:g} s") from None


def is_away(error: BaseException) -> bool:
    """Whether an error of Django or psycopg means that the server is away, and not that it minds what was asked."""
    found = error if isinstance(error, Error) else error.__cause__
    if found is not None and not isinstance(found, Error):
        return False
    state = getattr(found, "sqlstate", None)
    return state is None or state in AWAY or state.startswith("08")


def is_full(error: BaseException) -> bool:
    """Whether an error of Django or psycopg means that the server's disk is full: it can be read, not written."""
    found = error if isinstance(error, Error) else error.__cause__
    return isinstance(found, errors.DiskFull)
