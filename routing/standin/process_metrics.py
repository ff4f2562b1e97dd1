"""The ``python_*`` and ``process_*`` families that every prometheus_client process shows. Reads /proc.

The ``http_*`` families of prometheus-fastapi-instrumentator, as vLLM 0.32.0 shows them.
"""

from __future__ import annotations

import gc
import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

from routing.simulation.blocks import Histogram
from routing.standin.metrics import Family

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


NOT_COUNTED = frozenset({"/metrics", "/health", "/load", "/ping", "/version", "/server_info", "/standin/fault"})
_FINE_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0, 60.0,
)  # fmt: skip
_COARSE_S = (0.1, 0.5, 1.0)
_SIZE = (
    "Content length of {} by handler. Only value of header is respected. Otherwise ignored. No percentile calculated. "
)


class HttpMetrics:
    """Counts HTTP exchanges by the route's pattern; an unknown path is ``none``."""

    def __init__(self) -> None:
        self._requests = Family(
            "http_requests_total", "counter", "Total number of requests by method, status and handler."
        )
        self._request_size = Family("http_request_size_bytes", "summary", _SIZE.format("incoming requests"))
        self._response_size = Family("http_response_size_bytes", "summary", _SIZE.format("outgoing responses"))
        fine = "Latency with many buckets but no API specific labels. Made for more accurate percentile calculations. "
        self._fine_family = Family("http_request_duration_highr_seconds", "histogram", fine)
        coarse = "Latency with only few buckets by handler. "
        coarse += "Made to be only used if aggregation by handler is important. "
        self._coarse_family = Family("http_request_duration_seconds", "histogram", coarse)
        self._fine = Histogram(_FINE_S)
        self._fine_family.histogram({}, self._fine, time.time())
        self._counts: dict[tuple[str, str, str], list[int]] = {}
        self._sizes: dict[str, tuple[Histogram, Histogram]] = {}
        self._coarse: dict[tuple[str, str], Histogram] = {}

    @property
    def families(self) -> list[Family]:
        """In the instrumentator's order."""
        return [self._requests, self._request_size, self._response_size, self._fine_family, self._coarse_family]

    def observe(
        self, handler: str, method: str, status: int, *, seconds: float, received_bytes: int, sent_bytes: int
    ) -> None:
        """Count one exchange; sizes are those of the Content-Length headers, 0 without."""
        if handler in NOT_COUNTED:
            return
        self._count(handler, method, f"{status // 100}xx")
        received, sent = self._sizes_of(handler)
        received.observe(received_bytes)
        sent.observe(sent_bytes)
        self._fine.observe(seconds)
        self._duration(handler, method).observe(seconds)

    def _count(self, handler: str, method: str, status: str) -> None:
        key = (handler, method, status)
        if key not in self._counts:
            cell = self._counts[key] = [0]
            labels = {"handler": handler, "method": method, "status": status}
            self._requests.value(labels, lambda: float(cell[0]), time.time())
        self._counts[key][0] += 1

    def _sizes_of(self, handler: str) -> tuple[Histogram, Histogram]:
        if handler not in self._sizes:
            pair = self._sizes[handler] = (Histogram(()), Histogram(()))
            self._request_size.summary({"handler": handler}, pair[0], time.time())
            self._response_size.summary({"handler": handler}, pair[1], time.time())
        return self._sizes[handler]

    def _duration(self, handler: str, method: str) -> Histogram:
        key = (handler, method)
        if key not in self._coarse:
            self._coarse[key] = Histogram(_COARSE_S)
            labels = {"handler": handler, "method": method}
            self._coarse_family.histogram(labels, self._coarse[key], time.time())
        return self._coarse[key]
