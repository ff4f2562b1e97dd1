"""How tests share a machine when several processes run them: what goes first, and what wants to be alone.

A process takes one file at a time, in the order made here. First comes what mostly waits while the others work: the
live stack, the stands of ``tests/reliability``, and the compiled router of ``tests/compiled``. Each of these folders is
one file to the scheduler, so that one process has what it sets up. What measures milliseconds is marked ``@alone`` and
goes last, all of it in one process. A lock keeps what the others still have to finish away from it: every test holds it
with the rest, or for itself if it wants to be alone. What measures seconds runs beside the others, and gives itself the
time that a busy machine takes.
"""

from __future__ import annotations

import ast
import fcntl
from collections.abc import Generator
from functools import cache
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

STANDS = "tests/reliability/"
COMPILED = "tests/compiled/"
FIRST = ("tests/end_to_end/test_make_run.py", STANDS, COMPILED, "tests/end_to_end/")

alone = pytest.mark.xdist_group("alone")


class Files(LoadScopeScheduling):
    """Hand out whole files in the order of collection, two folders as one each, and what wants to be alone as one."""

    def _split_scope(self, nodeid: str) -> str:
        path, _, name = nodeid.partition("::")
        if name.partition("[")[0] in _alone_in(path):
            return "alone"
        return next((folder for folder in (STANDS, COMPILED) if nodeid.startswith(folder)), path)


@cache
def _alone_in(path: str) -> frozenset[str]:
    """The tests of a file that are marked ``@alone``, by its source: the scheduler is told names and no marks."""
    tree = ast.parse((Path(__file__).parents[1] / path).read_text())
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(
        function.name
        for function in functions
        if any(isinstance(mark, ast.Name) and mark.id == "alone" for mark in function.decorator_list)
    )


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
