"""Charts of the lab: hit rate and TTFT by number of replicas or cache size, and errors of predictions over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import log10
from typing import Any

from telemetry.lab.predictions import MAX_HIT_ERROR, MAX_TTFT_ERROR
from telemetry.lab.sweeps import Point
from telemetry.models import Prediction
from telemetry.web import figures
from telemetry.web.breakdown_figures import figure_json, figure_layout

LINES = (
    ("hit_rate", "Hit rate", "y", 0),
    ("ttft_p50_s", "TTFT p50 (right axis)", "y2", 1),
    ("ttft_p95_s", "TTFT p95 (right axis)", "y2", 2),
)


def sweep_figure(points: Sequence[Point], slug: str) -> dict[str, Any]:
    """Curves over sizes, ascending; the current size is marked."""
    known = [point for point in points if point.figures is not None]
    sizes = [point.replicas if slug == "replicas" else point.cache_tokens for point in known]
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": label,
            "x": sizes,
            "y": [_rounded((point.figures or {})[name]) for point in known],
            "yaxis": axis,
            "line": {"color": figures.colour(number), "dash": figures.dash(number), "width": 2},
            "hovertemplate": f"%{{x}}: %{{y:{'.1%' if axis == 'y' else '.3f'}}}<extra>{label}</extra>",
        }
        for name, label, axis, number in LINES
    ]
    present = next((size for point, size in zip(known, sizes, strict=True) if point.is_current), None)
    mark = {"type": "line", "x0": present, "x1": present, "yref": "paper", "y0": 0, "y1": 1}
    layout: dict[str, Any] = {
        "template": None,
        "autosize": True,
        "showlegend": True,
        "dragmode": False,
        "margin": {"l": 48, "r": 56, "t": 8, "b": 36},
        "legend": {"orientation": "h", "y": -0.16, "x": 0},
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
        "shapes": [] if present is None else [{**mark, "line": {"color": figures.REST, "width": 1, "dash": "dot"}}],
        "annotations": [],
    }
    from plotly import graph_objects  # noqa: PLC0415 - the import takes half a second

    figure = graph_objects.Figure(data=traces, layout=layout).to_plotly_json()
    return {"data": figure["data"], "layout": figure["layout"]}


def _axis(sizes: Sequence[int], slug: str) -> dict[str, Any]:
    """Every size as a tick: replicas on a linear axis, caches on a logarithmic one."""
    texts = [str(size) if slug == "replicas" else f"{size / 1000:,.0f} k" for size in sizes]
    low, high = min(sizes, default=1), max(sizes, default=1)
    shown = [low - 0.3, high + 0.3] if slug == "replicas" else [log10(low) - 0.1, log10(high) + 0.1]
    kind = "linear" if slug == "replicas" else "log"
    return {"type": kind, "fixedrange": True, "range": shown, "tickvals": list(sizes), "ticktext": texts}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


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
    layout = figure_layout(72) | {
        "showlegend": True,
        "legend": {"orientation": "h", "y": -0.16, "x": 0},
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
