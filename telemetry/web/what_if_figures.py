"""Tables and charts of a what-if."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from telemetry.lab.predictions import Verdict, overload_text
from telemetry.models import WhatIf
from telemetry.web.breakdown_figures import LEGEND, figure_json, figure_layout, line_trace

VERDICTS = {
    Verdict.BETTER: ("better", "good"),
    Verdict.WORSE: ("worse", "bad"),
    Verdict.OVERLOAD: ("overload", "bad"),
    Verdict.MIXED: ("mixed", "warn"),
    Verdict.SAME: ("no difference", "idle"),
    Verdict.UNKNOWN: ("no verdict", "idle"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table of candidates."""

    name: str
    strategy: str
    figures: dict[str, Any] | None  # None: it could not be replayed
    reason: str
    hit_points: str  # difference from the active policy with its interval; "" for the active policy
    ttft_change: str
    verdict: str
    tone: str
    overload: str  # "" if no queue grows until the end
    groups: dict[str, dict[str, Any]]


def rows_of(what_if: WhatIf) -> list[Row]:
    """What was measured, the replayed active policy, and the candidates."""
    if what_if.result is None:
        return []
    measured = Row("Measured", "", what_if.result["measured"], "", "", "", "", "", "", {})
    return [measured, *(_row(number, row) for number, row in enumerate(what_if.replays))]


def _row(number: int, row: dict[str, Any]) -> Row:
    difference = row["difference"] or {}
    verdict, tone = VERDICTS[Verdict(row["verdict"])] if number else ("", "")
    return Row(
        "Active policy, replayed" if number == 0 else row["name"],
        row["strategy"],
        row["figures"],
        row["reason"],
        _interval(difference.get("hit_rate"), "points"),
        _interval(difference.get("ttft_p50"), "%"),
        verdict,
        tone,
        overload_text(row),
        row["groups"],
    )


def _interval(interval: dict[str, float] | None, unit: str) -> str:
    """A difference and its 95 % interval, such as +35 points (+31 to +38)."""
    if interval is None:
        return ""
    value, low, high = (f"{100 * interval[name]:+.0f}" for name in ("value", "low", "high"))
    return f"{value} {unit} ({low} to {high})"


def figure_of(what_if: WhatIf, slug: str) -> dict[str, Any]:
    """Hit rate or TTFT p50 over the counted time: measured, and a line for each replay."""
    result: dict[str, Any] = what_if.result or {}
    name = "hit_rate" if slug == "hit-rate" else "ttft_p50_s"
    lines = [("Measured", result["measured"]["timeline"])]
    lines += [(row.name, replay["timeline"]) for row, replay in zip(rows_of(what_if)[1:], what_if.replays, strict=True)]
    times = [datetime.fromtimestamp(point["at"], UTC).isoformat() for point in lines[0][1]]
    traces = [
        line_trace(
            label,
            [datetime.fromtimestamp(point["at"], UTC).isoformat() for point in points],
            [point[name] for point in points],
            number,
            "%{y:.1%}" if slug == "hit-rate" else "%{y:.3f}",
            mode="lines",
        )
        for number, (label, points) in enumerate(lines)
        if points
    ]
    axis = (
        {"tickformat": ".0%", "range": [0, 1.02]} if slug == "hit-rate" else {"ticksuffix": " s", "rangemode": "tozero"}
    )
    layout = figure_layout(56, LEGEND) | {
        "xaxis": {"type": "date", "fixedrange": True, "range": [times[0], times[-1]]},
        "yaxis": {"fixedrange": True, **axis},
    }
    return figure_json(traces, layout, "")
