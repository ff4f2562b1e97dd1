"""Retries of transactions that PostgreSQL aborted because of a conflict, and consistent reads of several tables.

A single lock order prevents most deadlocks; where two orders still meet, PostgreSQL aborts one transaction (40P01), as
it does with one that it cannot serialize (40001). An aborted transaction changed nothing, so it can be run again.
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
BASE_DELAY_S = 0.02  # doubled with each attempt; the delay is random, so that two transactions do not conflict again
CONFLICT_STATES = frozenset({"40001", "40P01"})  # SQLSTATE
log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


def retry_on_conflict(transaction: Callable[P, T]) -> Callable[P, T]:
    """Run a transaction again while PostgreSQL aborts it because of a conflict, at most ``ATTEMPTS`` times in all.

    Inside another transaction it runs once, because only that transaction as a whole could be retried.
    """

    @wraps(transaction)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        for attempt in range(1, ATTEMPTS):
            try:
                return transaction(*args, **kwargs)
            except OperationalError as error:
                if connection.in_atomic_block or not is_conflict(error):
                    raise
                log.info("%s was aborted by the database, attempt %s: %s", transaction.__name__, attempt, error)
            time.sleep(random.uniform(0, BASE_DELAY_S * 2**attempt))  # noqa: S311 - no secret
        return transaction(*args, **kwargs)

    return run


def is_conflict(error: BaseException) -> bool:
    """Whether an error is a deadlock or a serialization failure."""
    return getattr(error.__cause__, "sqlstate", None) in CONFLICT_STATES


@contextmanager
def repeatable_read() -> Iterator[None]:
    """Run all queries of the block on one snapshot of the database, read-only.

    Inside another transaction the block has that transaction's isolation instead.
    """
    if connection.in_atomic_block:
        yield
        return
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("set transaction isolation level repeatable read, read only")
        yield
