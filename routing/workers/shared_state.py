"""State that workers share in memory: loads of targets, rates of API keys, and permits of admission queues.

Theory of operation, loads. The board has a row for each worker and a column for each target. A worker writes only to
its own row and reads the others every ``PERIOD_S``, outside of any request: it writes the loads that changed, reads the
rows that changed, and adds the differences to its load tracker, so that strategies choose by the sum. Waiting tokens
are written without those that are probably prefilled by now. There is no lock: a cell is one aligned word, and a reader
that sees two cells of different times is wrong by a request, for a few milliseconds. The parent assigns columns. A
column keeps its target while that is configured, and is reassigned only once it is zero in every row. Targets beyond
``COLUMNS`` have none: each worker then knows only its own share of their load.

Theory of operation, limits. A rate is one number, which every worker reads and writes (``routing/limits/budgets.py``).
Permits of an admission queue are counted by those who hold them: each worker has a cell of its own, so that the parent
releases a dead worker's permits by clearing its row. Acquiring a permit reads the sum and increments the own cell,
under a lock on the memory's file, which the kernel releases when its holder dies; releasing takes no lock. A worker
that is stopped while it holds the lock, or has the first request in order, blocks others only briefly: they try the
lock for about a millisecond, then wait for the next tick, and ignore workers that do not tick. Requests wait in their
own worker. Each worker publishes the order of its first waiting request, and none acquires a permit before that of
another worker which comes first. Permits that other workers release are noticed at the next tick. The parent assigns
slots to names; a name without one is counted by each worker for itself.
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
from routing.http.tasks import Background, Periodic
from routing.limits.budgets import full_at
from routing.proxy.admission_queues import configured_queues, queue_name
from routing.proxy.router import Router
from routing.schema import RouterConfig
from routing.types import TargetId

PERIOD_S: Final = 0.005
RATES: Final = 32_768  # slots of rates, of which a key has two at most
QUEUES: Final = 1_024
COLUMNS: Final = 4096
ALIVE_S: Final = 0.1  # a worker that has not ticked for this long is ignored
_LOCK_TRIES: Final = 200  # about a millisecond
_CELL_BYTES: Final = 8
_ROW_CELLS: Final = 1 + 2 * COLUMNS  # requests in flight; for each target, running requests and waiting tokens


def limits_bytes(rows: int) -> int:
    """Size of ``LimitsMemory``. Unused slots take no physical memory."""
    return _CELL_BYTES * (RATES + QUEUES * 3 * rows + rows)


class LimitsMemory:
    """The part of the board for limits."""

    def __init__(self, memory: memoryview, rows: int, fd: int) -> None:
        self.rows = rows
        self._fd = fd
        boundaries = [_CELL_BYTES * (RATES + QUEUES * rows * parts) for parts in range(4)]
        self.rates = memory[: boundaries[0]].cast("d")
        self._running = memory[boundaries[0] : boundaries[1]].cast("q")
        self._waiting = memory[boundaries[1] : boundaries[2]].cast("q")
        self._first_orders = memory[boundaries[2] : boundaries[3]].cast("d")
        self.ticks = memory[boundaries[3] :].cast("d")  # when each row's worker last ticked

    @cached_property
    def lock_fd(self) -> int:
        """The file, opened again by this process, because a lock belongs to one opening of a file."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR)

    def running(self, queue: int) -> memoryview[int]:
        """Permits that each row holds."""
        return self._running[queue * self.rows : (queue + 1) * self.rows]

    def waiting(self, queue: int) -> memoryview[int]:
        """Waiting requests of each row."""
        return self._waiting[queue * self.rows : (queue + 1) * self.rows]

    def first_orders(self, queue: int) -> memoryview[float]:
        """Order of the first waiting request of each row; 0 without one."""
        return self._first_orders[queue * self.rows : (queue + 1) * self.rows]

    def clear(self, row: int) -> None:
        """Release everything that a row's worker held."""
        for cells in (self._running, self._waiting, self._first_orders):
            for index in range(row, len(cells), self.rows):
                if cells[index]:
                    cells[index] = 0
        self.ticks[row] = 0.0


class WorkerPermits:
    """The permits of one admission queue, as used by one worker."""

    def __init__(self, memory: LimitsMemory, queue: int, row: int) -> None:
        self._running, self._waiting = memory.running(queue), memory.waiting(queue)
        self._first_orders, self._ticks = memory.first_orders(queue), memory.ticks
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

    def tick(self) -> None:
        """Show that this worker is running."""
        self._memory.ticks[self._row] = monotonic()


class SharedBoard:
    """The board: memory with a row for each worker. It exists as long as any process has ``fd`` open."""

    def __init__(self, fd: int, rows: int) -> None:
        self.fd = fd
        self.rows = rows
        loads_bytes = rows * _ROW_CELLS * _CELL_BYTES
        memory = memoryview(mmap.mmap(fd, loads_bytes + limits_bytes(rows)))
        self._cells = memory[:loads_bytes].cast("q")
        self.limits = LimitsMemory(memory[loads_bytes:], rows, fd)

    @classmethod
    def create(cls, rows: int) -> SharedBoard:
        """Create the memory for this number of rows; all cells are 0."""
        fd = os.memfd_create("warmpath-loads")
        os.ftruncate(fd, rows * _ROW_CELLS * _CELL_BYTES + limits_bytes(rows))
        return cls(fd, rows)

    def row(self, number: int) -> memoryview[int]:
        """The cells of a row."""
        return self._cells[number * _ROW_CELLS : (number + 1) * _ROW_CELLS]

    def clear(self, number: int) -> None:
        """Clear the row of a worker that has exited."""
        self.limits.clear(number)
        self.row(number)[:] = memoryview(bytes(_CELL_BYTES * _ROW_CELLS)).cast("q")

    def is_free(self, column: int) -> bool:
        """Whether no worker has a request at the column's target."""
        cells = self._cells
        indexes = (number * _ROW_CELLS + first_cell(column) for number in range(self.rows))
        return not any(cells[index] or cells[index + 1] for index in indexes)


def first_cell(column: int) -> int:
    """Index of a column's first cell in a row."""
    return 1 + 2 * column


def assign_columns(targets: Iterable[str], previous_slots: Mapping[str, int], board: SharedBoard) -> dict[str, int]:
    """A column for each target, as long as there are any."""
    return _assigned(targets, previous_slots, filter(board.is_free, range(COLUMNS)))


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


class SharedLoads:
    """One worker's exchange of loads."""

    def __init__(self, router: Router, board: SharedBoard, row: int) -> None:
        self._router = router
        self._own = board.row(row)
        self._others = [board.row(number) for number in range(board.rows) if number != row]
        self._columns: dict[TargetId, int] = {}
        self._targets: dict[int, TargetId] = {}
        self._last_read: list[memoryview[int]] = []  # each other row
        self._sums: list[int] = []  # of those, by cell
        self._position: int | None = None  # in the load tracker's journal; None: write everything
        self._waiting: set[TargetId] = set()  # targets at which a prompt of this worker is being prefilled
        self._periodic = Periodic(Background.LOADS, PERIOD_S, self.exchange)
        self.start, self.stop = self._periodic.start, self._periodic.stop
        self.configure({})

    def configure(self, columns: Mapping[str, int]) -> None:
        """Use these columns from now on; call before the loads of targets without one are forgotten."""
        for target, column in self._columns.items():
            if columns.get(target) != column:
                self._own[first_cell(column)] = self._own[first_cell(column) + 1] = 0
                self._router.balancer.loads.set_remote_load(target, 0, 0)
        self._columns = {TargetId(name): column for name, column in columns.items()}
        self._targets = {column: name for name, column in self._columns.items()}
        width = first_cell(1 + max(self._targets, default=-1))
        blank = memoryview(bytes(_CELL_BYTES * width)).cast("q")
        self._last_read = [blank] * len(self._others)
        self._sums = [0] * width
        self._position = None

    def exchange(self) -> None:
        """Write the loads that changed in this worker, and read those that changed in other workers."""
        self._write()
        self._read()
        self._position = self._router.balancer.loads.position  # loads just read are no changes of this worker

    def _write(self) -> None:
        loads, cells = self._router.balancer.loads, self._own
        now_s = loads.clock()
        loads.advance(now_s)
        changes = None if self._position is None else loads.changes_since(self._position)
        changed = set(self._columns) if changes is None else self._waiting | {load.target for load in changes}
        self._waiting = set()
        for target in changed:
            column = self._columns.get(target)
            if column is None:
                continue
            load, index = loads.load(target), first_cell(column)
            cells[index] = load.running - load.remote_running
            cells[index + 1] = int(load.remaining_tokens(now_s)) - load.remote_tokens
            if load.waiting:
                self._waiting.add(target)
        cells[0] = self._router.services.in_flight

    def _read(self) -> None:
        width, sums = len(self._sums), self._sums
        changed: set[int] = set(range(width)) if self._position is None else set()
        for index, row in enumerate(self._others):
            last_cells = self._last_read[index]
            if row[:width] == last_cells:
                continue
            cells = self._last_read[index] = memoryview(row[:width].tobytes()).cast("q")
            for cell, (value, last_value) in enumerate(zip(cells, last_cells, strict=True)):
                if value != last_value:
                    sums[cell] += value - last_value
                    changed.add(cell)
        if not changed:
            return
        self._router.other_workers_in_flight = sums[0]
        for column in {(cell - 1) // 2 for cell in changed if cell}:
            target = self._targets.get(column)
            if target is not None:
                index = first_cell(column)
                self._router.balancer.loads.set_remote_load(target, max(0, sums[index]), max(0, sums[index + 1]))
