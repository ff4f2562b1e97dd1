"""Every wait has a deadline, and thousands of waits cost one timer.

Theory of operation. A holder (a connection) has at most one deadline at a time and lies in at most one bucket of the
wheel. Moving a deadline later, which is what every arriving byte does, is one attribute write: the bucket finds out
when it comes due and files the holder again. Only moving a deadline earlier files it anew at once. So a deadline
passes up to one tick late, and never early.

What is to be written waits until the end of the event loop's turn, and then goes out together.

Theory of operation. A write wakes whoever reads it, and it evicts what the core knew of our own code: caches and
predictions of branches. So a router that writes after every step runs each step cold. Here the steps of a turn, all
that has arrived by now, run one after the other, and their writes follow in one go; that saves a quarter of a
request's CPU under load, and a request that comes alone waits for nobody. Closing waits in the same line, so that
what was written before it goes out before it. ``BURST_BYTES`` and ``BURST_PIECES`` bound what may wait: 16 MiB, however
much a turn brings and to whomever it goes, so that a client that does not read is noticed long before.

Methods that an event loop calls must not fail: it would only log that, and a client would wait for ever.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Concatenate, Final, ParamSpec, Protocol, TypeVar

from routing.log import defect

logger = logging.getLogger(__name__)

TICK_S: Final = 0.05  # seconds; how late a deadline may be noticed
NEVER: Final = float("inf")
NOWHERE: Final = 1 << 62  # the bucket of a holder that lies in none


class Holder(Protocol):
    """Something that waits. ``deadline`` is loop time; ``due`` belongs to the wheel."""

    deadline: float
    due: int

    def on_deadline(self) -> None:
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
                holder.on_deadline()
            except Exception as error:  # noqa: BLE001 - the others that wait must not wait for ever
                defect(logger, error, "deadline")
        elif holder.deadline != NEVER:
            self._file(holder, int(holder.deadline / TICK_S) + 1)


BURST_BYTES: Final = 64 << 10  # a larger piece is written at once, so that a transport's back-pressure is heard in time
BURST_PIECES: Final = 256  # as many do not wait for more: one client can ask for thousands of answers in one read


class WriteBuffer:
    """The writes of one event loop."""

    __slots__ = ("_loop", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[tuple[asyncio.Transport, bytes | None]] = []  # None: close; always this very list

    def write(self, transport: asyncio.Transport, data: bytes) -> None:
        """Write, after everything that waits already."""
        waiting = self._waiting
        if not waiting:
            self._loop.call_soon(self.flush)
        waiting.append((transport, data))
        if len(data) > BURST_BYTES or len(waiting) >= BURST_PIECES:
            self.flush()

    def close(self, transport: asyncio.Transport) -> None:
        """Close in an orderly way, after what was written before."""
        if not self._waiting:
            self._loop.call_soon(self.flush)
        self._waiting.append((transport, None))

    def flush(self) -> None:
        """Let everything go out now."""
        waiting = self._waiting[:]
        self._waiting.clear()
        for transport, data in waiting:
            try:
                if data is None:
                    transport.close()
                else:
                    transport.write(data)
            except Exception as error:  # noqa: BLE001 - the others' writes must not be lost with it
                if not transport.is_closing():  # else it was cut meanwhile: nobody is there to read it
                    defect(logger, error, "write_buffer")


class AbortsOnError(Protocol):
    """Whoever can end what it is doing because of a mistake of ours."""

    def abort_on_error(self, error: Exception) -> None:
        """End it, and say so."""
        ...


P = ParamSpec("P")
S = TypeVar("S", bound=AbortsOnError)


def log_exceptions(method: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
    """Give up where ``method`` fails."""

    def guarded(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whoever waits gets an answer, whatever we did wrong
            self.abort_on_error(error)

    guarded.__doc__ = method.__doc__
    return guarded
