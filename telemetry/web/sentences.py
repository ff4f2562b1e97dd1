"""What a chart shows, said in a sentence for those who do not see it, and figures in words."""

from __future__ import annotations

from collections.abc import Sequence

from controlplane.web.tags import count, percent, seconds
from telemetry.metrics.windows import PointState, Series, Window
from telemetry.web.charts import View

NAMED = 4  # lines that a sentence names

_WORDS = {"ratio": percent, "seconds": seconds, "count": count}
_ABSENT = {
    PointState.NO_TRAFFIC: "no traffic",
    PointState.STALE: "stale: scrapes fail",
    PointState.NOT_REPORTED: "not reported by this engine",
    PointState.UNKNOWN: "unknown",
    PointState.OK: "unknown",
}


def figure_words(value: float | None, unit: str) -> str:
    """A value with its unit."""
    return _WORDS[unit](value)


def absence(state: PointState | str) -> str:
    """Why there is no figure."""
    return _ABSENT[PointState(state)]


def chart_sentence(view: View, window: Window, lines: Sequence[Series], events: int) -> str:
    """One chart in words: what, when, where each line ends, and what happened meanwhile."""
    span = f"{window.start:%H:%M} to {window.end:%H:%M} UTC"
    known = [(line.label, value) for line in lines if (value := last_value(line)) is not None]
    if not known:
        return f"{view.title}, {span}: nothing was measured ({why_empty(view, lines)})."
    known.sort(key=lambda pair: -pair[1])
    named = ", ".join(f"{label} {figure_words(value, view.unit)}" for label, value in known[:NAMED])
    more = f" and {len(known) - NAMED} more" if len(known) > NAMED else ""
    happened = f" {events} {'event' if events == 1 else 'events'} marked." if events else ""
    return f"{view.title}, {span}. Last values: {named}{more}.{happened}"


def last_value(line: Series) -> float | None:
    """The newest known value."""
    return next((value for _, value in reversed(line.points) if value is not None), None)


def notes_of(lines: Sequence[Series]) -> list[str]:
    """What readers of a chart must know of its lines, each note once."""
    return sorted({line.note for line in lines if line.note})


def why_empty(view: View, lines: Sequence[Series]) -> str:
    """The most specific reason why a chart has no point: failed scrapes, the view's own, no traffic, not reported."""
    states = {state for line in lines for state in line.states}
    if view.empty and PointState.STALE not in states:
        return view.empty
    for state in (PointState.STALE, PointState.NO_TRAFFIC, PointState.NOT_REPORTED):
        if state in states:
            return absence(state)
    return "no reading yet"
