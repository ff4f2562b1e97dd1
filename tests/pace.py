"""Time limits that allow for a busy machine, and how many generated examples a run has."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import hypothesis

ALL_EXAMPLES = "TEST_FULL"  # environment variable of `make test-full`
FEWEST = 20


def slowdown() -> float:
    """Factor by which this machine is slower now, at least 1.

    The larger of: elapsed seconds per CPU second now, and the load average of the last minute per core, because the
    load may have just ended.
    """
    started, cpu_started = time.perf_counter(), time.thread_time()
    while time.thread_time() - cpu_started < 0.1:
        pass
    current = (time.perf_counter() - started) / (time.thread_time() - cpu_started)
    return max(1.0, current, os.getloadavg()[0] / (os.cpu_count() or 1))


def is_within(duration_s: float, limit_s: float) -> bool:
    """Whether a duration is within its limit, scaled by the slowdown."""
    return duration_s <= limit_s or duration_s <= limit_s * slowdown()


def cpu_slowness() -> float:
    """CPU time of a fixed computation, relative to a server of 2024 (3 GHz); at least 1. For limits of CPU time."""
    started, total = time.thread_time(), 0
    for number in range(1_000_000):
        total += number
    return max(1.0, (time.thread_time() - started) / 0.045)


def with_fewer_examples(settings: hypothesis.settings) -> hypothesis.settings:
    """A fifth of the examples, at least ``FEWEST`` where there are as many."""
    count = settings.max_examples
    return hypothesis.settings(settings, max_examples=min(count, max(FEWEST, count // 5)))


def some(cases: Sequence[Any]) -> Sequence[Any]:
    """Every fifth case; all of them in ``make test-full``. For a test that is marked ``generated``."""
    return cases if ALL_EXAMPLES in os.environ else cases[::5]


def examples(full: int) -> int:
    """How many cases of a seed a test tries, of so many in ``make test-full``."""
    return full if ALL_EXAMPLES in os.environ else max(1, full // 5)
