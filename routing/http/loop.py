"""Helpers for code that the event loop calls: deadlines, write coalescing, and an exception boundary.

Theory of operation of deadlines. A holder (a connection) has at most one deadline and is in at most one bucket of a
timer wheel. Moving a deadline later, which happens with every byte that arrives, is one attribute write: when the
bucket expires, the wheel puts the holder into a later bucket. Only moving a deadline earlier changes the bucket at
once. So a deadline is noticed up to one tick late and never early, and thousands of waits cost one timer.

Deadlines judge others by time in which this process could have read from them. If the loop could not run for a while
(a stopped process, a busy machine, a long callback), all deadlines move by that time. Before a deadline is judged, the
loop reads what has arrived (``after_reading``), because timers come before sockets in its iteration.

Theory of operation of write coalescing. A write wakes its reader and evicts the router's own code from the core's
caches, so a router that writes after every step runs each step cold. Writes therefore wait until the end of the event
loop's iteration and go out together, which saves a quarter of a request's CPU under load; a single request is not
delayed. Closing a connection waits in the same queue, so that earlier writes go out first. ``BURST_BYTES`` and
``BURST_WRITES`` limit what waits to 16 MiB, so that a client that does not read is noticed early.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Concatenate, Final, ParamSpec, Protocol, TypeVar

from routing.log import defect

logger = logging.getLogger(__name__)

TICK_S: Final = 0.05  # seconds that a deadline may be noticed late
MAX_SWEEP_S: Final = 2 * TICK_S  # more time between two sweeps is time in which the loop could not run
NEVER: Final = float("inf")
NO_BUCKET: Final = 1 << 62


class Holder(Protocol):
    """An object with a deadline. ``deadline`` is loop time; ``bucket`` belongs to the wheel."""

    deadline: float
    bucket: int

    def on_deadline(self) -> None:
        """Called after the deadline, which is NEVER again by then."""
        ...

    def postpone(self, stalled_s: float) -> None:
        """Move the deadline, which is not NEVER, because the loop could not run for ``stalled_s``."""
        ...


def after_reading(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Call ``callback`` when the loop has read what has arrived by now: two iterations have a poll between them."""
    loop.call_soon(loop.call_soon, callback)


class Deadlines:
    """A lazy timer wheel on one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.time = loop.time
        self._buckets: dict[int, set[Holder]] = {}
        self._swept_at = loop.time()
        self._tick = int(self._swept_at / TICK_S)
        self._timer = loop.call_later(TICK_S, self._sweep)

    def __len__(self) -> int:
        """Number of holders in buckets."""
        return sum(len(bucket) for bucket in self._buckets.values())

    def arm(self, holder: Holder, delay_s: float) -> None:
        """Set the holder's deadline, in place of the one before."""
        holder.deadline = at = self.time() + delay_s
        if at < (holder.bucket - 1) * TICK_S:  # its bucket expires too late
            self._add(holder, int(at / TICK_S) + 1)

    def disarm(self, holder: Holder) -> None:
        holder.deadline = NEVER
        if holder.bucket != NO_BUCKET:
            self._remove(holder)
            holder.bucket = NO_BUCKET

    def close(self) -> None:
        """Stop the wheel: no deadline is noticed any more."""
        self._timer.cancel()

    def _add(self, holder: Holder, bucket: int) -> None:
        if holder.bucket != NO_BUCKET:
            self._remove(holder)
        holder.bucket = bucket = max(bucket, self._tick + 1)
        self._buckets.setdefault(bucket, set()).add(holder)

    def _remove(self, holder: Holder) -> None:
        """Remove a holder from its bucket, and an empty bucket: deadlines of hours would leave many."""
        bucket = self._buckets.get(holder.bucket)
        if bucket is not None:
            bucket.discard(holder)
            if not bucket:
                del self._buckets[holder.bucket]

    def _sweep(self) -> None:
        now = self._loop.time()
        self._timer = self._loop.call_later(TICK_S, self._sweep)
        if now - self._swept_at > MAX_SWEEP_S:
            self._postpone(now - self._swept_at - MAX_SWEEP_S)
        self._swept_at = now
        due: list[Holder] = []
        until = int(now / TICK_S)
        while self._tick < until:
            self._tick += 1
            for holder in self._buckets.pop(self._tick, ()):
                holder.bucket = NO_BUCKET
                due.append(holder)
        if due:
            after_reading(self._loop, partial(self._judge, due, now))

    def _postpone(self, stalled_s: float) -> None:
        for bucket in self._buckets.values():
            for holder in bucket:
                if holder.deadline != NEVER:
                    holder.postpone(stalled_s)

    def _judge(self, due: list[Holder], now: float) -> None:
        for holder in due:
            if holder.deadline <= now:
                holder.deadline = NEVER
                try:
                    holder.on_deadline()
                except Exception as error:  # noqa: BLE001 - other holders must not wait for ever
                    defect(logger, error, "deadline")
            elif holder.deadline != NEVER and holder.bucket == NO_BUCKET:
                self._add(holder, int(holder.deadline / TICK_S) + 1)


class Timeout:
    """``asyncio.timeout`` by a wheel: what has arrived by then is read first, and stalls of the loop do not count."""

    def __init__(self, deadlines: Deadlines, delay_s: float) -> None:
        self.deadline, self.bucket = NEVER, NO_BUCKET
        self._deadlines = deadlines
        self._delay_s = delay_s
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._deadlines.arm(self, self._delay_s)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._deadlines.disarm(self)
        await self._timeout.__aexit__(kind, error, trace)

    def on_deadline(self) -> None:
        self._timeout.reschedule(0.0)

    def postpone(self, stalled_s: float) -> None:
        self.deadline += stalled_s


BURST_BYTES: Final = 64 << 10  # a larger write goes out at once, so that the transport's back-pressure is seen early
BURST_WRITES: Final = 256  # go out at once: one client may request thousands of responses in one read


class WriteBuffer:
    """The writes of one event loop, sent together at the end of its iteration."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.is_new_turn = True  # an iteration has ended since this was set to False
        self._waiting: list[tuple[asyncio.Transport, bytes | None]] = []  # None: close. The list is never replaced

    def write(self, transport: asyncio.Transport, data: bytes) -> None:
        """Write after everything that waits already."""
        waiting = self._waiting
        if not waiting:
            self._loop.call_soon(self._end_turn)
        waiting.append((transport, data))
        if len(data) > BURST_BYTES or len(waiting) >= BURST_WRITES:
            self.flush()

    def close(self, transport: asyncio.Transport) -> None:
        """Close the transport after its waiting writes."""
        if not self._waiting:
            self._loop.call_soon(self._end_turn)
        self._waiting.append((transport, None))

    def _end_turn(self) -> None:
        self.is_new_turn = True
        self.flush()

    def flush(self) -> None:
        waiting = self._waiting[:]
        self._waiting.clear()
        for transport, data in waiting:
            try:
                if data is None:
                    transport.close()
                else:
                    transport.write(data)
            except Exception as error:  # noqa: BLE001 - writes to other transports must not be lost
                if not transport.is_closing():  # else it was aborted in the meantime
                    defect(logger, error, "write_buffer")


TURN_S: Final = 0.002  # of one iteration for requests, after which the others wait for the next iteration
SMALL_READ_BYTES: Final = 1024


class Deferred(Protocol):
    """A client connection with work for a later iteration."""

    is_deferred: bool  # belongs to the turns

    def on_turn(self) -> None:
        """Called in a later iteration, to go on until ``Turns.is_over``."""
        ...


class Turns:
    """Shares the event loop between clients: what is left of a client's work waits for its next turn.

    One read may bring thousands of requests, or a body that takes milliseconds. After ``TURN_S`` of an iteration, all
    clients wait for the next one: those with small reads first, then one of the others at least, each first come, first
    served. So a client with little to do waits for about one iteration, however much the others send.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, write_buffer: WriteBuffer) -> None:
        self._loop = loop
        self._write_buffer = write_buffer
        self._began_at = 0.0
        self._small: deque[Deferred] = deque()
        self._large: deque[Deferred] = deque()
        self._is_scheduled = False

    def is_over(self) -> bool:
        """Whether this iteration has spent its time. 0.1 us."""
        now = perf_counter()
        if self._write_buffer.is_new_turn and not self._is_scheduled:
            self._write_buffer.is_new_turn = False
            self._began_at = now
            return False
        return now - self._began_at > TURN_S

    def defer(self, client: Deferred, size: int) -> None:
        """Call ``client`` in a later iteration. ``size``: bytes that it has to read."""
        if not client.is_deferred:
            client.is_deferred = True
            (self._small if size <= SMALL_READ_BYTES else self._large).append(client)
            if not self._is_scheduled:
                self._is_scheduled = True
                self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._is_scheduled = self._write_buffer.is_new_turn = False
        self._began_at = perf_counter()
        for waiting in (self._small, self._large):
            for number in range(len(waiting)):
                if number and self.is_over():  # one of each kind goes on, however many small reads there are
                    break
                client = waiting.popleft()
                client.is_deferred = False
                try:
                    client.on_turn()
                except Exception as error:  # noqa: BLE001 - the others must not wait for ever
                    defect(logger, error, "turn")
        if (self._small or self._large) and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._run)


class AbortsOnError(Protocol):
    """Something that can be ended by a programming error."""

    def abort_on_error(self, error: Exception) -> None: ...


P = ParamSpec("P")
S = TypeVar("S", bound=AbortsOnError)


def log_exceptions(method: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
    """Call ``abort_on_error`` if ``method`` raises: an event loop would only log the error, and a client would wait."""

    def with_boundary(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the client gets a response in any case
            self.abort_on_error(error)

    with_boundary.__doc__ = method.__doc__
    return with_boundary
