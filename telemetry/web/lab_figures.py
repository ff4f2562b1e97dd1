"""Charts of the lab: hit rate and TTFT by number of replicas or cache size."""

from __future__ import annotations

from collections.abc import Sequence
from math import log10
from typing import Any

from telemetry.lab.sweeps import SweepPoint
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
