"""The ``python_*`` and ``process_*`` families that every prometheus_client process shows. Reads /proc."""

from __future__ import annotations

import gc
import os
import platform
import resource
import sys
from collections.abc import Callable
from pathlib import Path

from routing.simulation.standin.exposition import Family

_PAGE_BYTES = resource.getpagesize()
_CLOCK_HZ = os.sysconf("SC_CLK_TCK")


def _stat() -> list[str]:
    """Fields of /proc/self/stat after the command's name; empty where there is no /proc."""
    try:
        text = Path("/proc/self/stat").read_text()
    except OSError:
        return []
    return text[text.rfind(")") + 2 :].split()


def _boot_s() -> float:
    """When the machine was started, seconds since the epoch."""
    for line in Path("/proc/stat").read_text().splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    return 0.0


def _open_files() -> float:
    return float(len(os.listdir("/proc/self/fd")))  # noqa: PTH208 -- a count of names, no paths wanted


def process_families() -> list[Family]:
    """The families, in prometheus_client's order."""
    families = _gc_families()
    info = Family("python_info", "gauge", "Python platform information")
    major, minor, patch = (str(part) for part in sys.version_info[:3])
    version = {"implementation": platform.python_implementation(), "version": platform.python_version()}
    info.value({**version, "major": major, "minor": minor, "patchlevel": patch}, lambda: 1.0)
    families.append(info)
    if _stat():
        families += _proc_families()
    return families


def _gc_families() -> list[Family]:
    families = []
    for name, field, help_text in (
        ("python_gc_objects_collected_total", "collected", "Objects collected during gc"),
        ("python_gc_objects_uncollectable_total", "uncollectable", "Uncollectable objects found during GC"),
        ("python_gc_collections_total", "collections", "Number of times this generation was collected"),
    ):
        family = Family(name, "counter", help_text)
        for generation in range(3):
            family.value({"generation": str(generation)}, _gc_reader(generation, field))
        families.append(family)
    return families


def _gc_reader(generation: int, field: str) -> Callable[[], float]:
    return lambda: float(gc.get_stats()[generation][field])


def _proc_families() -> list[Family]:
    started_s = _boot_s() + int(_stat()[19]) / _CLOCK_HZ
    limit = float(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    table: list[tuple[str, str, str, Callable[[], float]]] = [
        ("virtual_memory_bytes", "gauge", "Virtual memory size in bytes.", lambda: float(_stat()[20])),
        (
            "resident_memory_bytes",
            "gauge",
            "Resident memory size in bytes.",
            lambda: float(_stat()[21]) * _PAGE_BYTES,
        ),
        (
            "start_time_seconds",
            "gauge",
            "Start time of the process since unix epoch in seconds.",
            lambda: started_s,
        ),
        (
            "cpu_seconds_total",
            "counter",
            "Total user and system CPU time spent in seconds.",
            lambda: sum(map(float, _stat()[11:13])) / _CLOCK_HZ,
        ),
        ("open_fds", "gauge", "Number of open file descriptors.", _open_files),
        ("max_fds", "gauge", "Maximum number of open file descriptors.", lambda: limit),
    ]
    families = []
    for name, kind, help_text, read in table:
        family = Family(f"process_{name}", kind, help_text)
        family.value({}, read)
        families.append(family)
    return families
