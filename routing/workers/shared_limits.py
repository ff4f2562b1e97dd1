"""Limits that hold for all workers together, in shared memory: rates, permits, and requests in flight.

Theory of operation. A rate is one number, which every worker reads and writes (``routing/limits/budgets.py``).
Permits of an admission queue are counted by those who hold them: each worker has a cell of its own, so that the parent
releases a dead worker's permits by clearing its row. Acquiring a permit reads the sum and increments the own cell,
under a lock on the memory's file, which the kernel releases when its holder dies; releasing takes no lock. A worker
that is stopped while it holds the lock, or has the first request in order, blocks others only briefly: they try the
lock for about a millisecond, then wait for the next tick, and ignore workers that do not tick. Requests wait in their
own worker. Each worker publishes the order of its first waiting request, and none acquires a permit before that of
another worker which comes first. All workers use the same virtual times and tags of flows, without a lock: two that
admit requests of one flow in the same microsecond may charge one of them only. A tag is found by a hash, so that two
flows may have one tag, and one share of the permits. Permits that other workers release are noticed at the next tick.
Requests in flight are counted as permits are, without a lock. The parent assigns slots to names; a name without one is
counted by each worker for itself.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from time import monotonic
from typing import Final

from routing.http.auth import Rate, rates_of
from routing.limits.budgets import full_at
from routing.limits.concurrency import FLOW_CELLS, HIGHEST
from routing.proxy.admission_queues import configured_queues, queue_name
from routing.schema import RouterConfig

TICK_S: Final = 0.05
WAITING_TICK_S: Final = 0.005  # while requests wait for a permit
RATES: Final = 32_768  # slots of rates, of which a key has two at most
QUEUES: Final = 1_024
FLOWS: Final = 4_096  # of a queue, with tags of their own
TAGS: Final = HIGHEST + 1 + FLOWS * FLOW_CELLS  # cells of a queue
ALIVE_S: Final = 0.1  # a worker that has not ticked for this long is ignored
_LOCK_TRIES: Final = 200  # about a millisecond
_CELL_BYTES: Final = 8


class LimitsMemory:
    """The memory, with a row for each worker. It exists as long as any process has ``fd`` open."""

    def __init__(self, fd: int, rows: int) -> None:
        self.fd = fd
        self.rows = rows
        memory = memoryview(mmap.mmap(fd, _memory_bytes(rows)))
        ends = [_CELL_BYTES * (RATES + QUEUES * rows * parts) for parts in range(4)]
        self.rates = memory[: ends[0]].cast("d")
        self._running = memory[ends[0] : ends[1]].cast("q")
        self._waiting = memory[ends[1] : ends[2]].cast("q")
        self._first_orders = memory[ends[2] : ends[3]].cast("d")
        ends += [ends[3] + _CELL_BYTES * rows * parts for parts in (1, 2)]
        self.ticks = memory[ends[3] : ends[4]].cast("d")  # when each row's worker last ticked
        self.in_flight = memory[ends[4] : ends[5]].cast("q")  # requests of each row's worker
        self._tags = memory[ends[5] :].cast("d")

    @classmethod
    def create(cls, rows: int) -> LimitsMemory:
        """Create the memory for this number of rows; all cells are 0. Unused slots take no physical memory."""
        fd = os.memfd_create("warmpath-limits")
        os.ftruncate(fd, _memory_bytes(rows))
        return cls(fd, rows)

    @cached_property
    def lock_fd(self) -> int:
        """The file, opened again by this process, because a lock belongs to one opening of a file."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR)

    def running(self, queue: int) -> memoryview[int]:
        """Permits that each row holds."""
        return self._running[queue * self.rows : (queue + 1) * self.rows]

    def waiting(self, queue: int) -> memoryview[int]:
        """Waiting requests of each row."""
        return self._waiting[queue * self.rows : (queue + 1) * self.rows]

    def first_orders(self, queue: int) -> memoryview[float]:
        """Order of the first waiting request of each row; 0 without one."""
        return self._first_orders[queue * self.rows : (queue + 1) * self.rows]

    def tags(self, queue: int) -> memoryview[float]:
        """The virtual times of a queue, and the tags of its flows."""
        return self._tags[queue * TAGS : (queue + 1) * TAGS]

    def clear(self, row: int) -> None:
        """Release everything that a row's worker held."""
        for cells in (self._running, self._waiting, self._first_orders):
            for index in range(row, len(cells), self.rows):
                if cells[index]:
                    cells[index] = 0
        self.ticks[row], self.in_flight[row] = 0.0, 0

    def ticks_since(self, row: int, age_s: float) -> bool:
        """Whether the worker of a row has ticked within this time."""
        return self.ticks[row] > monotonic() - age_s


def _memory_bytes(rows: int) -> int:
    return _CELL_BYTES * (RATES + QUEUES * (3 * rows + TAGS) + 2 * rows)


class WorkerPermits:
    """The permits of one admission queue, as used by one worker."""

    def __init__(self, memory: LimitsMemory, queue: int, row: int) -> None:
        self._running, self._waiting = memory.running(queue), memory.waiting(queue)
        self._first_orders, self._ticks = memory.first_orders(queue), memory.ticks
        self.tags, self.workers = memory.tags(queue), memory.rows
        self._lock_fd, self._row = memory.lock_fd, row

    def acquire(self, limit: int, order: float) -> bool:
        """Acquire a permit; False if there is none, or a request of another worker comes first."""
        if sum(self._running) >= limit or self._is_behind(order) or not self._lock():
            return False
        try:
            if sum(self._running) >= limit:
                return False
            self._running[self._row] += 1
            return True
        finally:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    def release(self) -> None:
        """Release a permit."""
        self._running[self._row] -= 1

    def publish_queue(self, waiting: int, order: float) -> None:
        """Publish the number of waiting requests, and the order of the first."""
        self._waiting[self._row] = waiting
        self._first_orders[self._row] = order

    @property
    def running(self) -> int:
        """Permits held by all workers."""
        return sum(self._running)

    @property
    def waiting_in_other_workers(self) -> int:
        """Waiting requests of other workers."""
        return sum(self._waiting) - self._waiting[self._row]

    def _is_behind(self, order: float) -> bool:
        """Whether a request of another worker comes first; workers that do not tick are ignored."""
        if max(self._first_orders) <= order:
            return False
        since = monotonic() - ALIVE_S
        rows = (row for row, first_order in enumerate(self._first_orders) if first_order > order and row != self._row)
        return any(self._ticks[row] > since for row in rows)

    def _lock(self) -> bool:
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.sched_yield()
            else:
                return True
        return False


class WorkerLimits:
    """The shared limits of one worker, by name."""

    def __init__(self, memory: LimitsMemory, row: int) -> None:
        self._memory, self._row = memory, row
        self._rates: Mapping[str, int] = {}
        self._queues: Mapping[str, int] = {}

    def configure(self, rates: Mapping[str, int], queues: Mapping[str, int]) -> None:
        """Use these slots from now on."""
        self._rates, self._queues = rates, queues

    def cell(self, name: str) -> memoryview[float] | None:
        """The memory of a rate's ``Budget``; None if the rate has no slot."""
        slot = self._rates.get(name)
        return None if slot is None else self._memory.rates[slot : slot + 1]

    def permits(self, name: str) -> WorkerPermits | None:
        """The permits of an admission queue; None if it has no slot."""
        slot = self._queues.get(name)
        return None if slot is None else WorkerPermits(self._memory, slot, self._row)

    def admits(self, in_flight: int, limit: int) -> bool:
        """Whether all workers together have fewer requests in flight than ``limit``; this one has ``in_flight``."""
        cells = self._memory.in_flight
        cells[self._row] = in_flight
        if sum(cells) >= limit:
            return False
        cells[self._row] = in_flight + 1
        return True

    def tick(self, in_flight: int) -> None:
        """Show that this worker is running, and how many requests are in flight in it."""
        self._memory.ticks[self._row] = monotonic()
        self._memory.in_flight[self._row] = in_flight


def assign_queues(config: RouterConfig, previous_slots: Mapping[str, int], memory: LimitsMemory) -> dict[str, int]:
    """A slot for each admission queue; the slot of a removed one is free once no request runs there."""
    free_slots = (queue for queue in range(QUEUES) if not any(memory.running(queue)))
    return _assigned((queue_name(key) for key, _ in configured_queues(config)), previous_slots, free_slots)


def assign_rates(config: RouterConfig, previous_slots: Mapping[str, int], memory: LimitsMemory) -> dict[str, int]:
    """A slot for each rate of an API key. A changed rate continues from the level of the previous one."""
    rates = {rate.name: rate for key in (config.access.keys if config.access else ()) for rate in rates_of(key)}
    slots = _assigned(rates, previous_slots, range(RATES))
    previous = {
        (rate.digest, rate.unit): (rate, slot)
        for rate, slot in ((Rate.parse(name), slot) for name, slot in previous_slots.items())
    }
    now = monotonic()
    for name in slots.keys() - previous_slots.keys():
        rate = rates[name]
        level = rate.capacity
        if (replaced := previous.get((rate.digest, rate.unit))) is not None:
            previous_rate, slot = replaced
            level = previous_rate.capacity - max(0.0, memory.rates[slot] - now) * previous_rate.per_s
        memory.rates[slots[name]] = full_at(level, rate.per_s, rate.capacity, now)
    return slots


def _assigned(names: Iterable[str], previous_slots: Mapping[str, int], slots: Iterable[int]) -> dict[str, int]:
    """The slot that each name had, or one of ``slots`` that no name had, as long as there are any."""
    distinct = list(dict.fromkeys(names))
    used = set(previous_slots.values())
    free_slots = (slot for slot in slots if slot not in used)
    unchanged = {name: previous_slots[name] for name in distinct if name in previous_slots}
    return unchanged | dict(zip((name for name in distinct if name not in previous_slots), free_slots, strict=False))
