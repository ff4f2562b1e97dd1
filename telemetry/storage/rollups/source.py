"""Readings of a window as SQL, whatever they are read from: rows of one shape out of bins and of readings.

``at > start and at <= end`` and steps of time hold for bins as for readings, because both carry the end of what they
tell of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from telemetry.metrics.windows import Window
from telemetry.models import RollupState
from telemetry.storage.rollups.columns import RESOLUTIONS_S, WHOLE, Column, Histogram, Rollup, histograms
from telemetry.storage.rollups.cover import Part, cover, fitting


@dataclass(frozen=True, slots=True)
class Source:
    """A subselect, without an alias, and its parameters."""

    sql: str
    parameters: dict[str, Any] = field(default_factory=dict)


def rolled_through() -> dict[int, datetime | None]:
    """How far each resolution has been rolled up; None: not at all. One query."""
    known: dict[int, datetime | None] = dict(RollupState.objects.values_list("pk", "rolled_through"))
    return {resolution_s: known.get(resolution_s) for resolution_s in RESOLUTIONS_S}


def parts_of(window: Window, *, whole: bool = False) -> list[Part]:
    """What a window is read from, ascending. One query where rollups may serve, none otherwise."""
    resolutions = fitting(window, RESOLUTIONS_S, whole=whole)
    return cover(window.start, window.end, resolutions, rolled_through() if resolutions else {})


def sums_in(rollup: Rollup, window: Window, names: Sequence[str] | None = None, *, whole: bool = False) -> Source:
    """Rows of ``at``, the key and the columns of a rollup, or those of them that are named."""
    columns = [column for column in rollup.columns if names is None or column.name in names]
    key = ", ".join(rollup.key)
    found = ", ".join(column.name for column in columns)

    def select(part: Part) -> str:
        if part.resolution_s is None:
            return _of_readings(rollup, key, columns)
        return f"select at, {key}, {found} from {rollup.table(part.resolution_s)} where true"  # noqa: S608 - our own names

    return _together(parts_of(window, whole=whole), select)


def readings_of(rollup: Rollup, window: Window, names: Sequence[str]) -> Source:
    """The same from readings alone, which have further keys: of a router's, ``replica``."""
    columns = [column for column in rollup.columns if column.name in {"requests", *names}]
    part = Part(None, window.start, window.end)
    return _together([part], lambda _: _of_readings(rollup, ", ".join((*rollup.key, "replica")), columns))


def _of_readings(rollup: Rollup, key: str, columns: Sequence[Column]) -> str:
    found = ", ".join(f"{column.of_reading} as {column.name}" for column in columns)
    return f"select at, {key}, {found} from {rollup.readings} where true"  # noqa: S608 - our own names


def histograms_in(of: Histogram, window: Window, *, by_part: bool, whole: bool = False) -> Source:
    """Rows of at, pool, part, reuse, layout_id, positions, counts; without ``by_part`` some are of whole pools."""

    def select(part: Part) -> str:
        if part.resolution_s is None:
            return f"""
                select at, {of.pool} as pool, {of.part} as part, {of.reuse} as reuse,
                    {of.column}_layout_id as layout_id, {of.column}_at as positions, {of.column}_counts as counts
                from {of.readings} where {of.column}_layout_id is not null"""  # noqa: S608 - our own names
        kind = of.kind if by_part else of.kind + WHOLE
        return f"""
            select at, pool, part, reuse, layout_id, positions, counts from {histograms(part.resolution_s)}
            where kind = '{kind}'"""  # noqa: S608 - likewise

    return _together(parts_of(window, whole=whole), select)


def _together(parts: Sequence[Part], select: Callable[[Part], str]) -> Source:
    selects = [
        f"{select(part)} and at > %(part{number}_start)s and at <= %(part{number}_end)s"
        for number, part in enumerate(parts)
    ]
    times = {f"part{number}_start": part.start for number, part in enumerate(parts)}
    times |= {f"part{number}_end": part.end for number, part in enumerate(parts)}
    return Source("(" + " union all ".join(selects) + ")", times)
