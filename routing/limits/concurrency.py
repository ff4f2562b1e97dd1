"""Limits that processes share: what a budget and a gate ask of the memory that they have in common.

Room for so many requests at once; the others wait in a bounded line, the most urgent first.

Theory of operation. An engine that is asked for more than it can do preempts and recomputes, so beyond its best number
of requests each further one makes all slower. Waiting here costs it nothing. The line is bounded in length and in time,
because an answer that comes too late is work for nobody: who finds it full is refused at once, or takes the place of
the latest of the least urgent. Within a priority it is first come, first served. Taking the whole line down costs the
line; everything else is O(1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from typing import Final, Protocol

from routing.schema import PRIORITIES, ConcurrencyConfig


class SharedPermits(Protocol):
    """Room that processes share. Order is a number: who wants to run sooner has the higher one, and 0 is nobody's."""

    def take(self, most: int, order: float) -> bool:
        """Take a place, unless ``most`` are taken by all processes together, or somebody elsewhere is to go first."""
        ...

    def give(self) -> None:
        """Give one back."""
        ...

    def publish_queue(self, waiting: int, order: float) -> None:
        """Tell the others how many wait here, and the order of the first."""
        ...

    @property
    def running(self) -> int:
        """Places that are taken, by all processes together."""
        ...

    @property
    def waiting_elsewhere(self) -> int:
        """Who waits in other processes."""
        ...


class SharedLimits(Protocol):
    """What a process shares with others; None for what it counts by itself."""

    def cell(self, name: str) -> memoryview[float] | None:
        """The one number of a budget."""
        ...

    def places(self, name: str) -> SharedPermits | None:
        """The room of a gate."""
        ...


MAX_RETRY_AFTER_S: Final = 60
_CLOCK_S: Final = 1e9  # more than any clock says, and its microseconds are still told apart
PACE_WEIGHT: Final = 1 / 32  # of the latest gap between two ends


class RejectionCause(StrEnum):
    """Why somebody in line is not let in."""

    FULL = "full"  # the line was
    DISPLACED = "displaced"  # by somebody more urgent
    TIMEOUT = "timeout"  # it has waited for too long


class Waiter(Protocol):
    """Who wants to go through."""

    @property
    def priority(self) -> int:
        """0 is the most urgent."""
        ...

    def admit(self) -> None:
        """There is room now, and it is taken. Must not call back into the gate."""
        ...

    def on_rejected(self, gate: ConcurrencyLimiter, why: RejectionCause) -> None:
        """There is none. Must not call back into the gate."""
        ...


class ConcurrencyLimiter:
    """One line. ``places``: the room, where several processes share it; each then has a line of its own.

    ``share``: this process's part of the limits, where several processes share a port and not the room.
    """

    def __init__(
        self,
        config: ConcurrencyConfig,
        clock: Callable[[], float],
        share: float = 1.0,
        places: SharedPermits | None = None,
    ) -> None:
        self.running = 0
        self.waiting = 0
        self.refused = dict.fromkeys(RejectionCause, 0)
        self._clock = clock
        self._places = places
        self._lines: list[dict[Waiter, float]] = [{} for _ in range(PRIORITIES)]  # since when each waits
        self._gap_s: float | None = None  # between two ends of a full gate, on average; None until two were seen
        self._ended_at: float | None = None  # when the latest of them was; None where there has been room since
        self._share = share
        self.configure(config)

    def configure(self, config: ConcurrencyConfig) -> None:
        """Go by these limits; whoever has room by them is let in."""
        self._max_running = math.ceil(config.max_running * self._share)
        self._max_waiting = math.ceil(config.max_waiting * self._share)
        self._max_wait_s = config.max_wait_s
        self.admit()

    def open(self) -> None:
        """Let everybody in: there is no limit any more."""
        self._max_running = self.running + self.waiting + (1 << 60)
        self.admit()

    def enter(self, waiter: Waiter) -> bool:
        """Whether there is room, which is taken then. Else the waiter is in line, or has been turned away."""
        if not self.waiting and self._take(waiter.priority, None):
            return True
        if self._all_waiting() >= self._max_waiting and not self._displace(waiter.priority):
            self._turn_away(waiter, RejectionCause.FULL)
        else:
            self._lines[waiter.priority][waiter] = self._clock()
            self.waiting += 1
            self._tell_line()
        return False

    def leave(self) -> None:
        """Somebody who was let in is done."""
        now = self._clock()
        if self._ended_at is not None:
            gap = now - self._ended_at
            self._gap_s = gap if self._gap_s is None else self._gap_s + PACE_WEIGHT * (gap - self._gap_s)
        self.running -= 1
        if self._places is not None:
            self._places.give()
        self.admit()
        running = self.running if self._places is None else self._places.running
        self._ended_at = now if running >= self._max_running else None

    def withdraw(self, waiter: Waiter) -> bool:
        """Somebody in line wants no more; False if it is not in line."""
        if self._lines[waiter.priority].pop(waiter, None) is None:
            return False
        self.waiting -= 1
        self._tell_line()
        return True

    def expire(self) -> None:
        """Turn away who has waited for too long."""
        if not self.waiting:
            return
        before = self._clock() - self._max_wait_s
        for line in self._lines:
            while line and (first := next(iter(line.items())))[1] <= before:
                self._remove(line, first[0], RejectionCause.TIMEOUT)

    @property
    def retry_after_s(self) -> int:
        """When there may be room, at the present pace: seconds, 1 to ``MAX_RETRY_AFTER_S``."""
        wait_s = (self._gap_s or 0.0) * (self.waiting + 1)
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(wait_s)))

    def admit(self) -> None:
        """Let in as many as there is room for, the most urgent first."""
        while self.waiting:
            line = next(line for line in self._lines if line)
            waiter, since = next(iter(line.items()))
            if not self._take(waiter.priority, since):
                return
            del line[waiter]
            self.waiting -= 1
            self._tell_line()
            waiter.admit()

    def _take(self, priority: int, since: float | None) -> bool:
        """Take a place for somebody of this priority, who has waited ``since`` then; None: who comes just now."""
        if self._places is None:
            has_room = self.running < self._max_running
        else:
            has_room = self._places.take(self._max_running, _order(priority, self._clock() if since is None else since))
        self.running += has_room
        return has_room

    def _all_waiting(self) -> int:
        return self.waiting if self._places is None else self.waiting + self._places.waiting_elsewhere

    def _tell_line(self) -> None:
        if self._places is not None:
            line = next((line for line in self._lines if line), None)
            self._places.publish_queue(self.waiting, 0.0 if line is None else _order(*_first(line)))

    def _displace(self, priority: int) -> bool:
        """Make room in line for somebody of this priority; False if nobody there is less urgent."""
        for line in reversed(self._lines[priority + 1 :]):
            if line:
                self._remove(line, next(reversed(line)), RejectionCause.DISPLACED)
                return True
        return False

    def _remove(self, line: dict[Waiter, float], waiter: Waiter, why: RejectionCause) -> None:
        del line[waiter]
        self.waiting -= 1
        self._tell_line()
        self._turn_away(waiter, why)

    def _turn_away(self, waiter: Waiter, why: RejectionCause) -> None:
        self.refused[why] += 1
        waiter.on_rejected(self, why)


def _first(line: dict[Waiter, float]) -> tuple[int, float]:
    waiter, since = next(iter(line.items()))
    return waiter.priority, since


def _order(priority: int, since: float) -> float:
    """The more urgent before the less, then the earlier before the later; ``since`` in seconds of a clock of all."""
    return (PRIORITIES - priority) * _CLOCK_S - since
