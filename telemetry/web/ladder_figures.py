"""The ladder and the curve of room, as Plotly figures. Colours of paper, grid and text are the page's to add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from telemetry.lab.ladder import LOSSES as STEPS
from telemetry.lab.ladder import TERMS, Ladder
from telemetry.lab.words import LOSSES, Words, points, sentence
from telemetry.models import CapacityCurve
from telemetry.web import palette

TOTAL, LOST, GOT = palette.COLOURS[1], palette.COLOURS[0], palette.COLOURS[2]
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
    words: Words | None

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
        key = "unknown" if missing else STEPS[name]
        words = LOSSES.get(key)
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
    return _figure([trace], layout, sentence(ladder))


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
            "line": {"color": palette.colour(number), "dash": palette.dash(number), "width": 2},
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
        "shapes": [{**now, "line": {"color": palette.REST, "width": 1, "dash": "dot"}}],
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
