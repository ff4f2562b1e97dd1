"""A timer with sub-millisecond resolution (Linux timerfd); the event loop's has milliseconds."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from contextlib import suppress

_CLOCK_MONOTONIC = 1  # the clock of time.perf_counter
_ABSOLUTE = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Alarm:
    """Calls back at times of ``time.perf_counter``, about 0.1 ms late on an idle machine."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._fd = _libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        loop.add_reader(self._fd, self._on_expired)

    def set(self, at_s: float) -> None:
        """Replace the pending call; immediately if the time has passed."""
        ns = max(1, int(at_s * 1e9))
        when = (ctypes.c_long * 4)(0, 0, ns // 1_000_000_000, ns % 1_000_000_000)  # no interval; seconds, nanoseconds
        if _libc.timerfd_settime(self._fd, _ABSOLUTE, when, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def _on_expired(self) -> None:
        with suppress(BlockingIOError):  # the timer was set again meanwhile
            os.read(self._fd, 8)
            self._callback()
