"""Charts of the lab: hit rate and TTFT by number of replicas or cache size, and errors of predictions over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import log10
from typing import Any

from telemetry.lab.predictions import MAX_HIT_ERROR, MAX_TTFT_ERROR
from telemetry.lab.sweeps import SweepPoint
from telemetry.models import Prediction
from telemetry.web import figures
from telemetry.web.breakdown_figures import LEGEND, figure_json, figure_layout, line_trace, vertical_line

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


MARGIN = timedelta(minutes=30)  # beside the first and the last mark


@dataclass(frozen=True, slots=True)
class ErrorFigure:
    """One chart: errors in percentage points or per cent."""

    title: str
    unit: str
    limit: float  # drawn above and below 0
    error: Callable[[Prediction], float | None]

    def value(self, record: Prediction) -> float | None:
        """The error of a calibrated prediction, times 100; None: not known."""
        error = self.error(record) if record.is_calibrated else None
        return None if error is None else 100 * error

    def has_values(self, records: Sequence[Prediction]) -> bool:
        """Whether there is anything to draw."""
        return any(self.value(record) is not None for record in records)


ERROR_FIGURES = {
    "hit-rate": ErrorFigure("Error of the hit rate", "points", 100 * MAX_HIT_ERROR, lambda row: row.hit_rate_error),
    "ttft": ErrorFigure("Error of TTFT p50", "%", 100 * MAX_TTFT_ERROR, lambda row: row.ttft_p50_error),
}


def error_figure(records: Sequence[Prediction], slug: str) -> dict[str, Any]:
    """Predicted minus measured by time of publication, a series for each pool."""
    figure = ERROR_FIGURES[slug]
    known = [(record, value) for record in records if (value := figure.value(record)) is not None]
    pools = sorted({record.rollout.revision.policy.pool.name for record, _ in known})
    traces = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": pool,
            "x": [record.rollout.started_at.isoformat() for record, _ in rows],
            "y": [round(value, 2) for _, value in rows],
            "text": [str(record.rollout.revision) for record, _ in rows],
            "marker": {"color": figures.colour(number), "size": 9},
            "hovertemplate": f"%{{text}}: %{{y:+.1f}} {figure.unit}<extra></extra>",
        }
        for number, pool in enumerate(pools)
        if (rows := [pair for pair in known if pair[0].rollout.revision.policy.pool.name == pool])
    ]
    times = [record.rollout.started_at for record, _ in known]
    margin = max(MARGIN, (max(times) - min(times)) / 20) if times else MARGIN
    reach = 1.2 * max([figure.limit, *(abs(value) for _, value in known)])
    layout = figure_layout(72, LEGEND) | {
        "xaxis": {
            "type": "date",
            "fixedrange": True,
            "range": [(min(times) - margin).isoformat(), (max(times) + margin).isoformat()] if times else None,
        },
        "yaxis": {"fixedrange": True, "range": [-reach, reach], "ticksuffix": f" {figure.unit}"},
        "shapes": [
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": {"dash": "dot", "width": 1}}
            for y in (-figure.limit, figure.limit)
        ],
    }
    return figure_json(traces, layout, "")
