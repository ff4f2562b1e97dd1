"""How warm each replica was over a window, in a few cells: what a strip in a table shows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from controlplane.models import Replica
from telemetry.metrics.rates import hit_rate_ratio
from telemetry.metrics.windows import PointState, Window
from telemetry.storage import sums
from telemetry.storage.cold import cold_bands

CELLS = 36
LEVELS = 10


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring cells that look the same."""

    first: int  # number of the first cell, from 0
    cells: int
    look: str  # "h0" (cold) to "h9", "cold" after a restart (H18), or a reason: "no_traffic", "stale", "unknown"


@dataclass(frozen=True, slots=True)
class Strip:
    """A replica's cells, ascending in time."""

    runs: tuple[Run, ...]
    lowest_ratio: float | None  # of the cells with traffic
    highest_ratio: float | None


def heat_strips(replicas: Sequence[Replica], window: Window) -> dict[str, Strip]:
    """A strip a replica, by name, from its engines' hit rate. Two queries."""
    cells = Window(window.start, window.end, window.length_s / CELLS)
    rates: dict[int, dict[int, tuple[float | None, PointState]]] = defaultdict(dict)
    for row in sums.hit_sums([replica.pk for replica in replicas], cells):
        value = hit_rate_ratio(row.queries, row.hits, row.external_hits)
        rates[row.key][row.step] = (value, row.state)
    cold = _cold_cells([replica.pk for replica in replicas], cells)
    return {replica.name: _strip(rates[replica.pk], cold[replica.pk]) for replica in replicas}


def _cold_cells(replica_ids: Sequence[int], cells: Window) -> dict[int, set[int]]:
    """The cells in which a cache was filling anew."""
    found: dict[int, set[int]] = defaultdict(set)
    for band in cold_bands(replica_ids, cells):
        found[band.replica_id] |= set(range(_cell(band.start, cells), _cell(band.end, cells) + 1))
    return found


def _cell(at: datetime, cells: Window) -> int:
    return int((at - cells.start).total_seconds() // cells.step_s)


def _strip(rates: dict[int, tuple[float | None, PointState]], cold: set[int]) -> Strip:
    runs: list[Run] = []
    for number in range(CELLS):
        look = _look(*rates.get(number, (None, PointState.UNKNOWN)), cold=number in cold)
        if runs and runs[-1].look == look:
            runs[-1] = Run(runs[-1].first, runs[-1].cells + 1, look)
        else:
            runs.append(Run(number, 1, look))
    known = [value for value, _ in rates.values() if value is not None]
    return Strip(tuple(runs), min(known, default=None), max(known, default=None))


def _look(ratio: float | None, state: PointState, *, cold: bool) -> str:
    if ratio is None:
        return str(state)
    return "cold" if cold else f"h{min(int(ratio * LEVELS), LEVELS - 1)}"
