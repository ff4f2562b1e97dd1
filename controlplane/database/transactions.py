"""Transactions that PostgreSQL ended so that another one could go on: they are run again from their beginning.

One lock order keeps transactions from meeting in a deadlock; where two orders still meet, PostgreSQL ends one of them
(40P01), as it does with one that it cannot serialize (40001). Nothing of it was done, so it may simply be run again.

Reading several tables as they were at one moment.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

from django.db import OperationalError, connection, transaction

ATTEMPTS = 5
FIRST_PAUSE_S = 0.02  # at most, doubled each time; random, so that two that met do not meet again
ENDED = frozenset({"40001", "40P01"})
log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


def retry_when_ended(transaction: Callable[P, T]) -> Callable[P, T]:
    """Run a function that is one transaction again, at most ``ATTEMPTS`` times in all, while PostgreSQL ends it.

    Within a transaction of somebody else's it runs once: only the whole of that one could be run again.
    """

    @wraps(transaction)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        for attempt in range(1, ATTEMPTS):
            try:
                return transaction(*args, **kwargs)
            except OperationalError as error:
                if connection.in_atomic_block or not was_ended(error):
                    raise
                log.info("%s was ended by the database, attempt %s: %s", transaction.__name__, attempt, error)
            time.sleep(random.uniform(0, FIRST_PAUSE_S * 2**attempt))  # noqa: S311 - no secret
        return transaction(*args, **kwargs)

    return run


def was_ended(error: BaseException) -> bool:
    """Whether this is a deadlock, or a failure to serialize."""
    return getattr(error.__cause__, "sqlstate", None) in ENDED


@contextmanager
def repeatable_read() -> Iterator[None]:
    """Within the block all queries see what was committed when the first was asked; nothing can be written.

    Within somebody's transaction they see what that sees.
    """
    if connection.in_atomic_block:
        yield
        return
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("set transaction isolation level repeatable read, read only")
        yield
