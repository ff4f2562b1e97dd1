"""Work in threads beside a test, each with a connection of its own."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from django.db import connection

from controlplane.errors import ControlPlaneError


def at_once(*works):
    """Run each in a thread with a connection of its own; what each returned, or the refusal that it raised."""

    def run(work):
        try:
            return work()
        except ControlPlaneError as refusal:
            return refusal
        finally:
            connection.close()

    with ThreadPoolExecutor(len(works)) as threads:
        return [done.result(timeout=20) for done in [threads.submit(run, work) for work in works]]


@contextmanager
def in_thread(work):
    """Run work beside the test, with a connection of its own; what it raises is raised at the end."""
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
    thread.join(timeout=20)
    assert not thread.is_alive()
    if failures:
        raise failures[0]
