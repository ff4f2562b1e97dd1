"""Series to a plotly figure as JSON. Theme colours (paper, grid, text) are the page's to add; lines carry their own.

Theory of operation. A figure holds, in this order: bands, lines, event marks; ``meta`` of a trace says which, for the
legend and the table. Gaps are not joined. At most twelve lines are drawn: of more, the six highest and the six
lowest, the rest as one band from their lowest to their highest; CSV and JSON have them all. Stacked lines stand on
each other, each with the area down to the one below; ``customdata`` then holds what the line itself is worth. Times
at which a cache was cold are shaded behind everything (H18).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from telemetry.metrics.windows import Series, Window
from telemetry.web import palette
from telemetry.web.charts import View
from telemetry.web.markers import Marker
from telemetry.web.sentences import chart_sentence, notes_of, why_empty

MOST_LINES = 12
AXES: dict[str, dict[str, Any]] = {
    "ratio": {"tickformat": ".0%", "range": [0, 1.02], "dtick": 0.25},
    "seconds": {"tickformat": "~s", "ticksuffix": "s", "rangemode": "tozero"},
    "count": {"rangemode": "tozero"},
}
HOVERS = {"ratio": "%{y:.1%}", "seconds": "%{y:.3~s}s", "count": "%{y:.1~f}"}
Stretch = tuple[datetime, datetime]
Polygon = tuple[list[str | None], list[float | None]]


def build_figure(
    view: View, lines: Sequence[Series], marks: Sequence[Marker], window: Window, cold: Sequence[Stretch] = ()
) -> dict[str, Any]:
    """A figure for ``Plotly.react``: ``data`` and ``layout``, and ``meta`` with the sentence and the notes."""
    from plotly import graph_objects  # noqa: PLC0415 - half a second that only charts should pay

    traces = _stacked(lines, view.unit, window) if view.stacked else _beside(lines, view.unit, window)
    if marks:
        traces.append(_marks(marks))
    layout = _layout(view, marks, window)
    layout["shapes"] = [_shade(stretch, window) for stretch in cold] + layout["shapes"]
    figure = graph_objects.Figure(data=traces, layout=layout).to_plotly_json()
    return {"data": figure["data"], "layout": figure["layout"], "meta": _meta(view, lines, marks, window)}


def _beside(lines: Sequence[Series], unit: str, window: Window) -> list[dict[str, Any]]:
    chosen, rest = _chosen(lines)
    traces = [_band(_spread(rest), f"{len(rest)} others, lowest to highest", palette.REST, 0.25)] if rest else []
    traces += [
        _band(_edges(line), line.label, palette.colour(index), 0.18, "edge") for index, line in chosen if line.band
    ]
    return traces + _lines(chosen, unit, window)


def _stacked(lines: Sequence[Series], unit: str, window: Window) -> list[dict[str, Any]]:
    """Each line on top of those before it; a step of which a line knows nothing adds nothing."""
    floor = [0.0] * len(window.starts())
    areas, tops = [], []
    for index, line in enumerate(lines):
        values = [value for _, value in line.points]
        top = [None if value is None else low + value for low, value in zip(floor, values, strict=True)]
        ends = [None if high is None else (low, high) for low, high in zip(floor, top, strict=True)]
        area = _polygon((at, between) for (at, _), between in zip(line.points, ends, strict=True))
        areas.append(_band(area, line.label, palette.colour(index), 0.45, "edge"))
        raised = [(at, high) for (at, _), high in zip(line.points, top, strict=True)]
        tops += _lines([(index, Series(line.label, raised, line.states))], unit, window)
        tops[-1] |= {"customdata": [_short(value) for value in values]}
        tops[-1]["hovertemplate"] = tops[-1]["hovertemplate"].replace("%{y:", "%{customdata:")
        floor = [low if high is None else high for low, high in zip(floor, top, strict=True)]
    return areas + tops


def _meta(view: View, lines: Sequence[Series], marks: Sequence[Marker], window: Window) -> dict[str, Any]:
    known = any(value is not None for line in lines for _, value in line.points)
    return {
        "title": view.title,
        "unit": view.unit,
        "sentence": chart_sentence(view, window, lines, sum(mark.count for mark in marks)),
        "empty": "" if known else why_empty(view, lines),
        "notes": notes_of(lines),
    }


def _chosen(lines: Sequence[Series]) -> tuple[list[tuple[int, Series]], list[Series]]:
    """The lines to draw with their numbers, which fix their colours, and the rest."""
    numbered = list(enumerate(lines))
    if len(numbered) <= MOST_LINES:
        return numbered, []
    means = {index: mean for index, line in numbered if (mean := _mean(line)) is not None}
    ranked = sorted(means, key=lambda index: means[index])
    half = MOST_LINES // 2
    drawn = {*ranked[:half], *ranked[-half:]}
    return [pair for pair in numbered if pair[0] in drawn], [line for index, line in numbered if index not in drawn]


def _mean(line: Series) -> float | None:
    """The mean of what is known; None where nothing is, and then there is nothing to draw."""
    values = [value for _, value in line.points if value is not None]
    return sum(values) / len(values) if values else None


def _lines(chosen: Sequence[tuple[int, Series]], unit: str, window: Window) -> list[dict[str, Any]]:
    """The lines; their times, the same for all, are written as a start and a step instead of one by one."""
    shared = {
        "x0": _stamp(window.start),
        "dx": window.step_s * 1000,  # ms
        "hoverlabel": {"namelength": -1},
    }
    width = 2 if len(chosen) <= 4 else 1.5
    return [{**_line(index, line, unit, width), **shared} for index, line in chosen]


def _line(index: int, line: Series, unit: str, width: float) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if _sparse(line) else "lines",
        "name": line.label,
        "y": [_short(value) for _, value in line.points],
        "connectgaps": False,
        "line": {"color": palette.colour(index), "dash": palette.dash(index), "width": width},
        "marker": {"size": 4},
        "hovertemplate": f"{HOVERS[unit]}<extra>{_escaped(line.label)}</extra>",
        "meta": "line",
    }


def _sparse(line: Series) -> bool:
    """Whether a value stands alone between gaps, which a line alone would not show."""
    values = [None, *(value for _, value in line.points), None]
    return any(
        value is not None and before is None and after is None
        for before, value, after in zip(values, values[1:], values[2:], strict=False)
    )


def _band(polygon: Polygon, name: str, colour: str, alpha: float, meta: str = "band") -> dict[str, Any]:
    xs, ys = polygon
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": xs,
        "y": ys,
        "fill": "toself",
        "fillcolor": palette.translucent(colour, alpha),
        "line": {"width": 0, "color": colour},
        "hoverinfo": "skip",
        "meta": meta,
    }


def _edges(line: Series) -> Polygon:
    """The bucket that holds each value."""
    pairs = zip(line.points, line.band, strict=False)
    return _polygon((at, band if band and math.isfinite(band[1]) else None) for (at, _), band in pairs)


def _spread(lines: Sequence[Series]) -> Polygon:
    """From the lowest to the highest of several lines, step by step."""
    steps = zip(*(line.points for line in lines), strict=False)
    return _polygon((step[0][0], _ends([value for _, value in step if value is not None])) for step in steps)


def _ends(values: list[float]) -> tuple[float, float] | None:
    return (min(values), max(values)) if values else None


def _polygon(steps: Iterable[tuple[datetime, tuple[float, float] | None]]) -> Polygon:
    """Closed shapes, one per stretch without a gap, parted by None."""
    xs: list[str | None] = []
    ys: list[float | None] = []
    stretch: list[tuple[str, tuple[float, float]]] = []
    for at, ends in [*steps, (None, None)]:
        if ends is not None and at is not None:
            stretch.append((_stamp(at), ends))
        elif stretch:
            forth, back = [at for at, _ in stretch], [at for at, _ in reversed(stretch)]
            xs += [*forth, *back, None]
            ys += [
                *(_short(high) for _, (_, high) in stretch),
                *(_short(low) for _, (low, _) in reversed(stretch)),
                None,
            ]
            stretch = []
    return xs[:-1], ys[:-1]


def _marks(marks: Sequence[Marker]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "Events",
        "x": [_stamp(mark.at) for mark in marks],
        "y": [0.985] * len(marks),
        "yaxis": "y2",
        "marker": {"symbol": "triangle-down", "size": 11, "color": [mark.colour for mark in marks]},
        "hovertext": ["<br>".join(_escaped(line) for line in mark.text.split("\n")) for mark in marks],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "cliponaxis": False,
        "meta": "events",
    }


def _layout(view: View, marks: Sequence[Marker], window: Window) -> dict[str, Any]:
    return {
        "template": None,
        "autosize": True,
        "showlegend": False,
        "hovermode": "x unified",
        "dragmode": "zoom",
        "margin": {"l": 52, "r": 12, "t": 22 if marks else 10, "b": 28},
        "xaxis": {
            "type": "date",
            "range": [_stamp(window.start), _stamp(window.end)],
            "showgrid": False,
            **_times(window),
        },
        "yaxis": {"fixedrange": True, "zeroline": False, "nticks": 5, "exponentformat": "SI", **AXES[view.unit]},
        "yaxis2": {"overlaying": "y", "range": [0, 1], "fixedrange": True, "visible": False},
        "shapes": [_rule(mark) for mark in marks],
        "annotations": [_label(mark) for mark in marks],
    }


def _times(window: Window) -> dict[str, Any]:
    """How the time axis is written: the day only where there are several."""
    if window.length_s <= 600:
        return {"tickformat": "%H:%M:%S"}
    return {"tickformat": "%H:%M" if window.length_s <= 86_400 else "%d %b\n%H:%M"}


def _rule(mark: Marker) -> dict[str, Any]:
    at = _stamp(mark.at)
    line = {"color": mark.colour, "width": 1, "dash": "dot"}
    return {"type": "line", "xref": "x", "yref": "paper", "x0": at, "x1": at, "y0": 0, "y1": 1, "line": line}


def _shade(stretch: Stretch, window: Window) -> dict[str, Any]:
    start, end = (_stamp(min(max(at, window.start), window.end)) for at in stretch)
    place = {"type": "rect", "xref": "x", "yref": "paper", "x0": start, "x1": end, "y0": 0, "y1": 1}
    return {**place, "layer": "below", "line": {"width": 0}, "fillcolor": palette.translucent(palette.COLD, 0.16)}


def _label(mark: Marker) -> dict[str, Any]:
    more = f" +{mark.count - 1}" if mark.count > 1 else ""
    return {
        "xref": "x",
        "yref": "paper",
        "x": _stamp(mark.at),
        "y": 1,
        "yanchor": "bottom",
        "xanchor": "left",
        "yshift": 1,
        "text": _escaped(f"{mark.label}{more}"),
        "showarrow": False,
        "font": {"size": 11},
    }


def _stamp(at: datetime) -> str:
    """A time as Plotly draws it: UTC, without saying so; milliseconds only where there are any."""
    text = at.strftime("%Y-%m-%dT%H:%M:%S")
    return f"{text}.{at.microsecond // 1000:03d}" if at.microsecond >= 1000 else text


def _short(value: float | None) -> float | None:
    """Four digits: more would be sent for nothing."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def _escaped(text: str) -> str:
    """Names hold no mark-up, but Plotly reads some in labels."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
