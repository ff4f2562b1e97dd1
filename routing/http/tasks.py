"""What goes on beside requests for as long as the process does, whatever we did wrong in one of its rounds.

Theory of operation. A router does some things again and again beside its requests. A mistake of ours in one round must
not end all later ones: it is counted, said once for each kind of error, and after a pause, which is bounded and grows
while it fails on, the loop goes on. Being cancelled is how a loop ends. Counts are the process's, as its loops are.

Something short that is done again and again on the event loop itself, whatever goes wrong in one of its rounds.

Long work beside requests: a little at a time, with their turns in between.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from enum import StrEnum
from time import perf_counter
from typing import TypeVar

from routing.log import defect

FIRST_PAUSE_S = 0.1  # after a failure, doubled up to LAST_PAUSE_S while there is no other end to it
LAST_PAUSE_S = 2.0

logger = logging.getLogger(__name__)


class Background(StrEnum):
    """What goes on beside requests."""

    HEALTH = "health"  # asks a replica
    UPKEEP = "upkeep"  # what the clock brings; finds replicas that hang
    EVENTS = "events"  # notices what happens
    ANNOUNCING = "announcing"  # tells the control plane
    WORKERS = "workers"  # looks at workers, and replaces those that ended
    LOADS = "loads"  # exchanges them among workers
    LIMITS = "limits"  # lets in who waits for room that another worker has given back


_failures: Counter[Background] = Counter()
_said: set[tuple[Background, str]] = set()


def failures() -> Mapping[Background, int]:
    """How often each loop has failed in this process."""
    return {what: _failures[what] for what in Background}


def pause_s(failures_in_a_row: int) -> float:
    """Seconds to wait after so many."""
    return min(LAST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures_in_a_row - 1, 20))


async def run_until_cancelled(what: Background, work: Callable[[], Awaitable[None]]) -> None:
    """Do work that has no end, or has none yet: whenever a mistake of ours ends it, anew."""
    time, in_a_row = asyncio.get_running_loop().time, 0
    while True:
        began_at = time()
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - the next round must come
            in_a_row = 1 if time() - began_at > LAST_PAUSE_S else in_a_row + 1
            note_failure(what, error)
        else:
            return
        await asyncio.sleep(pause_s(in_a_row))


def note_failure(what: Background, error: Exception) -> None:
    """Count it, and say it once for each kind of error."""
    _failures[what] += 1
    kind = (what, type(error).__name__)
    if kind not in _said:
        _said.add(kind)
        defect(logger, error, f"{what} loop")


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


SLICE_S = 0.0005  # of work at a stretch, which a request may wait for twice; an item that takes longer is not cut

T = TypeVar("T")


async def run_in_slices(items: Iterable[T]) -> list[T]:
    """All items. What they are made from may change between any two of them."""
    made: list[T] = []
    until = perf_counter() + SLICE_S
    for item in items:
        made.append(item)
        if perf_counter() > until:
            await asyncio.sleep(0)
            until = perf_counter() + SLICE_S
    return made
