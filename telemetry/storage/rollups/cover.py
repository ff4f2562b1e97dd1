"""Which tables a question about a span of time reads: coarse bins in its middle, finer ones at its edges. Pure.

Theory of operation. A span is covered by bins of the coarsest resolution that was rolled up and fits; what is left on
either side by the next finer one, and the last by readings themselves. The parts touch and never overlap, so what is
read twice or not at all is nothing. A step of a chart must consist of whole bins: a resolution fits when it divides
the step and the window begins on its grid, or where it is so much finer than the step that a bin which lies across
two steps hardly matters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from telemetry.metrics.windows import Window

ROLLED_FROM_S = 1800.0  # shorter windows are cheap to read from readings, and asked for most often
MUCH_FINER = 10  # times, so that a tenth of a step at most is told with its neighbour
LONG_S = 6 * 3600.0  # windows that readings themselves would be too many for


@dataclass(frozen=True, slots=True)
class Part:
    """The span from ``start`` (excluded) to ``end`` (included), read from one resolution; None: from readings."""

    resolution_s: int | None
    start: datetime
    end: datetime


def fitting(window: Window, resolutions_s: Sequence[int], *, whole: bool) -> list[int]:
    """The resolutions that a window may be read from, ascending; none: from readings alone."""
    if window.length_s < ROLLED_FROM_S:
        return []
    if whole:
        return sorted(resolutions_s)
    found = [res for res in sorted(resolutions_s) if _fits(window, res)]
    return found or ([min(resolutions_s)] if window.length_s >= LONG_S else [])


def _fits(window: Window, resolution_s: int) -> bool:
    on_grid = window.step_s % resolution_s == 0 and window.start.timestamp() % resolution_s == 0
    return on_grid or window.step_s >= MUCH_FINER * resolution_s


def cover(
    start: datetime, end: datetime, resolutions_s: Sequence[int], through: Mapping[int, datetime | None]
) -> list[Part]:
    """Parts that are the span together, ascending; ``through`` says how far each resolution has been rolled up."""
    if start >= end:
        return []
    if not resolutions_s:
        return [Part(None, start, end)]
    *finer, coarsest = sorted(resolutions_s)
    rolled = through.get(coarsest)
    first, last = up(start, coarsest), down(min(end, rolled), coarsest) if rolled else start
    if last <= first:
        return cover(start, end, finer, through)
    return [
        *cover(start, first, finer, through),
        Part(coarsest, first, last),
        *cover(last, end, finer, through),
    ]


def readable(window: Window, now: datetime, kept_s: Mapping[int, float], readings_kept_s: float) -> Window:
    """The window in steps that what is still kept of its beginning can fill; ``kept_s`` by resolution."""
    age_s = (now - window.start).total_seconds()
    if age_s <= readings_kept_s:
        return window
    finest = next((res for res in sorted(kept_s) if age_s <= kept_s[res]), max(kept_s))
    if window.step_s >= finest:
        return window
    step_s = float(finest)
    return Window(down(window.start, finest), window.end, step_s)


def down(at: datetime, resolution_s: float) -> datetime:
    """The end of a bin, at or before."""
    return datetime.fromtimestamp(math.floor(at.timestamp() / resolution_s) * resolution_s, UTC)


def up(at: datetime, resolution_s: float) -> datetime:
    """The end of a bin, at or after."""
    floor = down(at, resolution_s)
    return floor if floor == at else floor + timedelta(seconds=resolution_s)
