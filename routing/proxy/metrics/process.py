"""What is of the process, whoever lives in it, as Prometheus text."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from routing.proxy.loop.background import failures
from routing.proxy.metrics.exposition import PREFIX, header, labels

_started_at: Final = time.time()


def process_lines() -> Iterator[str]:
    """What the operating system knows of it, and the mistakes that it went on after."""
    yield from header("loop_failures_total", "counter", "Mistakes of the router's own, in loops that went on.")
    for loop, count in failures().items():
        yield f"{PREFIX}loop_failures_total{{{labels(loop=loop)}}} {count}"
    usage = resource.getrusage(resource.RUSAGE_SELF)
    figures = (
        ("start_time_seconds", "gauge", "Unix time at which the process started.", _started_at),
        ("cpu_seconds_total", "counter", "User and system CPU time.", usage.ru_utime + usage.ru_stime),
        ("resident_memory_bytes", "gauge", "Resident memory.", _resident_bytes(usage.ru_maxrss)),
    )
    for name, kind, text, value in figures:
        yield from header(name, kind, text, prefix="process_")
        yield f"process_{name} {value}"


def _resident_bytes(peak_kib: int) -> int:
    """Resident memory from /proc; elsewhere its peak, which is what there is."""
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_kib * 1024
