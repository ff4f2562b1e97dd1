"""Concurrency limiter: bounds the number of running requests; further requests wait in a bounded priority queue.

Theory of operation. An engine with more requests than it can batch preempts and recomputes some of them, so beyond its
best concurrency each further request slows down all. Waiting in the router costs the engine nothing. The queue is
bounded in length and in time, because clients give up on late responses: a request that finds the queue full is
rejected at once. The most urgent requests run first; within a priority the queue is first come, first served. Removing
the requests that timed out takes O(their number); everything else is O(1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from typing import Final, Protocol

from routing.schema import PRIORITIES, ConcurrencyConfig


class SharedPermits(Protocol):
    """Permits that several processes share. The request with the highest ``order`` runs first; 0: no request waits."""

    def acquire(self, limit: int, order: float) -> bool:
        """Take a permit, unless all processes have ``limit``, or a request in another one has a higher order."""
        ...

    def release(self) -> None:
        """Give a permit back."""
        ...

    def publish_queue(self, waiting: int, order: float) -> None:
        """Show other processes how many requests wait in this process, and the order of the first."""
        ...

    @property
    def running(self) -> int:
        """Permits in use by all processes together."""
        ...

    @property
    def waiting_in_other_workers(self) -> int:
        """Requests that wait in other worker processes."""
        ...


class SharedLimits(Protocol):
    """State that a process shares with other processes. A method returns None where the process has its own state."""

    def cell(self, name: str) -> memoryview[float] | None:
        """The memory of a ``Budget``: one number."""
        ...

    def permits(self, name: str) -> SharedPermits | None:
        """The permits of a concurrency limiter."""
        ...

    def admits(self, in_flight: int, limit: int) -> bool:
        """Whether all processes together have fewer requests in flight than ``limit``; this one has ``in_flight``."""
        ...


MAX_RETRY_AFTER_S: Final = 60
_MAX_CLOCK_S: Final = 1e9  # above any clock's value, and small enough that a float still resolves microseconds
PACE_WEIGHT: Final = 1 / 32  # of the latest gap between two releases


class RejectionCause(StrEnum):
    """Why a request is not admitted."""

    FULL = "full"  # the queue was full
    TIMEOUT = "timeout"  # it waited for too long


class Waiter(Protocol):
    """A request that waits for a permit."""

    @property
    def priority(self) -> int:
        """0 is the most urgent."""
        ...

    def admit(self) -> None:
        """Run the request, which got a permit. Must not call the limiter."""
        ...

    def on_rejected(self, limiter: ConcurrencyLimiter, cause: RejectionCause) -> None:
        """Reject the request, which left the queue without a permit. Must not call the limiter."""
        ...


class ConcurrencyLimiter:
    """Permits of one pool or task group, and the queue for them.

    ``permits``: where several processes share them; each process then has its own queue. ``share``: this process's part
    of the limits, where several processes share a port but not the permits.
    """

    def __init__(
        self,
        config: ConcurrencyConfig,
        clock: Callable[[], float],
        share: float = 1.0,
        permits: SharedPermits | None = None,
    ) -> None:
        self.running = 0
        self.waiting = 0
        self.rejected = dict.fromkeys(RejectionCause, 0)
        self._clock = clock
        self._permits = permits
        self._queues: list[dict[Waiter, float]] = [{} for _ in range(PRIORITIES)]  # enqueued at, by priority
        self._gap_s: float | None = None  # mean time between releases at the limit; None before the second
        self._released_at: float | None = None  # latest release at the limit; None if a permit has been free since
        self._share = share
        self.configure(config)

    def configure(self, config: ConcurrencyConfig) -> None:
        """Use these limits from now on, and admit what they allow."""
        self._max_running = math.ceil(config.max_running * self._share)
        self._max_waiting = math.ceil(config.max_waiting * self._share)
        self._max_wait_s = config.max_wait_s
        self.admit()

    def remove_limit(self) -> None:
        """Admit every request from now on, whatever other processes do, and give back shared permits."""
        permits, self._permits = self._permits, None
        if permits is not None:
            permits.publish_queue(0, 0.0)
            for _ in range(self.running):
                permits.release()
        self._max_running = 1 << 60
        self.admit()

    def acquire(self, waiter: Waiter) -> bool:
        """Whether the waiter got a permit. Otherwise it is queued, or has been rejected."""
        if not self.waiting and self._take_permit(waiter.priority, None):
            return True
        waiting = self.waiting if self._permits is None else self.waiting + self._permits.waiting_in_other_workers
        if waiting >= self._max_waiting:
            self._reject(waiter, RejectionCause.FULL)
        else:
            self._queues[waiter.priority][waiter] = self._clock()
            self.waiting += 1
            self._publish_queue()
        return False

    def release(self) -> None:
        """Give back the permit of an admitted request that is over."""
        now = self._clock()
        if self._released_at is not None:
            gap = now - self._released_at
            self._gap_s = gap if self._gap_s is None else self._gap_s + PACE_WEIGHT * (gap - self._gap_s)
        self.running -= 1
        if self._permits is not None:
            self._permits.release()
        self.admit()
        running = self.running if self._permits is None else self._permits.running
        self._released_at = now if running >= self._max_running else None

    def cancel(self, waiter: Waiter) -> bool:
        """Remove a waiter that no longer wants a permit; False if it is not queued."""
        if self._queues[waiter.priority].pop(waiter, None) is None:
            return False
        self.waiting -= 1
        self._publish_queue()
        return True

    def expire(self) -> None:
        """Reject waiters that have waited for too long."""
        if not self.waiting:
            return
        deadline = self._clock() - self._max_wait_s
        for queue in self._queues:
            while queue and (first := next(iter(queue.items())))[1] <= deadline:
                del queue[first[0]]
                self.waiting -= 1
                self._publish_queue()
                self._reject(first[0], RejectionCause.TIMEOUT)

    @property
    def retry_after_s(self) -> int:
        """When a permit may be free at the current pace: seconds, 1 to ``MAX_RETRY_AFTER_S``."""
        wait_s = (self._gap_s or 0.0) * (self.waiting + 1)
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(wait_s)))

    def admit(self) -> None:
        """Admit as many waiters as there are permits, the most urgent first."""
        while self.waiting:
            queue = next(queue for queue in self._queues if queue)
            waiter, since = next(iter(queue.items()))
            if not self._take_permit(waiter.priority, since):
                return
            del queue[waiter]
            self.waiting -= 1
            self._publish_queue()
            waiter.admit()

    def _take_permit(self, priority: int, since: float | None) -> bool:
        """Take a permit for a request that has waited since the time ``since``; None: it has just arrived."""
        if self._permits is None:
            is_free = self.running < self._max_running
        else:
            order = _order(priority, self._clock() if since is None else since)
            is_free = self._permits.acquire(self._max_running, order)
        self.running += is_free
        return is_free

    def _publish_queue(self) -> None:
        if self._permits is None:
            return
        order = 0.0
        for priority, queue in enumerate(self._queues):
            if queue:
                order = _order(priority, next(iter(queue.values())))
                break
        self._permits.publish_queue(self.waiting, order)

    def _reject(self, waiter: Waiter, cause: RejectionCause) -> None:
        self.rejected[cause] += 1
        waiter.on_rejected(self, cause)


def _order(priority: int, since: float) -> float:
    """Order by urgency, then by waiting time. ``since``: seconds of a clock that all processes share."""
    return (PRIORITIES - priority) * _MAX_CLOCK_S - since
