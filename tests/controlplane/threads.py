"""Threads with their own database connections."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from django.db import connection

from controlplane.errors import ControlPlaneError
from controlplane.services.snapshots import NUMBERING_LOCK
from tests.conftest import wait_until

AWAITED_S = 20


def at_once(*functions):
    """Run each function in a thread with its own connection; the results, or ControlPlaneErrors."""

    def run(function):
        try:
            return function()
        except ControlPlaneError as error:
            return error
        finally:
            connection.close()

    with ThreadPoolExecutor(len(functions)) as threads:
        futures = [threads.submit(run, function) for function in functions]
        return [future.result(timeout=AWAITED_S) for future in futures]


def at_once_at_lock(*functions):
    """As ``at_once``, but every thread waits for the lock of configuration numbers before one gets it."""
    with connection.cursor() as cursor, ThreadPoolExecutor(1) as background:
        cursor.execute("select pg_advisory_lock(%s)", [NUMBERING_LOCK])
        try:
            future = background.submit(at_once, *functions)
            wait_until(lambda: len(waiting()) == len(functions) or future.done(), AWAITED_S, "all threads to wait")
        finally:
            cursor.execute("select pg_advisory_unlock(%s)", [NUMBERING_LOCK])
        return future.result(timeout=AWAITED_S)


def waiting():
    """Connections that wait for a lock."""
    with connection.cursor() as cursor:
        cursor.execute("select pg_stat_clear_snapshot()")  # a transaction otherwise reads its first result again
        cursor.execute(
            "select pid from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
        )
        return cursor.fetchall()


@contextmanager
def in_thread(function):
    """Run a function in a thread with its own connection; its exception is raised at the end."""
    failures = []

    def run():
        try:
            function()
        except Exception as error:  # noqa: BLE001 - raised again below
            failures.append(error)
        finally:
            connection.close()

    thread = threading.Thread(target=run)
    thread.start()
    yield thread
    thread.join(timeout=AWAITED_S)
    assert not thread.is_alive()
    if failures:
        raise failures[0]
