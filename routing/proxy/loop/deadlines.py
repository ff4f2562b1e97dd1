"""Every wait has a deadline, and thousands of waits cost one timer.

Theory of operation. A holder (a connection) has at most one deadline at a time and lies in at most one bucket of the
wheel. Moving a deadline later, which is what every arriving byte does, is one attribute write: the bucket finds out
when it comes due and files the holder again. Only moving a deadline earlier files it anew at once. So a deadline
passes up to one tick late, and never early.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Protocol

from routing.proxy.log import defect

logger = logging.getLogger(__name__)

TICK_S: Final = 0.05  # seconds; how late a deadline may be noticed
NEVER: Final = float("inf")
NOWHERE: Final = 1 << 62  # the bucket of a holder that lies in none


class Holder(Protocol):
    """Something that waits. ``deadline`` is loop time; ``due`` belongs to the wheel."""

    deadline: float
    due: int

    def deadline_passed(self) -> None:
        """Give up waiting. The deadline is NEVER again when this is called."""
        ...


class Deadlines:
    """A lazy timer wheel on one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.time = loop.time
        self._buckets: dict[int, set[Holder]] = {}
        self._tick = int(loop.time() / TICK_S)
        self._timer = loop.call_later(TICK_S, self._sweep)

    def __len__(self) -> int:
        """How many holders are filed."""
        return sum(len(bucket) for bucket in self._buckets.values())

    def arm(self, holder: Holder, delay_s: float) -> None:
        """Let ``holder`` wait ``delay_s`` seconds from now, instead of whatever it waited for."""
        holder.deadline = at = self.time() + delay_s
        if at < (holder.due - 1) * TICK_S:  # its bucket comes due too late
            self._file(holder, int(at / TICK_S) + 1)

    def forget(self, holder: Holder) -> None:
        """Let go of a holder that has ended."""
        holder.deadline = NEVER
        if holder.due != NOWHERE:
            self._take_out(holder)
            holder.due = NOWHERE

    def close(self) -> None:
        """Stop the wheel; no deadline passes any more."""
        self._timer.cancel()

    def _file(self, holder: Holder, due: int) -> None:
        if holder.due != NOWHERE:
            self._take_out(holder)
        holder.due = due = max(due, self._tick + 1)
        self._buckets.setdefault(due, set()).add(holder)

    def _take_out(self, holder: Holder) -> None:
        """Out of its bucket; an empty one goes, because with deadlines of hours there would be many."""
        bucket = self._buckets.get(holder.due)
        if bucket is not None:
            bucket.discard(holder)
            if not bucket:
                del self._buckets[holder.due]

    def _sweep(self) -> None:
        now = self._loop.time()
        self._timer = self._loop.call_later(TICK_S, self._sweep)
        until = int(now / TICK_S)
        while self._tick < until:
            self._tick += 1
            for holder in list(self._buckets.pop(self._tick, ())):
                holder.due = NOWHERE
                self._come_due(holder, now)

    def _come_due(self, holder: Holder, now: float) -> None:
        if holder.deadline <= now:
            holder.deadline = NEVER
            try:
                holder.deadline_passed()
            except Exception as error:  # noqa: BLE001 - the others that wait must not wait for ever
                defect(logger, error, "deadline")
        elif holder.deadline != NEVER:
            self._file(holder, int(holder.deadline / TICK_S) + 1)
