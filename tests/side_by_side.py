"""How tests share a machine when several processes run them: what goes first, and what wants to be alone.

A process takes one file at a time, in the order made here. First comes what mostly waits while the others work: the
live stack, and the stands of ``tests/reliability``, which are one file to the scheduler, so that one process has them
one after the other. What measures milliseconds is marked ``@alone`` and goes last, all of it in one process. A lock
keeps what the others still have to finish away from it: every test holds it with the rest, or for itself if it wants
to be alone. What measures seconds runs beside the others, and gives itself the time that a busy machine takes.
"""

from __future__ import annotations

import fcntl
from collections.abc import Generator
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

STANDS = "tests/reliability/"
FIRST = ("tests/end_to_end/test_make_run.py", STANDS, "tests/end_to_end/")

alone = pytest.mark.xdist_group("alone")  # ends the test's name for the scheduler: ``...::test_it@alone``


class Files(LoadScopeScheduling):
    """Hand out whole files in the order of collection, the stands as one, and what wants to be alone as one more."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.endswith("@alone"):
            return "alone"
        return STANDS if nodeid.startswith(STANDS) else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config, log) -> Files:
    return Files(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by turn; among equals everything stays as it was."""
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    if wants_to_be_alone(item):
        return len(FIRST) + 1
    return next((turn for turn, path in enumerate(FIRST) if item.nodeid.startswith(path)), len(FIRST))


def wants_to_be_alone(item: pytest.Item) -> bool:
    """Whether it measures something that other tests would disturb."""
    return any(mark == alone.mark for mark in item.iter_markers())


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around everything, so that no test's deadline runs while it waits
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test beside the others, or when they have ended."""
    if not hasattr(item.config, "workerinput"):  # this process is the only one
        return (yield)
    with (Path(__file__).parent / "conftest.py").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if wants_to_be_alone(item) else fcntl.LOCK_SH)
        return (yield)
