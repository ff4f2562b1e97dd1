"""The ladder and the curve of room, as Plotly figures. Colours of paper, grid and text are the page's to add.

A drawing of what a rule saw, as the shapes of an SVG: it needs no script and prints as it is. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from telemetry.lab.ladder import LOSS_TEXTS, LOSSES, TERMS, Ladder, LossText, points, summary
from telemetry.metrics.windows import STEPS_S
from telemetry.models import CapacityCurve
from telemetry.services.alerts.previews import Episode, Point
from telemetry.web import figures
from telemetry.web.charts import figure_words

TOTAL, LOST, GOT = figures.COLOURS[1], figures.COLOURS[0], figures.COLOURS[2]
CURVES = (
    ("shared", "One shared cache of the same size", 2),
    ("split", "Each replica its own, as placed", 0),
    ("one", "All requests on one replica", 1),
)


class Step(NamedTuple):
    """One bar: from where to where, as shares of the prompts' tokens."""

    key: str  # of a loss; "prompts" and "delivered" at the ends, "unknown" for what cannot be told apart
    label: str
    low: float
    high: float
    words: LossText | None

    @property
    def ratio(self) -> float:
        """What it takes away, or what there is."""
        return self.high - self.low


def steps_of(ladder: Ladder) -> list[Step]:
    """The bars from the top down; what cannot be told apart is one of them."""
    found = [Step("prompts", "Prompt tokens", 0.0, 1.0, None)]
    above, missing = 1.0, False
    for name in TERMS:
        here = ladder.ratio(getattr(ladder, name))
        if here is None:
            missing = True
            continue
        key = "unknown" if missing else LOSSES[name]
        words = LOSS_TEXTS.get(key)
        label = words.label if words else "Not known apart"
        found.append(Step(key, label, min(here, above), above, words))
        above, missing = min(here, above), False
    reported = ladder.ratio(ladder.delivered)
    last = Step("delivered", "Delivered", 0.0, reported or 0.0, None) if reported is not None else None
    return [*found, last] if last else [*found, Step("replayed", "As replayed", 0.0, above, None)]


def ladder_figure(ladder: Ladder) -> dict[str, Any]:
    """The steps as floating bars, the first at the top."""
    steps = steps_of(ladder)
    colours = [TOTAL, *([LOST] * (len(steps) - 2)), GOT]
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
        "textfont": {"size": 12},
        "hovertemplate": "%{y}: %{text} points<extra></extra>",
        "cliponaxis": False,
    }
    layout = _layout(110) | {
        "bargap": 0.28,
        "xaxis": {"range": [0, 1.06], "tickformat": ".0%", "dtick": 0.25, "fixedrange": True},
        "yaxis": {"autorange": "reversed", "fixedrange": True, "automargin": True, "showgrid": False},
    }
    return _figure([trace], layout, summary(ladder))


def curve_figure(curve: CapacityCurve) -> dict[str, Any]:
    """Hit rate against multiples of the room that replicas have; the present is marked."""
    multiples = [point["multiple"] for point in curve.points]
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": label,
            "x": multiples,
            "y": [round(point[name], 4) for point in curve.points],
            "line": {"color": figures.colour(number), "dash": figures.dash(number), "width": 2},
            "hovertemplate": f"%{{x}} times: %{{y:.1%}}<extra>{label}</extra>",
        }
        for name, label, number in CURVES
    ]
    now = {"type": "line", "x0": 1, "x1": 1, "yref": "paper", "y0": 0, "y1": 1}
    layout = _layout(48) | {
        "showlegend": True,
        "legend": {"orientation": "h", "y": -0.16, "x": 0},
        "xaxis": {
            "type": "log",
            "range": [-0.65, 0.95],
            "tickvals": multiples,
            "ticktext": [f"{multiple:g}x" for multiple in multiples],
            "fixedrange": True,
        },
        "yaxis": {"range": [0, 1.02], "tickformat": ".0%", "dtick": 0.25, "fixedrange": True},
        "shapes": [{**now, "line": {"color": figures.REST, "width": 1, "dash": "dot"}}],
    }
    return _figure(traces, layout, curve_sentence(curve))


def curve_sentence(curve: CapacityCurve) -> str:
    """What twice the room, and a shared tier of the same, would bring."""
    by_multiple = {point["multiple"]: point for point in curve.points}
    if not curve.points:
        return curve.reason
    now, twice = by_multiple[1.0], by_multiple[2.0]
    more = 100 * (twice["split"] - now["split"])
    shared = 100 * (now["shared"] - now["split"])
    return (
        f"Twice the room in each replica would bring {more:.0f} points of hit rate; one cache shared by all, "
        f"of the same size together, {shared:.0f}."
    )


def _layout(left: int) -> dict[str, Any]:
    return {
        "template": None,
        "autosize": True,
        "showlegend": False,
        "dragmode": False,
        "margin": {"l": left, "r": 16, "t": 8, "b": 36},
    }


def _figure(traces: Sequence[dict[str, Any]], layout: dict[str, Any], said: str) -> dict[str, Any]:
    from plotly import graph_objects  # noqa: PLC0415 - half a second that only charts should pay

    figure = graph_objects.Figure(data=traces, layout=layout).to_plotly_json()
    return {"data": figure["data"], "layout": figure["layout"], "meta": {"sentence": said}}


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
