"""Threads with their own database connections."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from django.db import connection

from controlplane.errors import ControlPlaneError
from controlplane.services.snapshots import NUMBERING_LOCK
from tests.conftest import wait_until

TIMEOUT_S = 20


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
        return [done.result(timeout=TIMEOUT_S) for done in [threads.submit(run, function) for function in functions]]


def contend_for_numbering_lock(*functions):
    """As ``at_once``, but all wait for the lock of configuration numbers before any gets it."""
    with connection.cursor() as cursor, ThreadPoolExecutor(1) as executor:
        cursor.execute("select pg_advisory_lock(%s)", [NUMBERING_LOCK])
        try:
            done = executor.submit(at_once, *functions)
            wait_until(lambda: len(waiting()) == len(functions) or done.done(), TIMEOUT_S, "all to wait for the lock")
        finally:
            cursor.execute("select pg_advisory_unlock(%s)", [NUMBERING_LOCK])
        return done.result(timeout=TIMEOUT_S)


def waiting():
    """Connections that wait for a lock."""
    with connection.cursor() as cursor:
        cursor.execute("select pg_stat_clear_snapshot()")  # otherwise a transaction sees its first snapshot
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
    thread.join(timeout=TIMEOUT_S)
    assert not thread.is_alive()
    if failures:
        raise failures[0]
