"""Who runs on which core: a proxy's latency is its own only while nobody else takes its time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def can_be_split() -> bool:
    """Whether there is a core for one and another for the rest."""
    return len(os.sched_getaffinity(0)) > 1


@contextmanager
def core_of_its_own(timed: Iterable[int], others: Iterable[int]) -> Iterator[None]:
    """Give the processes that are timed one core, and all else that takes part the others; take it back at the end.

    This process, and what it starts meanwhile, is among the others. Where there is one core only nothing changes.
    """
    cores = sorted(os.sched_getaffinity(0))
    own, rest = [*timed], [*others, os.getpid()]
    try:
        if len(cores) > 1:
            _keep(own, {cores[-1]})
            _keep(rest, set(cores[:-1]))
        yield
    finally:
        _keep([*own, *rest], set(cores))


def _keep(processes: Iterable[int], cores: set[int]) -> None:
    """Let processes, every thread of theirs, run on these cores alone."""
    for process in processes:
        for thread in Path(f"/proc/{process}/task").iterdir():
            with suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(int(thread.name), cores)
