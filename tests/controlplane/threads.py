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


def at_once(*works):
    """Run each function in a thread with its own connection; the results, or ControlPlaneErrors."""

    def run(work):
        try:
            return work()
        except ControlPlaneError as refusal:
            return refusal
        finally:
            connection.close()

    with ThreadPoolExecutor(len(works)) as threads:
        return [done.result(timeout=AWAITED_S) for done in [threads.submit(run, work) for work in works]]


def at_one_turn(*works):
    """As ``at_once``, with all waiting for the lock of configuration numbers before any gets it."""
    with connection.cursor() as cursor, ThreadPoolExecutor(1) as beside:
        cursor.execute("select pg_advisory_lock(%s)", [NUMBERING_LOCK])
        try:
            done = beside.submit(at_once, *works)
            wait_until(lambda: len(waiting()) == len(works) or done.done(), AWAITED_S, "all of them to wait their turn")
        finally:
            cursor.execute("select pg_advisory_unlock(%s)", [NUMBERING_LOCK])
        return done.result(timeout=AWAITED_S)


def waiting():
    """Connections that wait for a lock."""
    with connection.cursor() as cursor:
        cursor.execute("select pg_stat_clear_snapshot()")  # else a transaction sees what it saw first
        cursor.execute(
            "select pid from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
        )
        return cursor.fetchall()


@contextmanager
def in_thread(work):
    """Run a function in a thread with its own connection; its exception is raised at the end."""
    failures = []

    def run():
        try:
            work()
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
