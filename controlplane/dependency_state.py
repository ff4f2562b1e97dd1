"""Saying once that something everybody needs is amiss, and once that it is well again."""

from __future__ import annotations

import logging
import threading
import time


class DependencyState:
    """Whether something is amiss, and how to say that and its end. Safe in threads."""

    def __init__(self, gone: str, back: str, logger: logging.Logger) -> None:
        self._gone = gone
        self._back = back
        self._logger = logger
        self._lock = threading.Lock()
        self._since_s: float | None = None  # monotonic; None: it is there
        self._here_s = float("-inf")  # when it last answered

    def record_outage(self, reason: object, issued_at_s: float) -> None:
        """It did not answer who asked at this moment of the monotonic clock. No news if it answered others since."""
        with self._lock:
            if self._since_s is None and issued_at_s > self._here_s:
                self._since_s = time.monotonic()
                line = " ".join(str(reason).split())
                self._logger.error("%s (%s); what is due waits", self._gone, line[:300])

    def record_recovery(self, issued_at_s: float) -> None:
        """It answered who asked at this moment; what was asked before it went proves nothing."""
        with self._lock:
            self._here_s = time.monotonic()
            if self._since_s is not None and issued_at_s > self._since_s:
                away_s = self._here_s - self._since_s
                self._since_s = None
                self._logger.warning("%s after %.0f s", self._back, away_s)
