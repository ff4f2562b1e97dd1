"""Memory that workers share: what each has in flight at each target.

Theory of operation. A row for each worker, a column for each target. A worker writes to its own row and to no other,
and reads the others' now and then; the parent clears the row of a worker that died. No lock: a cell is one aligned
word, and a reader that meets two cells of different moments is off by a request, for a few milliseconds.

The parent says which target has which column. A column keeps its target as long as that is configured, and gets a
new one only once it is zero in every row. Targets beyond ``COLUMNS`` have none: each worker then knows its own share
of their load alone.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping

from routing.workers.shared_limits import LimitsMemory, limits_bytes

COLUMNS = 4096
_CELLS = 1 + 2 * COLUMNS  # of a row: requests in flight; for each target, requests running and tokens waiting
_CELL_BYTES = 8


class Board:
    """The memory. Behind ``fd`` it lives as long as anybody has it open."""

    def __init__(self, fd: int, rows: int) -> None:
        self.fd = fd
        self.rows = rows
        loads_bytes = rows * _CELLS * _CELL_BYTES
        memory = memoryview(mmap.mmap(fd, loads_bytes + limits_bytes(rows)))
        self._cells = memory[:loads_bytes].cast("q")
        self.limits = LimitsMemory(memory[loads_bytes:], rows, fd)

    @classmethod
    def create(cls, rows: int) -> Board:
        """A board of zeros."""
        fd = os.memfd_create("warmpath-loads")
        os.ftruncate(fd, rows * _CELLS * _CELL_BYTES + limits_bytes(rows))
        return cls(fd, rows)

    def row(self, number: int) -> memoryview[int]:
        """The cells of a row."""
        return self._cells[number * _CELLS : (number + 1) * _CELLS]

    def clear(self, number: int) -> None:
        """Set a row to zero: whoever wrote to it is gone, and gives back what it held."""
        self.limits.clear(number)
        self.row(number)[:] = memoryview(bytes(_CELLS * _CELL_BYTES)).cast("q")

    def is_free(self, column: int) -> bool:
        """Whether nobody has anything at the column's target."""
        cells = self._cells
        places = (number * _CELLS + first_cell(column) for number in range(self.rows))
        return not any(cells[place] or cells[place + 1] for place in places)


def first_cell(column: int) -> int:
    """Where in a row a column begins."""
    return 1 + 2 * column


def assign_columns(targets: Iterable[str], before: Mapping[str, int], board: Board) -> dict[str, int]:
    """A column for each target: the one it had, or else a free one, while there are any."""
    wanted = list(dict.fromkeys(targets))
    columns = {name: before[name] for name in wanted if name in before}
    taken = set(before.values())
    free = (column for column in range(COLUMNS) if column not in taken and board.is_free(column))
    for name in wanted:
        if name not in columns and (column := next(free, None)) is not None:
            columns[name] = column
    return columns
