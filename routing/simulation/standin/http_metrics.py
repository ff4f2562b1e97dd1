"""The ``http_*`` families of prometheus-fastapi-instrumentator, as vLLM 0.32.0 shows them."""

from __future__ import annotations

import time

from routing.simulation.histogram import Histogram
from routing.simulation.standin.exposition import Family

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
