"""Tables and charts of a what-if, and curves of a capacity sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import log10
from typing import Any

from controlplane.services.policies.settings import are_equal_settings
from controlplane.web.tags import MINUS
from telemetry.lab.predictions import Interval, Verdict, interval_text, overload_text
from telemetry.lab.sweeps import SweepPoint
from telemetry.models import WhatIf
from telemetry.web.breakdown_figures import (
    LEGEND,
    Sketch,
    draw_lines,
    figure_json,
    figure_layout,
    line_trace,
    vertical_line,
)

VERDICTS = {  # best first
    Verdict.BETTER: ("better", "good"),
    Verdict.MIXED: ("mixed", "warn"),
    Verdict.SAME: ("no difference", "idle"),
    Verdict.WORSE: ("worse", "bad"),
    Verdict.OVERLOAD: ("overload", "bad"),
    Verdict.UNKNOWN: ("no verdict", "idle"),
}
CHARTS = (("Hit rate", "hit_rate", "ratio"), ("TTFT p50", "ttft_p50_s", "seconds"))


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
    rank: tuple[float, ...] = ()  # ascending: by verdict, hit rate and TTFT p50
    number: int = 0  # of the candidate in ``what_if.candidates``


def rows_of(what_if: WhatIf) -> list[Row]:
    """What was measured, the replayed active policy, and the candidates in their order."""
    if what_if.result is None:
        return []
    measured = Row("Measured", "", what_if.result["measured"], "", "", "", "", "", "", {})
    return [measured, *(_row(number, row) for number, row in enumerate(what_if.replays))]


def ranked_rows(what_if: WhatIf) -> list[Row]:
    """The rows with the candidates best first, without those that are the active policy."""
    rows = rows_of(what_if)
    candidates = (row for row in rows[2:] if not _is_active(what_if, row.number))
    return [*rows[:2], *sorted(candidates, key=lambda row: row.rank)]


def _is_active(what_if: WhatIf, number: int) -> bool:
    """Whether a candidate is only the active policy's settings again."""
    changes = {name: value for name, value in what_if.candidates[number].items() if name != "name" and value}
    active = what_if.replays[0]["settings"]
    return changes.keys() == {"settings"} and "strategy" in active and are_equal_settings(changes["settings"], active)


def _row(number: int, row: dict[str, Any]) -> Row:
    difference = row["difference"] or {}
    verdict, tone = VERDICTS[Verdict(row["verdict"])] if number else ("", "")
    hit, ttft = (difference.get(name) for name in ("hit_rate", "ttft_p50"))
    return Row(
        "Active policy, replayed" if number == 0 else row["name"],
        row["strategy"],
        row["figures"],
        row["reason"],
        _difference(hit, "points"),
        _difference(ttft, "%"),
        verdict,
        tone,
        overload_text(row),
        row["groups"],
        (
            list(VERDICTS).index(Verdict(row["verdict"])),
            -hit["value"] if hit else 0.0,
            ttft["value"] if ttft else 0.0,
        ),
        number - 1,
    )


def _difference(interval: dict[str, float] | None, unit: str) -> str:
    """A difference and its 95 % interval, such as +35 points (+31 to +38); "" for none."""
    if interval is None:
        return ""
    found = Interval(**interval)
    text = interval_text(found)
    return f"{interval_text(found, found.value)} {unit} ({text})".replace("-", MINUS) if text else "no difference"


def charts_of(what_if: WhatIf, rows: Sequence[Row]) -> list[tuple[str, Sketch]]:
    """(title, chart) of hit rate and TTFT p50 over the counted time: a line for each row."""
    result: dict[str, Any] = what_if.result or {}
    timelines = [result["measured"]["timeline"], *(what_if.replays[row.number + 1]["timeline"] for row in rows[1:])]
    charts = []
    for title, name, unit in CHARTS:
        lines = [
            (row.name, [(datetime.fromtimestamp(point["at"], UTC), point[name]) for point in timeline])
            for row, timeline in zip(rows, timelines, strict=True)
            if timeline
        ]
        if drawn := draw_lines(lines, unit, summary=f"{title} of each candidate over time; the table has the totals"):
            charts.append((title, drawn))
    return charts


LINES = (
    ("hit_rate", "Hit rate", "y", ".1%", 0),
    ("ttft_p50_s", "TTFT p50 (right axis)", "y2", ".3f", 1),
    ("ttft_p95_s", "TTFT p95 (right axis)", "y2", ".3f", 2),
)


def sweep_figure(points: Sequence[SweepPoint], slug: str) -> dict[str, Any]:
    """Curves over sizes, ascending; the current size is marked."""
    known = [point for point in points if point.figures is not None]
    sizes = [point.replicas if slug == "replicas" else point.cache_tokens for point in known]
    traces = [
        line_trace(label, sizes, [(point.figures or {})[name] for point in known], number, f"%{{x}}: %{{y:{shown}}}")
        | {"yaxis": axis}
        for name, label, axis, shown, number in LINES
    ]
    present = next((size for point, size in zip(known, sizes, strict=True) if point.is_current), None)
    layout = figure_layout(48, LEGEND) | {
        "margin": {"l": 48, "r": 56, "t": 8, "b": 36},
        "xaxis": _axis(sizes, slug),
        "yaxis": {"range": [0, 1.02], "tickformat": ".0%", "fixedrange": True},
        "yaxis2": {
            "overlaying": "y",
            "side": "right",
            "ticksuffix": " s",
            "tickformat": ".2~f",
            "rangemode": "tozero",
            "showgrid": False,
            "fixedrange": True,
        },
        "shapes": [] if present is None else [vertical_line(present)],
    }
    return figure_json(traces, layout, "")


def _axis(sizes: Sequence[int], slug: str) -> dict[str, Any]:
    """Every size as a tick: replicas on a linear axis, caches on a logarithmic one."""
    texts = [str(size) if slug == "replicas" else f"{size / 1000:,.0f} k" for size in sizes]
    low, high = min(sizes, default=1), max(sizes, default=1)
    shown = [low - 0.3, high + 0.3] if slug == "replicas" else [log10(low) - 0.1, log10(high) + 0.1]
    kind = "linear" if slug == "replicas" else "log"
    return {"type": kind, "fixedrange": True, "range": shown, "tickvals": list(sizes), "ticktext": texts}
