"""Pins processes to cores, so that a proxy's latency does not include the CPU time of other processes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def can_be_split() -> bool:
    """Whether there are at least two cores."""
    return len(os.sched_getaffinity(0)) > 1


@contextmanager
def core_of_its_own(timed: Iterable[int], others: Iterable[int]) -> Iterator[None]:
    """Pin the measured processes to one core and all others, this one included, to the rest, for the length of a
    block.

    On a single core nothing changes.
    """
    cores = sorted(os.sched_getaffinity(0))
    own, rest = [*timed], [*others, os.getpid()]
    try:
        if len(cores) > 1:
            _pin(own, {cores[-1]})
            _pin(rest, set(cores[:-1]))
        yield
    finally:
        _pin([*own, *rest], set(cores))


def _pin(processes: Iterable[int], cores: set[int]) -> None:
    """Pin every thread of these processes."""
    for process in processes:
        for thread in Path(f"/proc/{process}/task").iterdir():
            with suppress(ProcessLookupError):  # the thread has just ended
                os.sched_setaffinity(int(thread.name), cores)
