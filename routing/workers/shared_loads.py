"""Each worker's choice sees the load that all workers put on a target, a few milliseconds old.

Theory of operation. Nothing happens on a request's way. Every ``PERIOD_S`` a worker writes the loads that changed to
its own row of the board, reads the rows that changed since it last looked, and adds the differences to its load book,
where strategies find them like loads of its own. What waits is written net of what is likely prefilled by now.
"""

from __future__ import annotations

from collections.abc import Mapping

from routing.http.tasks import Background, Periodic
from routing.proxy.router import Router
from routing.types import TargetId
from routing.workers.shared_state import SharedBoard, first_cell

PERIOD_S = 0.005


class SharedLoads:
    """One worker's part of the exchange."""

    def __init__(self, router: Router, board: SharedBoard, row: int) -> None:
        self._router = router
        self._mine = board.row(row)
        self._others = [board.row(number) for number in range(board.rows) if number != row]
        self._columns: dict[TargetId, int] = {}
        self._names: dict[int, TargetId] = {}
        self._seen: list[memoryview[int]] = []  # each other row, as last read
        self._sums: list[int] = []  # of those, cell by cell
        self._position: int | None = None  # in the load book's journal; None: write everything
        self._waiting: set[TargetId] = set()  # targets where a prompt of ours is being prefilled
        self._ticks = Periodic(Background.LOADS, PERIOD_S, self.exchange)
        self.use({})

    def use(self, columns: Mapping[str, int]) -> None:
        """Go by these columns from now on; call before the loads of targets without one are forgotten."""
        for target, column in self._columns.items():
            if columns.get(target) != column:
                self._mine[first_cell(column)] = self._mine[first_cell(column) + 1] = 0
                self._router.balancer.loads.set_remote_load(target, 0, 0)
        self._columns = {TargetId(name): column for name, column in columns.items()}
        self._names = {column: name for name, column in self._columns.items()}
        width = first_cell(1 + max(self._names, default=-1))
        blank = memoryview(bytes(8 * width)).cast("q")
        self._seen = [blank] * len(self._others)
        self._sums = [0] * width
        self._position = None

    def start(self) -> None:
        """Exchange now and every ``PERIOD_S``."""
        self._ticks.start()

    def stop(self) -> None:
        """Exchange no more."""
        self._ticks.stop()

    def exchange(self) -> None:
        """Write what changed here, and read what changed elsewhere."""
        self._write()
        self._read()
        self._position = self._router.balancer.loads.position  # what was just read is no change of ours

    def _write(self) -> None:
        book, cells = self._router.balancer.loads, self._mine
        now_s = book.clock()
        book.advance(now_s)
        changed = self._changed()
        self._waiting = set()
        for target in changed:
            column = self._columns.get(target)
            if column is None:
                continue
            load, place = book.load(target), first_cell(column)
            cells[place] = load.running - load.remote_running
            cells[place + 1] = int(load.remaining_tokens(now_s)) - load.remote_tokens
            if load.waiting:
                self._waiting.add(target)
        cells[0] = self._router.services.in_flight

    def _changed(self) -> set[TargetId]:
        changes = None if self._position is None else self._router.balancer.loads.changes_since(self._position)
        return set(self._columns) if changes is None else self._waiting | {load.target for load in changes}

    def _read(self) -> None:
        width, sums = len(self._sums), self._sums
        touched: set[int] = set(range(width)) if self._position is None else set()
        for index, row in enumerate(self._others):
            before = self._seen[index]
            if row[:width] == before:
                continue
            now = self._seen[index] = memoryview(row[:width].tobytes()).cast("q")
            for cell, (new, old) in enumerate(zip(now, before, strict=True)):
                if new != old:
                    sums[cell] += new - old
                    touched.add(cell)
        if touched:
            self._tell(touched)

    def _tell(self, cells: set[int]) -> None:
        sums = self._sums
        self._router.other_workers_in_flight = sums[0]
        for column in {(cell - 1) // 2 for cell in cells if cell}:
            target = self._names.get(column)
            if target is not None:
                place = first_cell(column)
                self._router.balancer.loads.set_remote_load(target, max(0, sums[place]), max(0, sums[place + 1]))
