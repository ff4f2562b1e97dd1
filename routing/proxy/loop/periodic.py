"""Something short that is done again and again on the event loop itself, whatever goes wrong in one of its rounds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from routing.proxy.loop.background import Background, note_failure, pause_s


class Periodic:
    """Something short that is done every ``period_s``, on the event loop itself."""

    def __init__(self, what: Background, period_s: float, work: Callable[[], None]) -> None:
        self._what = what
        self._period_s = period_s
        self._work = work
        self._in_a_row = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Do it now, and from now on; once it has begun this changes nothing."""
        if self._timer is None:
            self._tick()

    def stop(self) -> None:
        """Do it no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        running = asyncio.get_running_loop()
        began_at = running.time()
        try:
            self._work()
            self._in_a_row = 0
        except Exception as error:  # noqa: BLE001 - the next tick must come
            self._in_a_row += 1
            note_failure(self._what, error)
        delay_s = max(self._period_s, pause_s(self._in_a_row) if self._in_a_row else 0.0)
        self._timer = running.call_at(began_at + delay_s, self._tick)
