"""Saying once that something everybody needs is away, and once that it is back."""

from __future__ import annotations

import logging
import threading
import time


class Absence:
    """Whether something is away. Safe in threads."""

    def __init__(self, what: str, logger: logging.Logger) -> None:
        self._what = what
        self._logger = logger
        self._lock = threading.Lock()
        self._since_s: float | None = None  # monotonic; None: it is there

    def note_gone(self, reason: object) -> None:
        """It did not answer."""
        with self._lock:
            if self._since_s is None:
                self._since_s = time.monotonic()
                line = " ".join(str(reason).split())
                self._logger.error("%s is away (%s); what is due waits for its return", self._what, line[:300])

    def note_here(self, asked_at_s: float) -> None:
        """It answered who asked at this moment of the monotonic clock; what was asked before it went proves nothing."""
        with self._lock:
            if self._since_s is not None and asked_at_s > self._since_s:
                away_s = time.monotonic() - self._since_s
                self._since_s = None
                self._logger.warning("%s is back after %.0f s", self._what, away_s)
