"""Memory that workers share: what each has in flight at each target.

Theory of operation. A row for each worker, a column for each target. A worker writes to its own row and to no other,
and reads the others' now and then; the parent clears the row of a worker that died. No lock: a cell is one aligned
word, and a reader that meets two cells of different moments is off by a request, for a few milliseconds.

The parent says which target has which column. A column keeps its target as long as that is configured, and gets a
new one only once it is zero in every row. Targets beyond ``COLUMNS`` have none: each worker then knows its own share
of their load alone.

Limits that hold for all workers together, in memory that they share.

Theory of operation. A rate is one number, which every worker reads and writes (``routing/limits/budgets.py``). The
places of a gate are counted by those who hold them: each worker has a cell of its own for what it runs, so that the
parent gives back what a dead one held by clearing its row. Taking a place means to see that there is one and to count
it, with nobody else in between: a lock on the memory's file, which the kernel releases when its holder dies.
Giving back takes no lock. A worker that is stopped while it holds a lock, or is the first in line, holds nobody up for
long: others try the lock for about a millisecond, then wait for the next tick, and pass over whoever ticks no more.

Who waits, waits in a line of its own worker. Each worker tells the order of its first, and nobody takes a place before
that of another worker which is to go first. Places that were given back elsewhere are seen by the tick, every 5 ms.

The parent says which name has which slot. A name without one is counted by each worker for itself.
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
from routing.proxy.admission_queues import configured_queues, queue_name
from routing.schema import RouterConfig

RATES: Final = 32_768  # slots of rates, of which a key has two at most
GATES: Final = 1_024
_CELL_BYTES: Final = 8
_TRIES: Final = 200  # of a lock that somebody has: about a millisecond
ALIVE_S: Final = 0.1  # how long ago a worker has ticked that is waited for


def limits_bytes(rows: int) -> int:
    """Bytes for rates, gates and ticks. What is not used takes no memory."""
    return _CELL_BYTES * (RATES + GATES * 3 * rows + rows)


class LimitsMemory:
    """The memory, part of the board."""

    def __init__(self, memory: memoryview, rows: int, fd: int) -> None:
        self.rows = rows
        self._fd = fd
        ends = [_CELL_BYTES * cells for cells in (RATES, RATES + GATES * rows, RATES + 2 * GATES * rows)]
        last = ends[-1] + _CELL_BYTES * GATES * rows
        self.rates = memory[: ends[0]].cast("d")
        self._running = memory[ends[0] : ends[1]].cast("q")
        self._waiting = memory[ends[1] : ends[2]].cast("q")
        self._firsts = memory[ends[2] : last].cast("d")
        self.ticks = memory[last:].cast("d")  # when each row's worker was last seen to go on

    @cached_property
    def lock_fd(self) -> int:
        """The file once more, opened by this process, because what holds a lock of this kind is one opening of it."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR)

    def running(self, gate: int) -> memoryview[int]:
        """How many each row has let in."""
        return self._running[gate * self.rows : (gate + 1) * self.rows]

    def waiting(self, gate: int) -> memoryview[int]:
        """How many wait in each row."""
        return self._waiting[gate * self.rows : (gate + 1) * self.rows]

    def firsts(self, gate: int) -> memoryview[float]:
        """The order of the first that waits in each row; 0 where nobody does."""
        return self._firsts[gate * self.rows : (gate + 1) * self.rows]

    def clear(self, row: int) -> None:
        """Give back what a row's worker held."""
        for cells in (self._running, self._waiting, self._firsts):
            for place in range(row, len(cells), self.rows):
                if cells[place]:
                    cells[place] = 0
        self.ticks[row] = 0.0


class SharedPlaces:
    """The room of one gate, as one worker sees it."""

    def __init__(self, memory: LimitsMemory, gate: int, row: int) -> None:
        self._running, self._waiting = memory.running(gate), memory.waiting(gate)
        self._firsts, self._ticks = memory.firsts(gate), memory.ticks
        self._lock_fd, self._row = memory.lock_fd, row

    def acquire(self, limit: int, order: float) -> bool:
        """Take a place; False if there is none, or somebody elsewhere is to go first."""
        if sum(self._running) >= limit or self._is_before(order) or not self._lock():
            return False
        try:
            if sum(self._running) >= limit:
                return False
            self._running[self._row] += 1
            return True
        finally:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    def release(self) -> None:
        """Give one back."""
        self._running[self._row] -= 1

    def publish_queue(self, waiting: int, order: float) -> None:
        """Tell how many wait here, and the order of the first."""
        self._waiting[self._row] = waiting
        self._firsts[self._row] = order

    @property
    def running(self) -> int:
        """Places that are taken, by all workers."""
        return sum(self._running)

    @property
    def waiting_elsewhere(self) -> int:
        """Who waits in other workers."""
        return sum(self._waiting) - self._waiting[self._row]

    def _is_before(self, order: float) -> bool:
        """Whether somebody is to go first in a worker that goes on."""
        if max(self._firsts) <= order:
            return False
        since = monotonic() - ALIVE_S
        others = (place for place, first in enumerate(self._firsts) if first > order and place != self._row)
        return any(self._ticks[place] > since for place in others)

    def _lock(self) -> bool:
        for _ in range(_TRIES):
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.sched_yield()
            else:
                return True
        return False


class WorkerLimits:
    """What one worker shares: the slots of a configuration, found by name."""

    def __init__(self, memory: LimitsMemory, row: int) -> None:
        self._memory, self._row = memory, row
        self._rates: Mapping[str, int] = {}
        self._gates: Mapping[str, int] = {}

    def use(self, rates: Mapping[str, int], gates: Mapping[str, int]) -> None:
        """Go by these slots in what is asked from now on."""
        self._rates, self._gates = rates, gates

    def cell(self, name: str) -> memoryview[float] | None:
        """The number of a rate; None where it has no slot."""
        slot = self._rates.get(name)
        return None if slot is None else self._memory.rates[slot : slot + 1]

    def permits(self, name: str) -> SharedPlaces | None:
        """The room of a gate; None where it has no slot."""
        slot = self._gates.get(name)
        return None if slot is None else SharedPlaces(self._memory, slot, self._row)

    def tick(self) -> None:
        """Say that this worker goes on."""
        self._memory.ticks[self._row] = monotonic()


def assign_rates(config: RouterConfig, before: Mapping[str, int], memory: LimitsMemory) -> dict[str, int]:
    """A slot for each rate of a key, with the level that the key had at another rate."""
    rates = {rate.name: rate for key in (config.access.keys if config.access else ()) for rate in rates_of(key)}
    slots = _assigned(rates, before, range(RATES))
    levels = {
        (old.digest, old.unit): (old, slot) for old, slot in ((Rate.parse(name), n) for name, n in before.items())
    }
    now = monotonic()
    for name in slots.keys() - before.keys():
        rate = rates[name]
        level = rate.capacity
        if (old := levels.get((rate.digest, rate.unit))) is not None:
            level = old[0].capacity - max(0.0, memory.rates[old[1]] - now) * old[0].per_s
        memory.rates[slots[name]] = full_at(level, rate.per_s, rate.capacity, now)
    return slots


def assign_gates(config: RouterConfig, before: Mapping[str, int], memory: LimitsMemory) -> dict[str, int]:
    """A slot for each gate; one that is gone gives its own up once nobody runs there."""
    free = (gate for gate in range(GATES) if not any(memory.running(gate)))
    return _assigned((queue_name(key) for key, _ in configured_queues(config)), before, free)


def _assigned(names: Iterable[str], before: Mapping[str, int], slots: Iterable[int]) -> dict[str, int]:
    """The slot that each name had, or else one of these that no name had, as long as there are any."""
    wanted = list(dict.fromkeys(names))
    taken = set(before.values())
    free = (slot for slot in slots if slot not in taken)
    kept = {name: before[name] for name in wanted if name in before}
    return kept | dict(zip((name for name in wanted if name not in before), free, strict=False))


COLUMNS = 4096
_CELLS = 1 + 2 * COLUMNS  # of a row: requests in flight; for each target, requests running and tokens waiting
_BOARD_CELL_BYTES = 8


class SharedBoard:
    """The memory. Behind ``fd`` it lives as long as anybody has it open."""

    def __init__(self, fd: int, rows: int) -> None:
        self.fd = fd
        self.rows = rows
        loads_bytes = rows * _CELLS * _BOARD_CELL_BYTES
        memory = memoryview(mmap.mmap(fd, loads_bytes + limits_bytes(rows)))
        self._cells = memory[:loads_bytes].cast("q")
        self.limits = LimitsMemory(memory[loads_bytes:], rows, fd)

    @classmethod
    def create(cls, rows: int) -> SharedBoard:
        """A board of zeros."""
        fd = os.memfd_create("warmpath-loads")
        os.ftruncate(fd, rows * _CELLS * _BOARD_CELL_BYTES + limits_bytes(rows))
        return cls(fd, rows)

    def row(self, number: int) -> memoryview[int]:
        """The cells of a row."""
        return self._cells[number * _CELLS : (number + 1) * _CELLS]

    def clear(self, number: int) -> None:
        """Set a row to zero: whoever wrote to it is gone, and gives back what it held."""
        self.limits.clear(number)
        self.row(number)[:] = memoryview(bytes(_CELLS * _BOARD_CELL_BYTES)).cast("q")

    def is_free(self, column: int) -> bool:
        """Whether nobody has anything at the column's target."""
        cells = self._cells
        places = (number * _CELLS + first_cell(column) for number in range(self.rows))
        return not any(cells[place] or cells[place + 1] for place in places)


def first_cell(column: int) -> int:
    """Where in a row a column begins."""
    return 1 + 2 * column


def assign_columns(targets: Iterable[str], before: Mapping[str, int], board: SharedBoard) -> dict[str, int]:
    """A column for each target: the one it had, or else a free one, while there are any."""
    wanted = list(dict.fromkeys(targets))
    columns = {name: before[name] for name in wanted if name in before}
    taken = set(before.values())
    free = (column for column in range(COLUMNS) if column not in taken and board.is_free(column))
    for name in wanted:
        if name not in columns and (column := next(free, None)) is not None:
            columns[name] = column
    return columns
