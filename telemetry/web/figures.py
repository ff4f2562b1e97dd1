"""Builds Plotly figures from series.

A figure contains, in this order, bands, lines and event marks; ``meta`` of a trace names its kind for the legend and
the table. Gaps are not connected. At most twelve lines are drawn: of more, the six highest and the six lowest, and
the others as one band from their minimum to their maximum; CSV and JSON contain all. Stacked lines carry their own
value in ``customdata``. Times at which a cache was cold after a restart are shaded. Theme colours (paper, grid,
text) are added by the page. Line colours have a contrast of at least 3:1 on the light and the dark surface (tested),
and each line also has a dash, so that colour is never the only difference.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from controlplane.models import Event, EventKind
from telemetry.metrics.windows import Series, Window
from telemetry.services.figures.groups import Period
from telemetry.web.charts import View, chart_summary, notes_of, why_empty

COLOURS = (
    "#d9581a", "#3f86cc", "#179180", "#9a74dc", "#cf559f", "#8f8622",
    "#e0504c", "#7f8b98", "#4d9c3a", "#ab7748", "#2a96b3", "#6f7ce6",
)  # fmt: skip
DASHES = ("solid", "dash", "dot", "dashdot")
REST = "#7f8b98"
COLD = "#3f86cc"
SURFACES = ("#ffffff", "#1c1816")


def colour(index: int) -> str:
    """The colour of line number ``index``. After twelve lines the colours repeat with another dash."""
    return COLOURS[index % len(COLOURS)]


def dash(index: int) -> str:
    """The dash of line number ``index``."""
    return DASHES[(index + index // len(COLOURS)) % len(DASHES)]


def translucent(hex_colour: str, alpha: float) -> str:
    """A colour with an opacity, as CSS writes it."""
    red, green, blue = (int(hex_colour[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


# Events that are marked, the most important first: (label, tone).
MARKED = {
    EventKind.POLICY_PUBLISHED: ("policy", "policy"),
    EventKind.ROLLOUT_ROLLED_BACK: ("rolled back", "bad"),
    EventKind.ROLLOUT_ABORTED: ("aborted", "bad"),
    EventKind.ROLLOUT_STARTED: ("canary", "policy"),
    EventKind.ROLLOUT_PROMOTED: ("promoted", "policy"),
    EventKind.ALERT_FIRING: ("alert", "bad"),
    EventKind.REPLICA_DOWN: ("down", "bad"),
    EventKind.REPLICA_RESTARTED: ("restart", "cold"),
    EventKind.REPLICA_REMOVED: ("removed", "fleet"),
    EventKind.REPLICA_STATE_CHANGED: ("state", "fleet"),
    EventKind.REPLICA_ADDED: ("added", "fleet"),
    EventKind.TRAFFIC_MIX_CHANGED: ("traffic mix", "fleet"),
    EventKind.REPLICA_UP: ("up", "good"),
    EventKind.ALERT_RESOLVED: ("resolved", "good"),
    EventKind.CONFIG_REJECTED: ("rejected", "bad"),
    EventKind.ROUTER_LOST: ("router lost", "bad"),
    EventKind.CONFIG_APPLIED: ("applied", "policy"),
}
MARKER_COLOURS = {"policy": "#d9581a", "bad": "#e0504c", "cold": "#3f86cc", "good": "#4d9c3a", "fleet": "#7f8b98"}
MAX_LISTED = 3  # events of a kind that a line of the list names
MARKS_PER_CHART = 40  # events within a 40th of the chart share a mark


@dataclass(frozen=True, slots=True)
class Marker:
    """A mark on the time axis; ``lines`` are its events, those of the same kind in one line, each with its time."""

    at: datetime
    label: str
    colour: str
    lines: list[tuple[datetime, str]]
    count: int


def markers(events: Iterable[Event], window: Window, *, named: bool = True) -> list[Marker]:
    """The marks of a window, ascending. Events close to each other share a mark.

    ``named``: whether the mark of a new policy has its name, which the bands of a single pool have already.
    """
    distance = timedelta(seconds=window.length_s / MARKS_PER_CHART)
    groups: list[list[Event]] = []
    for event in events:
        if event.kind not in MARKED:
            continue
        if groups and event.at - groups[-1][0].at < distance:
            groups[-1].append(event)
        else:
            groups.append([event])
    return [_marker(group, named=named) for group in groups]


def _marker(events: list[Event], *, named: bool) -> Marker:
    first = min(events, key=lambda event: list(MARKED).index(EventKind(event.kind)))
    of_kind: dict[str, list[Event]] = {}
    for event in events:
        of_kind.setdefault(event.kind, []).append(event)
    lines = [(of[0].at, _line_of(of)) for of in of_kind.values()]
    return Marker(
        first.at, _mark_label(first, named=named), MARKER_COLOURS[MARKED[EventKind(first.kind)][1]], lines, len(events)
    )


def _line_of(events: list[Event]) -> str:
    """Events of one kind as a line."""
    summaries = " ".join(event.summary for event in events[:MAX_LISTED])
    more = f" And {len(events) - MAX_LISTED} more." if len(events) > MAX_LISTED else ""
    return summaries + more


def _mark_label(event: Event, *, named: bool) -> str:
    """The label with the name of its policy or replica, if that is short; "" for a policy that a band names."""
    label = MARKED[EventKind(event.kind)][0]
    if event.kind == EventKind.POLICY_PUBLISHED:
        strategy = (event.detail.get("after") or {}).get("strategy", label)
        return f"{event.detail.get('policy', label)}: {strategy} r{event.detail.get('revision', '')}" if named else ""
    if event.replica is not None and len(event.replica.name) <= 12:
        return f"{event.replica.name} {label}"
    return label


MAX_LINES = 12
AXES: dict[str, dict[str, Any]] = {
    "ratio": {"tickformat": ".0%", "range": [0, 1.02], "dtick": 0.25},
    "seconds": {"tickformat": "~s", "ticksuffix": "s", "rangemode": "tozero"},
    "count": {"rangemode": "tozero"},
}
HOVERS = {"ratio": "%{y:.1%}", "seconds": "%{y:.3~s}s", "count": "%{y:.1~f}"}
Interval = tuple[datetime, datetime]
Polygon = tuple[list[str | None], list[float | None]]


def build_figure(
    view: View,
    lines: Sequence[Series],
    marks: Sequence[Marker],
    window: Window,
    *,
    cold: Sequence[Interval] = (),
    periods: Sequence[Period] = (),
) -> dict[str, Any]:
    """A figure for ``Plotly.react``: ``data``, ``layout``, and ``meta`` with the summary, the events and the notes."""
    if view.spread:
        lines = _summarized(lines)
    from plotly import graph_objects  # noqa: PLC0415 - the import takes half a second

    traces = (
        _stacked(lines, view.figure.unit, window) if view.figure.stacked else _overlaid(lines, view.figure.unit, window)
    )
    if marks:
        traces.append(_marks(marks))
    layout = _layout(view, marks, window)
    shaded = [_shade((start, end), window, REST, 0.09) for start, end, _ in periods[::2]]
    layout["shapes"] = shaded + [_shade(interval, window) for interval in cold] + layout["shapes"]
    layout["annotations"] += [_period_label(start, label) for start, _, label in periods]
    figure = graph_objects.Figure(data=traces, layout=layout).to_plotly_json()
    return {"data": figure["data"], "layout": figure["layout"], "meta": _meta(view, lines, marks, window)}


def _overlaid(lines: Sequence[Series], unit: str, window: Window) -> list[dict[str, Any]]:
    drawn, rest = _drawn(lines)
    traces = [_band(_spread(rest), f"{len(rest)} others, minimum to maximum", REST, 0.25)] if rest else []
    traces += [_band(_edges(line), line.label, colour(index), 0.18, "edge") for index, line in drawn if line.band]
    return traces + _lines(drawn, unit, window)


def _summarized(lines: Sequence[Series]) -> Sequence[Series]:
    """Of more than two lines: their median, with the band from the lowest to the highest value, and both of these."""
    if len(lines) <= 2:
        return lines
    steps = [
        [value for _, value in step if value is not None] for step in zip(*(line.points for line in lines), strict=True)
    ]
    starts = [at for at, _ in lines[0].points]

    def of(name: str, choose: Callable[[list[float]], float]) -> Series:
        return Series(name, [(at, choose(known) if known else None) for at, known in zip(starts, steps, strict=True)])

    middle = of(f"median of {len(lines)}", statistics.median)
    band = [_ends(known) for known in steps]
    return [Series(middle.label, middle.points, lines[0].states, band), of("highest", max), of("lowest", min)]


def _stacked(lines: Sequence[Series], unit: str, window: Window) -> list[dict[str, Any]]:
    """Each line on top of the previous ones; an unknown value adds nothing."""
    floor = [0.0] * len(window.starts())
    areas, tops = [], []
    for index, line in enumerate(lines):
        values = [value for _, value in line.points]
        top = [None if value is None else low + value for low, value in zip(floor, values, strict=True)]
        ends = [None if high is None else (low, high) for low, high in zip(floor, top, strict=True)]
        area = _polygon((at, between) for (at, _), between in zip(line.points, ends, strict=True))
        areas.append(_band(area, line.label, colour(index), 0.45, "edge"))
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
        "unit": view.figure.unit,
        "summary": chart_summary(view, window, lines, sum(mark.count for mark in marks)),
        "empty": "" if known else why_empty(view, lines),
        "events": [[_stamp(at), text] for mark in marks for at, text in mark.lines],
        "notes": notes_of(lines),
    }


def _drawn(lines: Sequence[Series]) -> tuple[list[tuple[int, Series]], list[Series]]:
    """(lines to draw with their numbers, which determine their colours; the other lines)."""
    numbered = list(enumerate(lines))
    if len(numbered) <= MAX_LINES:
        return numbered, []
    means = {index: mean for index, line in numbered if (mean := _mean(line)) is not None}
    ranked = sorted(means, key=lambda index: means[index])
    half = MAX_LINES // 2
    kept = {*ranked[:half], *ranked[-half:]}
    return [pair for pair in numbered if pair[0] in kept], [line for index, line in numbered if index not in kept]


def _mean(line: Series) -> float | None:
    """The mean of the known values; None without any."""
    values = [value for _, value in line.points if value is not None]
    return sum(values) / len(values) if values else None


def _lines(numbered: Sequence[tuple[int, Series]], unit: str, window: Window) -> list[dict[str, Any]]:
    """The lines. Their common times are given as start and step, which is much smaller."""
    shared = {
        "x0": _stamp(window.start),
        "dx": window.step_s * 1000,  # ms
        "hoverlabel": {"namelength": -1},
    }
    width = 2 if len(numbered) <= 4 else 1.5
    return [{**_line(index, line, unit, width), **shared} for index, line in numbered]


def _line(index: int, line: Series, unit: str, width: float) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if _has_isolated_value(line) else "lines",
        "name": line.label,
        "y": [_short(value) for _, value in line.points],
        "connectgaps": False,
        "line": {"color": colour(index), "dash": dash(index), "width": width},
        "marker": {"size": 4},
        "hovertemplate": f"{HOVERS[unit]}<extra>{_escaped(line.label)}</extra>",
        "meta": "line",
    }


def _has_isolated_value(line: Series) -> bool:
    """Whether a value is isolated between gaps, where a line would not show it."""
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
        "fillcolor": translucent(colour, alpha),
        "line": {"width": 0, "color": colour},
        "hoverinfo": "skip",
        "meta": meta,
    }


def _edges(line: Series) -> Polygon:
    """The histogram bucket of each value."""
    pairs = zip(line.points, line.band, strict=False)
    return _polygon((at, band if band and math.isfinite(band[1]) else None) for (at, _), band in pairs)


def _spread(lines: Sequence[Series]) -> Polygon:
    """From the minimum to the maximum of several lines at each step."""
    steps = zip(*(line.points for line in lines), strict=False)
    return _polygon((step[0][0], _ends([value for _, value in step if value is not None])) for step in steps)


def _ends(values: list[float]) -> tuple[float, float] | None:
    return (min(values), max(values)) if values else None


def _polygon(steps: Iterable[tuple[datetime, tuple[float, float] | None]]) -> Polygon:
    """Closed shapes, one per range without a gap, separated by None."""
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
        "hovertext": [_escaped(f"{mark.label or 'new policy'}{_more(mark)}") for mark in marks],
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
            **_time_axis_format(window),
        },
        "yaxis": {"fixedrange": True, "zeroline": False, "nticks": 5, "exponentformat": "SI", **AXES[view.figure.unit]},
        "yaxis2": {"overlaying": "y", "range": [0, 1], "fixedrange": True, "visible": False},
        "shapes": [_mark_line(mark) for mark in marks],
        "annotations": [_annotation(mark) for mark in marks if mark.label],
    }


def _time_axis_format(window: Window) -> dict[str, Any]:
    """The format of the time axis; it includes the day only if there are several."""
    if window.length_s <= 600:
        return {"tickformat": "%H:%M:%S"}
    return {"tickformat": "%H:%M" if window.length_s <= 86_400 else "%d %b\n%H:%M"}


def _mark_line(mark: Marker) -> dict[str, Any]:
    at = _stamp(mark.at)
    line = {"color": mark.colour, "width": 1, "dash": "dot"}
    return {"type": "line", "xref": "x", "yref": "paper", "x0": at, "x1": at, "y0": 0, "y1": 1, "line": line}


def _shade(interval: Interval, window: Window, colour: str = COLD, alpha: float = 0.16) -> dict[str, Any]:
    start, end = (_stamp(min(max(at, window.start), window.end)) for at in interval)
    place = {"type": "rect", "xref": "x", "yref": "paper", "x0": start, "x1": end, "y0": 0, "y1": 1}
    return {**place, "layer": "below", "line": {"width": 0}, "fillcolor": translucent(colour, alpha)}


def _period_label(start: datetime, label: str) -> dict[str, Any]:
    """The name of the policy at the top of its time; ``plot-theme.js`` knows it by ``name``."""
    place = {"xref": "x", "yref": "paper", "x": _stamp(start), "y": 1, "yanchor": "top", "xanchor": "left"}
    return {**place, "name": "policy", "text": _escaped(label), "showarrow": False, "font": {"size": 12}}


def _annotation(mark: Marker) -> dict[str, Any]:
    return {
        "xref": "x",
        "yref": "paper",
        "x": _stamp(mark.at),
        "y": 1,
        "yanchor": "bottom",
        "xanchor": "left",
        "yshift": 1,
        "name": "publication" if mark.colour == MARKER_COLOURS["policy"] else "mark",  # for ``plot-theme.js``
        "text": _escaped(f"{mark.label}{_more(mark)}"),
        "showarrow": False,
        "font": {"size": 11},
    }


def _more(mark: Marker) -> str:
    return f" +{mark.count - 1}" if mark.count > 1 else ""


def _stamp(at: datetime) -> str:
    """A time for Plotly: in UTC without an offset; milliseconds only if there are any."""
    text = at.strftime("%Y-%m-%dT%H:%M:%S")
    return f"{text}.{at.microsecond // 1000:03d}" if at.microsecond >= 1000 else text


def _short(value: float | None) -> float | None:
    """The value with four digits, to keep figures small."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def _escaped(text: str) -> str:
    """The text without markup, which Plotly would interpret."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
