"""Limits in seconds on machines that others use too."""

from __future__ import annotations

import time


def slowdown() -> float:
    """How much longer work takes on this machine just now: seconds that pass in a second of CPU, at least 1."""
    begun, used = time.perf_counter(), time.thread_time()
    while time.thread_time() - used < 0.3:
        pass
    return max(1.0, (time.perf_counter() - begun) / (time.thread_time() - used))


def is_within(took_s: float, limit_s: float) -> bool:
    """Whether something took no longer than it may, or than that is while others use the machine too."""
    return took_s <= limit_s or took_s <= limit_s * slowdown()
