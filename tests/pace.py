"""Limits in seconds on machines that others use too."""

from __future__ import annotations

import os
import time


def slowdown() -> float:
    """How much longer work takes on this machine, at least 1.

    The greater of two: seconds that pass in a second of CPU just now, and processes a core that wanted to run in the
    last minute, for those who got in the way may be gone by the time that somebody asks.
    """
    begun, used = time.perf_counter(), time.thread_time()
    while time.thread_time() - used < 0.3:
        pass
    now = (time.perf_counter() - begun) / (time.thread_time() - used)
    return max(1.0, now, os.getloadavg()[0] / (os.cpu_count() or 1))


def is_within(took_s: float, limit_s: float) -> bool:
    """Whether something took no longer than it may, or than that is while others use the machine too."""
    return took_s <= limit_s or took_s <= limit_s * slowdown()
