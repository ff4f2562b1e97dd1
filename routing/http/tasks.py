"""Background work beside requests: loops that survive errors, periodic callbacks, and long work in short slices.

Theory of operation. A programming error in one round of a loop must not end later rounds: it is counted, logged once
for each kind of error, and the loop continues after a pause, which doubles up to a limit while rounds keep failing.
Cancelling ends a loop. Counts and logged kinds belong to the process, as the loops do.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from enum import StrEnum
from time import perf_counter
from typing import TypeVar

from routing.http.loop import after_reading
from routing.log import defect

FIRST_PAUSE_S = 0.1  # after a failure; doubled after each further failure in a row, up to LAST_PAUSE_S
LAST_PAUSE_S = 2.0

logger = logging.getLogger(__name__)


class Background(StrEnum):
    """The background loops; values are labels of a metric."""

    HEALTH = "health"  # health checks
    HOUSEKEEPING = "housekeeping"  # periodic work of the router, stall detection included
    EVENTS = "events"  # collects events
    ANNOUNCING = "announcing"  # registers with the control plane
    WORKERS = "workers"  # supervises workers
    KV_EVENTS = "kv_events"  # takes KV cache events of replicas
    RESIDENCY = "residency"  # saves the residency index
    SHARING = "sharing"  # exchanges state with other routers and workers
    LIMITS = "limits"  # admits requests to permits that another worker has released


_failures: Counter[Background] = Counter()
_logged: set[tuple[Background, str]] = set()


def failures() -> Mapping[Background, int]:
    """Failures of each loop in this process."""
    return {loop: _failures[loop] for loop in Background}


def pause_s(failures_in_a_row: int) -> float:
    return min(LAST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures_in_a_row - 1, 20))


async def run_until_cancelled(loop: Background, work: Callable[[], Awaitable[None]]) -> None:
    """Run ``work`` until it returns; start it again after an error."""
    time, failures_in_a_row = asyncio.get_running_loop().time, 0
    while True:
        started_at = time()
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - the next round must run
            failures_in_a_row = 1 if time() - started_at > LAST_PAUSE_S else failures_in_a_row + 1
            _record_failure(loop, error)
        else:
            return
        await asyncio.sleep(pause_s(failures_in_a_row))


def _record_failure(loop: Background, error: Exception) -> None:
    _failures[loop] += 1
    kind = (loop, type(error).__name__)
    if kind not in _logged:
        _logged.add(kind)
        defect(logger, error, f"{loop} loop")


class Periodic:
    """Calls ``work``, which must be short and may change ``period_s``, every ``period_s`` on the event loop.

    ``reads_first``: after the loop has read what has arrived, because the work judges who is silent.
    """

    def __init__(
        self, loop: Background, period_s: float, work: Callable[[], None], *, reads_first: bool = False
    ) -> None:
        self._loop = loop
        self._reads_first = reads_first
        self.period_s = period_s
        self._work = work
        self._failures_in_a_row = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Call ``work`` now and periodically from now on; without effect if it was started before."""
        if self._timer is None:
            self._run()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        if self._reads_first:
            after_reading(asyncio.get_running_loop(), self._run_unless_stopped)
        else:
            self._run()

    def _run_unless_stopped(self) -> None:
        if self._timer is not None and not self._timer.cancelled():
            self._run()

    def _run(self) -> None:
        running = asyncio.get_running_loop()
        started_at = running.time()
        try:
            self._work()
            self._failures_in_a_row = 0
        except Exception as error:  # noqa: BLE001 - the next tick must run
            self._failures_in_a_row += 1
            _record_failure(self._loop, error)
        delay_s = max(self.period_s, pause_s(self._failures_in_a_row) if self._failures_in_a_row else 0.0)
        self._timer = running.call_at(started_at + delay_s, self._tick)


SLICE_S = 0.0005  # of uninterrupted work; a request may wait for two slices. One item is never interrupted

T = TypeVar("T")


async def run_in_slices(items: Iterable[T]) -> list[T]:
    """Collect all items, and let other tasks run after each slice; what the items depend on may change then."""
    collected: list[T] = []
    until = perf_counter() + SLICE_S
    for item in items:
        collected.append(item)
        if perf_counter() > until:
            await asyncio.sleep(0)
            until = perf_counter() + SLICE_S
    return collected
