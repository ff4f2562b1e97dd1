"""The metric families of the server around a vLLM engine.

``python_*`` and ``process_*`` as every prometheus_client process exposes them (read from /proc), and ``http_*`` as
prometheus-fastapi-instrumentator counts requests.
"""

from __future__ import annotations

import gc
import os
import platform
import resource
import sys
import time
from pathlib import Path

from routing.simulation.statistics import Histogram
from routing.standin.metrics import Family, ReadValue

_PAGE_BYTES = resource.getpagesize()
_CLOCK_HZ = os.sysconf("SC_CLK_TCK")


def _stat() -> list[str]:
    """Fields of /proc/self/stat after the command's name; empty without /proc."""
    try:
        text = Path("/proc/self/stat").read_text()
    except OSError:
        return []
    return text[text.rfind(")") + 2 :].split()


def _boot_s() -> float:
    """When the machine was started, seconds since the epoch."""
    text = Path("/proc/stat").read_text()
    return float(text.partition("btime ")[2].split()[0])


def process_families() -> list[Family]:
    """The families, in prometheus_client's order."""
    families = []
    for name, statistic, help_text in (
        ("objects_collected", "collected", "Objects collected during gc"),
        ("objects_uncollectable", "uncollectable", "Uncollectable objects found during GC"),
        ("collections", "collections", "Number of times this generation was collected"),
    ):
        family = Family(f"python_gc_{name}_total", "counter", help_text)
        for generation in range(3):
            family.value({"generation": str(generation)}, _gc_reader(generation, statistic))
        families.append(family)
    info = Family("python_info", "gauge", "Python platform information")
    major, minor, patch = (str(part) for part in sys.version_info[:3])
    version = {"implementation": platform.python_implementation(), "version": platform.python_version()}
    info.value({**version, "major": major, "minor": minor, "patchlevel": patch}, lambda: 1.0)
    return [*families, info, *(_proc_families() if _stat() else ())]


def _gc_reader(generation: int, statistic: str) -> ReadValue:
    return lambda: float(gc.get_stats()[generation][statistic])


def _proc_families() -> list[Family]:
    started_s = _boot_s() + int(_stat()[19]) / _CLOCK_HZ
    max_files = float(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    started = "Start time of the process since unix epoch in seconds."
    cpu = "Total user and system CPU time spent in seconds."
    rows: list[tuple[str, str, str, ReadValue]] = [
        ("virtual_memory_bytes", "gauge", "Virtual memory size in bytes.", lambda: float(_stat()[20])),
        ("resident_memory_bytes", "gauge", "Resident memory size in bytes.", lambda: float(_stat()[21]) * _PAGE_BYTES),
        ("start_time_seconds", "gauge", started, lambda: started_s),
        ("cpu_seconds_total", "counter", cpu, lambda: sum(map(float, _stat()[11:13])) / _CLOCK_HZ),
        ("open_fds", "gauge", "Number of open file descriptors.", lambda: len(os.listdir("/proc/self/fd"))),  # noqa: PTH208
        ("max_fds", "gauge", "Maximum number of open file descriptors.", lambda: max_files),
    ]
    families = []
    for name, kind, help_text, read in rows:
        families.append(Family(f"process_{name}", kind, help_text))
        families[-1].value({}, read)
    return families


NOT_COUNTED = frozenset({"/metrics", "/health", "/load", "/ping", "/version", "/server_info", "/standin/fault"})
_FINE_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0, 60.0,
)  # fmt: skip
_COARSE_S = (0.1, 0.5, 1.0)
_SIZE = (
    "Content length of {} by handler. Only value of header is respected. Otherwise ignored. No percentile calculated. "
)
_FINE = "Latency with many buckets but no API specific labels. Made for more accurate percentile calculations. "
_COARSE = "Latency with only few buckets by handler. Made to be only used if aggregation by handler is important. "


class HttpMetrics:
    """Counts HTTP requests by the pattern of their route; an unknown path is ``none``."""

    def __init__(self) -> None:
        requests = "Total number of requests by method, status and handler."
        self._requests = Family("http_requests_total", "counter", requests)
        self._request_size = Family("http_request_size_bytes", "summary", _SIZE.format("incoming requests"))
        self._response_size = Family("http_response_size_bytes", "summary", _SIZE.format("outgoing responses"))
        self._fine_family = Family("http_request_duration_highr_seconds", "histogram", _FINE)
        self._coarse_family = Family("http_request_duration_seconds", "histogram", _COARSE)
        self._fine = Histogram(_FINE_S)
        self._fine_family.histogram({}, self._fine, time.time())
        self._counts: dict[tuple[str, str, str], int] = {}  # by handler, method and status class
        self._sizes: dict[str, tuple[Histogram, Histogram]] = {}
        self._coarse: dict[tuple[str, str], Histogram] = {}

    @property
    def families(self) -> list[Family]:
        """In the instrumentator's order."""
        return [self._requests, self._request_size, self._response_size, self._fine_family, self._coarse_family]

    def observe(
        self, handler: str, method: str, status: int, *, seconds: float, received_bytes: int, sent_bytes: int
    ) -> None:
        """Count one request; sizes are those of the Content-Length headers, 0 without one."""
        if handler in NOT_COUNTED:
            return
        key = (handler, method, f"{status // 100}xx")
        labels = {"handler": handler, "method": method}
        now_s = time.time()
        if key not in self._counts:
            self._counts[key] = 0
            self._requests.value({**labels, "status": key[2]}, lambda: self._counts[key], now_s)
        self._counts[key] += 1
        if handler not in self._sizes:
            self._sizes[handler] = (Histogram(()), Histogram(()))
            self._request_size.summary({"handler": handler}, self._sizes[handler][0], now_s)
            self._response_size.summary({"handler": handler}, self._sizes[handler][1], now_s)
        for histogram, size_bytes in zip(self._sizes[handler], (received_bytes, sent_bytes), strict=True):
            histogram.observe(size_bytes)
        if (handler, method) not in self._coarse:
            self._coarse[handler, method] = Histogram(_COARSE_S)
            self._coarse_family.histogram(labels, self._coarse[handler, method], now_s)
        self._coarse[handler, method].observe(seconds)
        self._fine.observe(seconds)
