"""Concurrency limiter: bounds the number of running requests; further requests wait in a bounded, fair queue.

Theory of operation. An engine with more requests than it can batch preempts and recomputes some of them, so beyond its
best concurrency each further request slows down all. Waiting in the router costs the engine nothing. The queue is
bounded in length and in time, because clients give up on late responses.

Permits are shared among *flows* (tenants, API keys or task groups) by tokens of work: start-time fair queueing (Goyal,
Vin and Cheng, 1996). Each flow has a start tag, the virtual time at which its next request is due. A request moves the
tag on by its cost, which is its work by its weight, and the flow with the lowest tag is next. The virtual time is the
tag of the latest admitted request; a flow without waiting requests starts there, so that it gets no credit for the
past. The work is an estimate until the request has ended, and the difference is then added to the flow's next request,
as far as the start at the virtual time has not settled it meanwhile. An idle limiter forgives all debts.

The most urgent requests go first: each priority is a fair queue of its own. A request that has waited for half of
``max_wait_s`` counts as most urgent, so that none starves. A full queue rejects the newest, least urgent request of the
flow with the most work waiting, relative to its weight: this flow has at least its share of the queue. Each operation
takes O(log n), amortized; a full queue compares all flows.

Among the requests of a flow with the same priority, those with an objective for TTFT that can still be kept go first,
the one with the least slack at once; the rest go in the order of their arrival, as does one that has waited for half of
``max_wait_s``.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection
from enum import StrEnum
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from operator import attrgetter
from typing import Final, Protocol, TypeAlias
from zlib import crc32

from routing.schema import PRIORITIES, ConcurrencyConfig, ObjectiveMissed


class SharedPermits(Protocol):
    """Permits that several processes share. The request with the highest ``order`` runs first; 0: no request waits."""

    tags: memoryview[float]  # virtual times of the priorities, the highest tag, and ``FLOW_CELLS`` of flows, by hash
    workers: int  # at most, with those that drain

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
_MAX_TAG: Final = 1e15  # above any tag of true usage, and small enough that a float still resolves a few tokens
PACE_WEIGHT: Final = 1 / 32  # of the latest gap between two releases
LENGTH_WEIGHT: Final = 1 / 8  # of the latest response in a flow's mean of generated tokens
URGENT_AFTER: Final = 0.5  # of ``max_wait_s``
MIN_FLOWS: Final = 256  # with fewer, idle ones are kept
Tags: TypeAlias = "list[float] | memoryview[float]"
MIN_TOKENS: Final = 16  # that a request costs at least, as its permit is in use all the same
RAISED_AT_ONCE: Final = 256  # requests that become most urgent in one call
HIGHEST: Final = PRIORITIES  # cell of the highest tag of any flow
FLOW_CELLS: Final = 2 * PRIORITIES  # of each priority: the tag, and how far starts at the virtual time have raised it


class RejectionCause(StrEnum):
    """Why a request is not admitted."""

    FULL = "full"  # the queue was full
    TIMEOUT = "timeout"  # it waited for too long
    OBJECTIVE = "objective"  # its objective for TTFT can no longer be kept


class Waiter(Protocol):
    """A request that waits for a permit."""

    @property
    def priority(self) -> int:
        """0 is the most urgent."""
        ...

    @property
    def flow(self) -> str:
        """Whose share of the permits the request uses."""
        ...

    @property
    def weight(self) -> float:
        """The larger, the less of its flow's share the request uses."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Estimated tokens of its prompt that are not cached."""
        ...

    @property
    def latest_start(self) -> float:
        """When it has to be admitted for its objective for TTFT; infinity without one."""
        ...

    def admit(self) -> None:
        """Run the request, which got a permit. Must not call the limiter."""
        ...

    def on_rejected(self, limiter: ConcurrencyLimiter, cause: RejectionCause) -> None:
        """Reject the request, which left the queue without a permit. Must not call the limiter."""
        ...


class Flow:
    """Requests that share one part of the permits."""

    def __init__(self, name: str, generated: float) -> None:
        self.name = name
        self.generated = generated  # mean generated tokens of a response
        self.requests = 0  # waiting and running
        self.lanes: dict[int, Lane] = {}  # by priority
        self.waiting_cost = 0.0


class Lane:
    """Requests of one flow with one priority."""

    def __init__(self, flow: Flow, priority: int, tags: Tags, at: int) -> None:
        self.flow = flow
        self.priority = priority
        self.waiters: OrderedDict[Waiter, float] = OrderedDict()  # their costs, the first to be admitted first
        self.due: list[tuple[float, int, Waiter]] = []  # heap: waiters with an objective, and ones that have left
        self.debt = 0.0  # cost of requests that have ended, beyond what was estimated
        self.listed_tag = math.inf  # in its valid entry among the lanes of its priority; infinity without one
        self._tags, self._at = tags, at  # the cells of the flow, which other processes may change
        self.tag = tags[at]  # of its next request; stays until that is admitted, as other processes know it

    @property
    def raised(self) -> float:
        """How far starts at the virtual time have raised the tag, less what has been settled by that."""
        return self._tags[self._at + 1]

    def next_waiter(self, now: float) -> Waiter:
        """The waiter with the least slack among those whose objective can still be kept, else the first."""
        while self.due:
            latest_start, _, waiter = self.due[0]
            if latest_start >= now and waiter in self.waiters:
                return waiter
            heappop(self.due)
        return next(iter(self.waiters))

    def start(self, virtual_time: float = -math.inf) -> None:
        """Set the tag while no request waits."""
        due = self._tags[self._at] + self.debt
        self._tags[self._at + 1] += max(0.0, virtual_time - due)
        self.tag = self._tags[self._at] = max(virtual_time, due)
        self.debt = 0.0

    def charge(self, cost: float) -> None:
        """A request of this cost is admitted."""
        self._tags[self._at] += max(0.0, cost + self.debt)
        self.tag = self._tags[self._at]
        self.debt = min(0.0, cost + self.debt)

    def correct(self, difference: float, raised: float) -> float:
        """A request cost so much more than was charged when the tag was ``raised``; the tag with all debts.

        Had this been known then, the tag would be what the virtual time made of it since.
        """
        settled = max(0.0, self.raised - raised)
        if difference > 0.0:
            settled = min(settled, difference)
            self._tags[self._at + 1] -= settled
            self.debt += difference - settled
        elif not settled:
            self.debt += difference
        if not self.waiters:
            self.start()
        return self._tags[self._at] + self.debt

    def detach(self) -> None:
        """Share the tag with no other process any more."""
        self._tags, self._at = [self._tags[self._at], self.raised], 0


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
        self.waiting = 0
        self.rejected = dict.fromkeys(RejectionCause, 0)
        self._clock = clock
        self._permits = permits
        # And their costs, how far their tags were raised, and when they were admitted.
        self._running: dict[Waiter, tuple[Lane, float, float, float]] = {}
        self._waiting: OrderedDict[Waiter, tuple[Lane, float]] = OrderedDict()  # and when they arrived, in this order
        self._ageing: OrderedDict[Waiter, float] = OrderedDict()  # those that are not most urgent yet
        self._flows: dict[str, Flow] = {}
        self._max_flows = MIN_FLOWS  # beyond that, idle ones are dropped
        self._tags: Tags = [0.0] * (HIGHEST + 1) if permits is None else permits.tags
        self._lanes: list[list[tuple[float, int, Lane]]] = [[] for _ in range(PRIORITIES)]  # heaps, by tag
        self._numbers = count()  # break ties
        self._due: list[tuple[float, int, Waiter]] = []  # as of a lane, of all
        self._generated = self._held_s = 0.0  # mean generated tokens of a response, and time that it held its permit
        self._gap_s: float | None = None  # mean time between releases at the limit; None before the second
        self._released_at: float | None = None  # latest release at the limit; None if a permit has been free since
        self._share = share
        self.configure(config)

    @property
    def running(self) -> int:
        """Permits that this process holds."""
        return len(self._running)

    def configure(self, config: ConcurrencyConfig) -> None:
        """Use these limits from now on, and admit what they allow."""
        self._max_running = math.ceil(config.max_running * self._share)
        self._max_waiting = math.ceil(config.max_waiting * self._share)
        self._own_waiting = math.ceil(self._max_waiting / (1 if self._permits is None else self._permits.workers))
        self._max_wait_s = config.max_wait_s
        self._sheds = config.on_objective_missed is ObjectiveMissed.SHED
        self.admit()

    def remove_limit(self) -> None:
        """Admit every request from now on, whatever other processes do, and give back shared permits."""
        permits, self._permits = self._permits, None
        if permits is not None:
            permits.publish_queue(0, 0.0)
            for _ in range(self.running):
                permits.release()
            self._tags = list(self._tags[: HIGHEST + 1])  # another queue may use the memory from now on
            for flow in self._flows.values():
                for lane in flow.lanes.values():
                    lane.detach()
        self._max_running = 1 << 60
        self.admit()

    def acquire(self, waiter: Waiter) -> bool:
        """Whether the waiter got a permit. Otherwise it is queued, or has been rejected."""
        lane = self._lane(self._flow(waiter.flow), waiter.priority)
        if not lane.waiters:
            lane.start(self._tags[lane.priority])
        cost = _cost(waiter, waiter.prompt_tokens + lane.flow.generated)
        if not self.waiting and self._take_permit(lane):
            lane.flow.requests += 1
            self._charge(waiter, lane, cost)
            return True
        # A worker may use its part of the queue though others have filled it, because it can displace none of theirs.
        if self.waiting >= self._own_waiting and self._waiting_anywhere() >= self._max_waiting:
            displaced = self._displaced_by(waiter, lane.flow, cost)
            if displaced is None:
                self._reject(waiter, RejectionCause.FULL)
                return False
            self.cancel(displaced)
            self._reject(displaced, RejectionCause.FULL)
        now = self._clock()
        if lane.priority:
            self._ageing[waiter] = now
        lane.flow.requests += 1
        self.waiting += 1
        self._enqueue(waiter, lane, cost, now)
        self._publish_queue()
        return False

    def release(self, waiter: Waiter, usage: tuple[int, int] | None = None, *, was_sent: bool = True) -> None:
        """Give back the permit of an admitted request that is over.

        ``usage``: uncached and generated tokens. Without it the request has generated as others do in this time, and
        costs its estimate at least; but nothing if it was not sent.
        """
        now = self._clock()
        if self._released_at is not None:
            gap = now - self._released_at
            self._gap_s = gap if self._gap_s is None else self._gap_s + PACE_WEIGHT * (gap - self._gap_s)
        lane, cost, raised, since = self._running.pop(waiter)
        lane.flow.requests -= 1
        actual_cost = 0.0
        if usage is not None:
            actual_cost = _cost(waiter, sum(usage))
            lane.flow.generated += LENGTH_WEIGHT * (usage[1] - lane.flow.generated)
            self._generated += LENGTH_WEIGHT * (usage[1] - self._generated)
            self._held_s += LENGTH_WEIGHT * (now - since - self._held_s)
        elif was_sent:
            generated = (now - since) * self._generated / self._held_s if self._held_s else 0.0
            actual_cost = max(cost, _cost(waiter, waiter.prompt_tokens + generated))
        self._tags[HIGHEST] = max(self._tags[HIGHEST], lane.correct(actual_cost - cost, raised))
        if self._permits is not None:
            self._permits.release()
        if not (self._running_anywhere() or self._waiting_anywhere()):
            for priority in range(PRIORITIES):
                self._tags[priority] = self._tags[HIGHEST]
        self.admit()
        self._released_at = now if self._running_anywhere() >= self._max_running else None

    def cancel(self, waiter: Waiter) -> bool:
        """Remove a waiter that no longer wants a permit; False if it is not queued."""
        if waiter not in self._waiting:
            return False
        lane, _ = self._dequeue(waiter)
        lane.flow.requests -= 1
        self._publish_queue()
        return True

    def expire(self) -> None:
        """Reject waiters that have waited for too long."""
        deadline = self._clock() - self._max_wait_s
        while self.waiting:
            waiter, (_, since) = next(iter(self._waiting.items()))
            if since > deadline:
                break
            self.cancel(waiter)
            self._reject(waiter, RejectionCause.TIMEOUT)
        while self._sheds and self._due and (self._due[0][0] < self._clock() or self._due[0][2] not in self._waiting):
            waiter = heappop(self._due)[2]
            if self.cancel(waiter):
                self._reject(waiter, RejectionCause.OBJECTIVE)

    @property
    def retry_after_s(self) -> int:
        """When a permit may be free at the current pace: seconds, 1 to ``MAX_RETRY_AFTER_S``."""
        wait_s = (self._gap_s or 0.0) * (self.waiting + 1)
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(wait_s)))

    def admit(self) -> None:
        """Admit as many waiters as there are permits, the most urgent first, and among them by the tags of flows."""
        if self._ageing:
            self._raise_priorities()
        while self.waiting:
            lane = self._first_lane()
            if lane is None or not self._take_permit(lane):
                return
            waiter, now = next(iter(lane.waiters)), self._clock()
            if lane.due and self._waiting[waiter][1] > now - URGENT_AFTER * self._max_wait_s:
                waiter = lane.next_waiter(now)
            _, cost = self._dequeue(waiter)
            self._charge(waiter, lane, cost)
            self._publish_queue()
            waiter.admit()

    def _take_permit(self, lane: Lane) -> bool:
        """Take a permit for the next request of a lane."""
        if self._permits is None:
            return len(self._running) < self._max_running
        return self._permits.acquire(self._max_running, _order(lane))

    def _charge(self, waiter: Waiter, lane: Lane, cost: float) -> None:
        self._tags[lane.priority] = max(self._tags[lane.priority], lane.tag)
        lane.charge(cost)
        self._tags[HIGHEST] = max(self._tags[HIGHEST], lane.tag)
        self._running[waiter] = (lane, cost, lane.raised, self._clock())

    def _enqueue(self, waiter: Waiter, lane: Lane, cost: float, since: float) -> None:
        """Append a waiter to its lane, which has started."""
        flow = lane.flow
        lane.waiters[waiter] = cost
        self._waiting[waiter] = (lane, since)
        if lane.tag < lane.listed_tag:  # a correction may have lowered it
            lane.listed_tag = lane.tag
            heappush(self._lanes[lane.priority], (lane.tag, next(self._numbers), lane))
        flow.waiting_cost += cost
        if waiter.latest_start < math.inf:
            entry = (waiter.latest_start, next(self._numbers), waiter)
            _add_due(lane.due, entry, lane.waiters)
            if self._sheds:
                _add_due(self._due, entry, self._waiting)

    def _dequeue(self, waiter: Waiter) -> tuple[Lane, float]:
        """Remove a waiter; its lane and cost."""
        lane, _ = self._waiting.pop(waiter)
        self._ageing.pop(waiter, None)
        cost = lane.waiters.pop(waiter)
        lane.flow.waiting_cost -= cost
        self.waiting -= 1
        return lane, cost

    def _raise_priorities(self) -> None:
        """Make those most urgent that have waited for half of the longest wait."""
        before = self._clock() - URGENT_AFTER * self._max_wait_s
        raised = 0
        while self._ageing and raised < RAISED_AT_ONCE:
            waiter, since = next(iter(self._ageing.items()))
            if since > before:
                break
            del self._ageing[waiter]
            lane = self._waiting[waiter][0]
            cost = lane.waiters.pop(waiter)
            lane.flow.waiting_cost -= cost
            urgent = self._lane(lane.flow, 0)
            if not urgent.waiters:
                urgent.start(self._tags[0])
            self._enqueue(waiter, urgent, cost, since)  # keeps its place among those by arrival
            raised += 1
        if raised:
            self._publish_queue()

    def _first_lane(self) -> Lane | None:
        """The lane whose request is next; None if no request waits."""
        for lanes in self._lanes:
            while lanes:
                tag, _, lane = lanes[0]
                if tag != lane.listed_tag:  # superseded
                    heappop(lanes)
                elif not lane.waiters:
                    lane.listed_tag = math.inf
                    heappop(lanes)
                elif tag < lane.tag:  # it was charged since
                    lane.listed_tag = lane.tag
                    heapreplace(lanes, (lane.tag, next(self._numbers), lane))
                else:
                    return lane
        return None

    def _displaced_by(self, waiter: Waiter, flow: Flow, cost: float) -> Waiter | None:
        """The request that makes room for another one; None if that itself is rejected."""
        heaviest = max(self._flows.values(), key=attrgetter("waiting_cost"))
        least_urgent = 0
        if flow.waiting_cost + cost >= heaviest.waiting_cost:
            heaviest, least_urgent = flow, waiter.priority + 1
        for priority in range(PRIORITIES - 1, least_urgent - 1, -1):
            lane = heaviest.lanes.get(priority)
            if lane is not None and lane.waiters:
                newest = reversed(lane.waiters)
                # Those that have become most urgent by waiting stay while there are others.
                return next((other for other in newest if other.priority == priority), next(reversed(lane.waiters)))
        return None

    def _flow(self, name: str) -> Flow:
        flow = self._flows.get(name)
        if flow is None:
            if len(self._flows) >= self._max_flows:
                self._flows = {name: flow for name, flow in self._flows.items() if not self._is_idle(flow)}
                self._max_flows = max(MIN_FLOWS, 2 * len(self._flows))
                for lanes in self._lanes:
                    lanes[:] = [entry for entry in lanes if entry[2].flow is self._flows.get(entry[2].flow.name)]
                    heapify(lanes)
            flow = self._flows[name] = Flow(name, self._generated)
        return flow

    def _is_idle(self, flow: Flow) -> bool:
        """Whether nothing is lost without a flow: none of its requests is here, and its tags are in the past."""
        lanes = flow.lanes.items()
        is_past = self._permits is not None or all(lane.tag <= self._tags[priority] for priority, lane in lanes)
        return is_past and not flow.requests

    def _lane(self, flow: Flow, priority: int) -> Lane:
        lane = flow.lanes.get(priority)
        if lane is None:
            if self._permits is None:
                lane = Lane(flow, priority, [self._tags[priority], 0.0], 0)
            else:
                first = HIGHEST + 1
                flows = (len(self._tags) - first) // FLOW_CELLS
                at = first + crc32(flow.name.encode()) % flows * FLOW_CELLS + 2 * priority
                lane = Lane(flow, priority, self._tags, at)
            flow.lanes[priority] = lane
        return lane

    def _running_anywhere(self) -> int:
        return self.running if self._permits is None else self._permits.running

    def _waiting_anywhere(self) -> int:
        return self.waiting if self._permits is None else self.waiting + self._permits.waiting_in_other_workers

    def _publish_queue(self) -> None:
        if self._permits is None:
            return
        lane = self._first_lane()
        self._permits.publish_queue(self.waiting, 0.0 if lane is None else _order(lane))

    def _reject(self, waiter: Waiter, cause: RejectionCause) -> None:
        self.rejected[cause] += 1
        waiter.on_rejected(self, cause)


def _add_due(
    due: list[tuple[float, int, Waiter]], entry: tuple[float, int, Waiter], waiting: Collection[Waiter]
) -> None:
    """Add an entry to a heap, which keeps not many more of waiters that have left than there are others."""
    heappush(due, entry)
    if len(due) > 2 * len(waiting) + MIN_FLOWS:
        due[:] = [entry for entry in due if entry[2] in waiting]
        heapify(due)


def _cost(waiter: Waiter, tokens: float) -> float:
    return max(MIN_TOKENS, tokens) / waiter.weight


def _order(lane: Lane) -> float:
    """Order by urgency, then by tag, among all processes."""
    return (PRIORITIES - lane.priority) * _MAX_TAG - min(lane.tag, _MAX_TAG - 1)
