"""Charts of predictions: the error of each rollout's prediction over time, and the limits of a calibrated replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from telemetry.lab.predictions import MAX_HIT_ERROR, MAX_TTFT_ERROR
from telemetry.models import Prediction
from telemetry.web import figures
from telemetry.web.breakdown_figures import figure_json, figure_layout

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


FIGURES = {
    "hit-rate": ErrorFigure("Error of the hit rate", "points", 100 * MAX_HIT_ERROR, lambda row: row.hit_rate_error),
    "ttft": ErrorFigure("Error of TTFT p50", "%", 100 * MAX_TTFT_ERROR, lambda row: row.ttft_p50_error),
}


def error_figure(records: Sequence[Prediction], slug: str) -> dict[str, Any]:
    """Predicted minus measured by time of publication, a series for each pool."""
    figure = FIGURES[slug]
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
