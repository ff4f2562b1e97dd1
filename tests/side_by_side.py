"""Schedules tests over several processes: what starts first, and what runs alone.

A process takes one file at a time in the order set here. First come tests that mostly wait: the live stack,
and ``FOLDERS``, each as one file so that one process owns its set-up. Tests that
measure milliseconds are marked ``@alone`` and run last, at most two at a time because they mostly wait;
file locks keep them apart from all other tests. Tests that measure seconds run beside others and scale their limits
(``tests/pace.py``). ``make test`` runs the tests of compiled modules in tests/compiled only, on the router of
``make run``.
"""

from __future__ import annotations

import ast
import fcntl
import os
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.compiled.package import ONLY_COMPILED, has_compiled_run

# They share one stack, run in this order, and count as one file.
LIVE = tuple(f"tests/end_to_end/test_{name}.py" for name in ("tour", "make_run", "killed_processes"))
FOLDERS = tuple(f"tests/{name}/" for name in ("reliability", "compiled", "end_to_end/production"))  # count as one file
FIRST = (*LIVE, *FOLDERS, "tests/end_to_end/")
TESTS = Path(__file__).parent
LOCKED = (TESTS / "conftest.py", TESTS / "side_by_side.py")  # a file to lock for each lane

alone = pytest.mark.xdist_group("alone")


class Files(LoadScopeScheduling):
    """Hands out files in collection order; LIVE and each of FOLDERS count as one file, ``@alone`` tests as another."""

    def _split_scope(self, nodeid: str) -> str:
        path, _, name = nodeid.partition("::")
        if name.partition("[")[0] in _alone_in(path):
            return f"{path} alone"
        if path in LIVE:
            return LIVE[0]
        return next((folder for folder in FOLDERS if nodeid.startswith(folder)), path)


@cache
def _alone_in(path: str) -> frozenset[str]:
    """Names of a file's ``@alone`` tests, from its source, because the scheduler sees names without marks."""
    tree = ast.parse((TESTS.parent / path).read_text())
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(
        function.name
        for function in functions
        if any(isinstance(mark, ast.Name) and mark.id == "alone" for mark in function.decorator_list)
    )


def pytest_xdist_make_scheduler(config, log) -> Files:
    return Files(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only the compiled router runs, and sort by start order; stable."""
    if ONLY_COMPILED in os.environ and "TEST_COMPILED" not in os.environ:
        left_out = {item for item in items if _runs_only_compiled(item)}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=_start_order)


def _runs_only_compiled(item: pytest.Item) -> bool:
    """Whether tests/compiled runs the test, which then does not run on the plain router."""
    path = item.nodeid.partition("::")[0]
    return has_compiled_run(path) and not wants_to_be_alone(item) and item.get_closest_marker("plain_python") is None


def _start_order(item: pytest.Item) -> int:
    if wants_to_be_alone(item):
        return len(FIRST) + 1
    return next((order for order, path in enumerate(FIRST) if item.nodeid.startswith(path)), len(FIRST))


def wants_to_be_alone(item: pytest.Item) -> bool:
    """Whether the test is marked ``@alone``."""
    return any(mark == alone.mark for mark in item.iter_markers())


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around everything, so that no test's deadline runs while it waits
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run the test under the shared or the exclusive lock."""
    if not hasattr(item.config, "workerinput"):  # this process is the only one
        return (yield)
    with _locked(item, int(item.config.workerinput["workerid"].removeprefix("gw"))):
        return (yield)


@contextmanager
def _locked(item: pytest.Item, worker: int) -> Iterator[None]:
    """Hold the worker's lane exclusively for an ``@alone`` test, and share every lane for any other test."""
    alone = wants_to_be_alone(item)
    lanes = LOCKED[worker % len(LOCKED) :][:1] if alone else LOCKED
    with ExitStack() as stack:
        for lane in lanes:
            fcntl.flock(stack.enter_context(lane.open()), fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
