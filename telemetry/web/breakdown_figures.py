"""Figures of the hit-rate breakdown and the cache-size curve, and charts as SVG shapes, which need no script.

SVG charts: values and limits of an alert rule, and the precision of a semantic cache by threshold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from telemetry.lab.breakdown import LOSS_TEXTS, LOSSES, TERMS, Breakdown, LossText, points, summary
from telemetry.metrics.windows import STEPS_S
from telemetry.models import CapacityCurve
from telemetry.services.alerts.previews import Episode, Point
from telemetry.services.figures.semantic_cache import SemanticCacheFigures
from telemetry.web import figures
from telemetry.web.charts import figure_text

TOTAL, LOST, DELIVERED = figures.COLOURS[1], figures.COLOURS[0], figures.COLOURS[2]
CURVES = (
    ("shared", "One shared cache of the same total size", 2),
    ("split", "One cache per replica, as placed", 0),
    ("one", "All requests on one replica", 1),
)


class Step(NamedTuple):
    """One bar, in shares of the prompts' tokens."""

    key: str  # of a loss; "prompts", "delivered" or "replayed" at the ends; "unknown" for losses without a breakdown
    label: str
    low: float
    high: float
    text: LossText | None

    @property
    def ratio(self) -> float:
        """Height of the bar."""
        return self.high - self.low


def steps_of(breakdown: Breakdown) -> list[Step]:
    """The bars from top to bottom. Losses between two known terms are one bar."""
    steps = [Step("prompts", "Prompt tokens", 0.0, 1.0, None)]
    above, missing = 1.0, False
    for name in TERMS:
        here = breakdown.ratio(getattr(breakdown, name))
        if here is None:
            missing = True
            continue
        key = "unknown" if missing else LOSSES[name]
        text = LOSS_TEXTS.get(key)
        steps.append(Step(key, text.label if text else "Unknown", min(here, above), above, text))
        above, missing = min(here, above), False
    reported = breakdown.ratio(breakdown.delivered)
    last = Step("delivered", "Delivered", 0.0, reported or 0.0, None) if reported is not None else None
    return [*steps, last or Step("replayed", "Predicted", 0.0, above, None)]


def breakdown_figure(breakdown: Breakdown) -> dict[str, Any]:
    """The breakdown as floating bars, the first at the top."""
    steps = steps_of(breakdown)
    colours = [TOTAL, *([LOST] * (len(steps) - 2)), DELIVERED]
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": [step.label for step in steps],
        "x": [round(step.ratio, 4) for step in steps],
        "base": [round(step.low, 4) for step in steps],
        "marker": {"color": colours},
        "text": [points(step.ratio) for step in steps],
        "textposition": "outside",
        "textangle": 0,
        "hovertemplate": "%{y}: %{text} points<extra></extra>",
        "cliponaxis": False,
    }
    layout = figure_layout(110) | {
        "bargap": 0.28,
        "xaxis": {"range": [0, 1.06], "tickformat": ".0%", "dtick": 0.25, "fixedrange": True},
        "yaxis": {"autorange": "reversed", "fixedrange": True, "automargin": True, "showgrid": False},
    }
    return figure_json([trace], layout, summary(breakdown))


def curve_figure(curve: CapacityCurve) -> dict[str, Any]:
    """The hit rate by multiples of the current cache size."""
    multiples = [point["multiple"] for point in curve.points]
    traces = [
        line_trace(label, multiples, [point[name] for point in curve.points], number, "%{x} times: %{y:.1%}")
        for name, label, number in CURVES
    ]
    layout = figure_layout(48, LEGEND) | {
        "xaxis": {
            "type": "log",
            "range": [-0.65, 0.95],
            "tickvals": multiples,
            "ticktext": [f"{multiple:g}x" for multiple in multiples],
            "fixedrange": True,
        },
        "yaxis": {"range": [0, 1.02], "tickformat": ".0%", "dtick": 0.25, "fixedrange": True},
        "shapes": [vertical_line(1)],
    }
    return figure_json(traces, layout, curve_summary(curve))


def curve_summary(curve: CapacityCurve) -> str:
    """What doubled caches, and one shared cache of the same total size, would bring."""
    by_multiple = {point["multiple"]: point for point in curve.points}
    if not curve.points:
        return curve.reason
    now, twice = by_multiple[1.0], by_multiple[2.0]
    more = 100 * (twice["split"] - now["split"])
    shared = 100 * (now["shared"] - now["split"])
    return (
        f"Doubling the cache of each replica would add {more:.0f} percentage points of hit rate; one shared cache of "
        f"the same total size would add {shared:.0f}."
    )


LEGEND: dict[str, Any] = {"showlegend": True, "legend": {"orientation": "h", "y": -0.16, "x": 0}}


def line_trace(
    label: str, x: Sequence[Any], y: Sequence[float | None], number: int, hover: str, *, mode: str = "lines+markers"
) -> dict[str, Any]:
    """Line number ``number`` of a chart; ``hover`` is Plotly's template of the text at a point."""
    return {
        "type": "scatter",
        "mode": mode,
        "name": label,
        "x": x,
        "y": [None if value is None else round(value, 4) for value in y],
        "line": {"color": figures.colour(number), "dash": figures.dash(number), "width": 2},
        "hovertemplate": f"{hover}<extra>{label}</extra>",
    }


def vertical_line(x: float) -> dict[str, Any]:
    """A dotted line that marks the present size."""
    line = {"color": figures.REST, "width": 1, "dash": "dot"}
    return {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": line}


def figure_layout(left: int, legend: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Layout that the lab's charts share; ``left`` is the margin in pixels."""
    return {
        "template": None,
        "autosize": True,
        "showlegend": False,
        "dragmode": False,
        "margin": {"l": left, "r": 16, "t": 8, "b": 36},
        **(legend or {}),
    }


def figure_json(traces: Sequence[dict[str, Any]], layout: dict[str, Any], text: str) -> dict[str, Any]:
    """A figure as ``static/js/breakdown.js`` reads it; ``text`` is the summary under the chart."""
    from plotly import graph_objects  # noqa: PLC0415 - the import takes half a second

    figure = graph_objects.Figure(data=traces, layout=layout).to_plotly_json()
    return {"data": figure["data"], "layout": figure["layout"], "meta": {"summary": text}}


WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 800.0, 220.0, 64.0, 24.0, 10.0  # in units of the SVG
MAX_TICKS = 6  # on the time axis
RIGHT = 28.0  # room for half a label


@dataclass(frozen=True, slots=True)
class Sketch:
    """The shapes of the chart. A line has one polyline per range without a gap."""

    values: list[str]
    limits: list[str]
    bands: list[dict[str, Any]]  # times at which the rule fires: {"x", "width"}
    rows: list[tuple[float, str]]  # (y, label)
    columns: list[tuple[float, str]]  # (x, label)
    summary: str
    areas: list[str] = field(default_factory=list)  # intervals of the values, or beyond the limit
    marks: list[float] = field(default_factory=list)  # vertical lines
    lines: list[Line] = field(default_factory=list)  # of a chart with several names
    width: float = WIDTH
    height: float = HEIGHT
    left: float = LEFT
    floor: float = HEIGHT - BOTTOM


def draw(
    points: Sequence[Point],
    episodes: Sequence[Episode],
    start: datetime,
    end: datetime,
    *,
    summary: str,
    change: datetime | None = None,
) -> Sketch | None:
    """The chart of a rule's values and limits as SVG coordinates, with a line at ``change``; None without any value."""
    unit = points[-1].unit if points else "ratio"
    shown = [point for point in points if point.unit == unit]
    known = [number for point in shown for number in (point.value, point.limit) if number is not None]
    times = [point.at for point in shown if point.value is not None]
    if not times:
        return None
    start = max(start, times[0] - max((end - times[0]) / 10, timedelta(minutes=1)))  # no long time without a value
    top = 1.0 if unit == "ratio" and max(known) <= 1 else (max(known) or 1.0) * 1.1
    scale = _Scale(start, (end - start).total_seconds(), top)
    bands = [
        {"x": f"{scale.x(episode.started_at):.1f}", "width": f"{_width(scale, episode, end):.1f}"}
        for episode in episodes
        if episode.fired_at
    ]
    return _on_axes(
        scale,
        end,
        unit,
        values=_lines([(scale.x(point.at), scale.y(point.value)) for point in shown]),
        limits=_lines([(scale.x(point.at), scale.y(point.limit)) for point in shown]),
        bands=bands,
        marks=[scale.x(change)] if change is not None and start <= change <= end else [],
        summary=summary,
    )


class Line(NamedTuple):
    """A line of several, with its name and its look."""

    label: str
    colour: str
    dashes: str  # of SVG
    parts: list[str]


DASHES = {"solid": "none", "dash": "6 4", "dot": "2 3", "dashdot": "6 3 2 3"}  # of ``figures.DASHES``


Points = Sequence[tuple[datetime, float | None]]


def draw_lines(
    lines: Sequence[tuple[str, Points]],
    unit: str,
    *,
    summary: str,
    limit: Points = (),
    lower_is_worse: bool = False,
    marks: Sequence[datetime] = (),
) -> Sketch | None:
    """A line for each name; None without any value. What is beyond the ``limit`` is shaded."""
    known = [value for _, points in lines for _, value in points if value is not None]
    if not known:
        return None
    times = [at for _, points in lines for at, _ in points]
    start, end = min(times), max(*times, min(times) + timedelta(minutes=1))
    highest = max(known + [value for _, value in limit if value is not None])
    is_share = unit == "ratio" and (lower_is_worse or not limit)
    scale = _Scale(start, (end - start).total_seconds(), 1.0 if is_share else (highest or 1.0) * 1.1)

    def parts(points: Points) -> list[str]:
        return _lines([(scale.x(at), scale.y(value)) for at, value in points])

    edge, limits = scale.y(0.0 if lower_is_worse else scale.top), parts(limit)
    corners = [[pair.partition(",")[0] for pair in line.split()] for line in limits]
    looks = ((label, figures.colour(number), DASHES[figures.dash(number)]) for number, (label, _) in enumerate(lines))
    return _on_axes(
        scale,
        end,
        unit,
        lines=[Line(*look, parts(points)) for look, (_, points) in zip(looks, lines, strict=True)],
        limits=limits,
        areas=[f"{line} {x[-1]},{edge:.1f} {x[0]},{edge:.1f}" for line, x in zip(limits, corners, strict=True)],
        marks=[scale.x(at) for at in marks],
        summary=summary,
    )


def _on_axes(scale: _Scale, end: datetime, unit: str, **shapes: Any) -> Sketch:
    """A chart with the labels of both axes."""
    no_lines: dict[str, Any] = {"values": [], "limits": [], "bands": []}
    return Sketch(
        rows=[
            (scale.y(scale.top * part) or 0.0, figure_text(scale.top * part, unit).replace(".0 %", " %"))
            for part in (0.0, 0.5, 1.0)
        ],
        columns=[
            (x, _time(at, scale.length_s)) for at in _ticks(scale.start, end) if (x := scale.x(at)) <= WIDTH - RIGHT
        ],
        **(no_lines | shapes),
    )


@dataclass(frozen=True, slots=True)
class _Scale:
    """Converts times and values to coordinates."""

    start: datetime
    length_s: float
    top: float

    def x(self, at: datetime) -> float:
        """The coordinate of a time, limited to the chart."""
        part = min(max((at - self.start).total_seconds() / self.length_s, 0.0), 1.0)
        return LEFT + part * (WIDTH - LEFT)

    def y(self, value: float | None) -> float | None:
        """The coordinate of a value."""
        if value is None:
            return None
        return TOP + (1 - min(max(value / self.top, 0.0), 1.0)) * (HEIGHT - BOTTOM - TOP)


def _width(scale: _Scale, episode: Episode, end: datetime) -> float:
    return max(scale.x(episode.ended_at or end) - scale.x(episode.started_at), 2.0)


def _lines(points: Sequence[tuple[float, float | None]]) -> list[str]:
    """The points of one polyline per range without a gap. An isolated point is doubled, so that it is visible."""
    ranges: list[list[str]] = [[]]
    for x, y in points:
        if y is None:
            ranges.append([])
        else:
            ranges[-1].append(f"{x:.1f},{y:.1f}")
    return [" ".join(coords if len(coords) > 1 else coords * 2) for coords in ranges if coords]


def _ticks(start: datetime, end: datetime) -> list[datetime]:
    """Round times of the axis."""
    length_s = (end - start).total_seconds()
    step_s = next(
        (step for step in STEPS_S if length_s / step <= MAX_TICKS), STEPS_S[-1] * max(round(length_s / 5e5), 1)
    )
    first = (int(start.timestamp()) // step_s + 1) * step_s
    count = int((end.timestamp() - first) // step_s) + 1
    base = datetime.fromtimestamp(first, start.tzinfo)
    return [base + timedelta(seconds=step_s * number) for number in range(max(count, 0))]


def _time(at: datetime, length_s: float) -> str:
    return f"{at:%d %b}" if length_s > 172_800 else f"{at:%H:%M:%S}" if length_s < 300 else f"{at:%H:%M}"


LEAST_SIMILARITY = 0.7  # of the axis


def draw_precision(cache: SemanticCacheFigures) -> Sketch | None:
    """Precision by threshold with its interval, the limit, and the configured threshold; None without any check."""
    points, settings = cache.points, cache.settings
    if not points:
        return None
    limit = settings["min_precision"]
    least = min(limit, *(point.interval[0] for point in points))
    floor = max(0.0, int(20 * least) / 20)

    def x(similarity: float) -> float:
        return LEFT + (similarity - LEAST_SIMILARITY) / (1 - LEAST_SIMILARITY) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return TOP + (1 - value) / (1 - floor) * (HEIGHT - BOTTOM - TOP)

    band = [(point.threshold, point.interval[0]) for point in points]
    band += [(point.threshold, point.interval[1]) for point in reversed(points)]
    return Sketch(
        values=_lines([(x(point.threshold), y(point.precision)) for point in points]),
        limits=_lines([(LEFT, y(limit)), (WIDTH - RIGHT, y(limit))]),
        bands=[],
        rows=[(y(value), f"{100 * value:g} %") for value in (floor, (1 + floor) / 2, 1.0)],
        columns=[(x(step / 100), f"{step / 100:.2f}") for step in range(70, 101, 5)],
        summary=f"Precision by threshold, from {points[0].checks} checks; the table below has the values",
        areas=[" ".join(f"{x(similarity):.1f},{y(value):.1f}" for similarity, value in band)],
        marks=[x(settings["threshold"])],
    )
