"""A drawing of what a rule saw, as the shapes of an SVG: it needs no script and prints as it is. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from telemetry.alerts.replay import Episode, Point
from telemetry.metrics.windows import STEPS_S
from telemetry.web.sentences import figure_words

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 800.0, 220.0, 64.0, 24.0, 10.0  # of the drawing, in its own units
MARKS = 6  # on the axis of time, at most


@dataclass(frozen=True, slots=True)
class Sketch:
    """Shapes in the drawing's units: a line for each stretch without a gap."""

    values: list[str]
    limits: list[str]
    bands: list[dict[str, Any]]  # where it fired: {"x", "width"}
    rows: list[tuple[float, str]]  # (y, label)
    columns: list[tuple[float, str]]  # (x, label)
    sentence: str
    width: float = WIDTH
    height: float = HEIGHT
    left: float = LEFT
    floor: float = HEIGHT - BOTTOM


def draw(
    points: Sequence[Point], episodes: Sequence[Episode], start: datetime, end: datetime, *, sentence: str
) -> Sketch | None:
    """The drawing; None where there is nothing to draw."""
    unit = points[-1].unit if points else "ratio"
    mine = [point for point in points if point.unit == unit]
    known = [number for point in mine for number in (point.value, point.limit) if number is not None]
    if not any(point.value is not None for point in mine):
        return None
    top = 1.0 if unit == "ratio" and max(known) <= 1 else (max(known) or 1.0) * 1.1
    scale = _Scale(start, (end - start).total_seconds(), top)
    bands = [
        {"x": f"{scale.x(one.started_at):.1f}", "width": f"{_width(scale, one, end):.1f}"}
        for one in episodes
        if one.fired_at
    ]
    return Sketch(
        values=_lines([(scale.x(point.at), scale.y(point.value)) for point in mine]),
        limits=_lines([(scale.x(point.at), scale.y(point.limit)) for point in mine]),
        bands=bands,
        rows=[(scale.y(top * part) or 0.0, figure_words(top * part, unit)) for part in (0.0, 0.5, 1.0)],
        columns=[(scale.x(at), _moment(at, scale.length_s)) for at in _marks(start, end)],
        sentence=sentence,
    )


@dataclass(frozen=True, slots=True)
class _Scale:
    """From times and values to places."""

    start: datetime
    length_s: float
    top: float

    def x(self, at: datetime) -> float:
        """A moment's place; those outside lie on the edge."""
        part = min(max((at - self.start).total_seconds() / self.length_s, 0.0), 1.0)
        return LEFT + part * (WIDTH - LEFT)

    def y(self, value: float | None) -> float | None:
        """A value's place."""
        if value is None:
            return None
        return TOP + (1 - min(max(value / self.top, 0.0), 1.0)) * (HEIGHT - BOTTOM - TOP)


def _width(scale: _Scale, episode: Episode, end: datetime) -> float:
    return max(scale.x(episode.ended_at or end) - scale.x(episode.started_at), 2.0)


def _lines(places: Sequence[tuple[float, float | None]]) -> list[str]:
    """Stretches of places, as the points of polylines; one that stands alone becomes a dash."""
    stretches: list[list[str]] = [[]]
    for x, y in places:
        if y is None:
            stretches.append([])
        else:
            stretches[-1].append(f"{x:.1f},{y:.1f}")
    return [" ".join(one if len(one) > 1 else one * 2) for one in stretches if one]


def _marks(start: datetime, end: datetime) -> list[datetime]:
    """Round times between two moments."""
    length_s = (end - start).total_seconds()
    step_s = next((step for step in STEPS_S if length_s / step <= MARKS), STEPS_S[-1] * max(round(length_s / 5e5), 1))
    first = (int(start.timestamp()) // step_s + 1) * step_s
    count = int((end.timestamp() - first) // step_s) + 1
    base = datetime.fromtimestamp(first, start.tzinfo)
    return [base + timedelta(seconds=step_s * number) for number in range(max(count, 0))]


def _moment(at: datetime, length_s: float) -> str:
    return f"{at:%d %b}" if length_s > 172_800 else f"{at:%H:%M}"
