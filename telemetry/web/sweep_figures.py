"""The chart of a capacity sweep: hit rate and TTFT by number of replicas, or by cache size."""

from __future__ import annotations

from collections.abc import Sequence
from math import log10
from typing import Any

from telemetry.lab.sweeps import Point
from telemetry.web import figures

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
