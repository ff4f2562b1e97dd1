"""Time limits that allow for a busy machine."""

from __future__ import annotations

import os
import time


def slowdown() -> float:
    """Factor by which this machine is slower now, at least 1.

    The larger of: elapsed seconds per CPU second now, and the load average of the last minute per core, because the
    load may have just ended.
    """
    begun, used = time.perf_counter(), time.thread_time()
    while time.thread_time() - used < 0.3:
        pass
    now = (time.perf_counter() - begun) / (time.thread_time() - used)
    return max(1.0, now, os.getloadavg()[0] / (os.cpu_count() or 1))


def is_within(took_s: float, limit_s: float) -> bool:
    """Whether a duration is within its limit, scaled by the slowdown."""
    return took_s <= limit_s or took_s <= limit_s * slowdown()
