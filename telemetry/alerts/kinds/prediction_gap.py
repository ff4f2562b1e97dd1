"""What the router predicts, what answers report and what the engine counts disagree (H17).

Theory of operation. Of each replica three hit rates can be known: what the router predicted and what the answers
reported, both of the same answers, and what the engine's own counters say. Any two that are far apart mean that
placement works on wrong beliefs, or that a counter lies; the verdict names the two that are farthest apart.
"""

from __future__ import annotations

from itertools import combinations
from typing import Annotated

from msgspec import Meta

from telemetry.alerts.kinds.base import (
    Asked,
    ForS,
    KeepFiringS,
    Kind,
    MinRequests,
    Where,
    WindowS,
    WindowSettings,
    length,
    percent,
)
from telemetry.alerts.past import PredictedStep, ReplicaStep, Seen, Source
from telemetry.alerts.verdict import Reason, Verdict, Verdicts, no_data, over

_WORDS = {"predicted": "routers predict", "delivered": "answers report", "counted": "the engine counts"}


class PredictionGapSettings(WindowSettings, frozen=True):
    """Settings of ``prediction_gap``."""

    gap_points: Annotated[
        float, Meta(ge=1, le=100, description="So far apart is too far.", extra={"unit": "points of 100"})
    ] = 5.0
    window_s: WindowS = 300.0
    min_requests: MinRequests = 200.0
    for_s: ForS = 60.0
    keep_firing_s: KeepFiringS = 600.0


def judge(settings: PredictionGapSettings, seen: Seen, asked: Asked) -> Verdicts:  # noqa: ARG001 - every kind's is called so
    """Compare the three of each replica."""
    return {
        name: _replica(settings, seen.predicted(name), seen.engine(name))
        for name in seen.past.replicas
        if name in seen.past.predictions
    }


def _replica(settings: PredictionGapSettings, routed: PredictedStep | None, engine: ReplicaStep | None) -> Verdict:
    if routed is None or routed.requests < settings.min_requests or not routed.prompt:
        return no_data(Reason.LITTLE_TRAFFIC, requests=routed.requests if routed else None)
    rates = {"predicted": routed.predicted / routed.prompt, "delivered": routed.delivered / routed.prompt}
    if engine is not None and engine.queries and engine.hits is not None:
        rates["counted"] = engine.hits / engine.queries
    one, other = max(combinations(rates, 2), key=lambda pair: abs(rates[pair[0]] - rates[pair[1]]))
    gap = abs(rates[one] - rates[other])
    figures = {"requests": routed.requests, "between": [one, other], **rates}
    return over(gap, settings.gap_points / 100, "ratio", **figures)


def sentence(where: Where, settings: PredictionGapSettings, verdict: Verdict) -> str:  # noqa: ARG001 - as above
    """What is wrong."""
    one, other = verdict.figures["between"]
    told = f"{_WORDS[one]} {percent(verdict.figures[one])} and {_WORDS[other]} {percent(verdict.figures[other])}"
    return f"Hit rates of {where.words} disagree: {told}."


def finds(settings: PredictionGapSettings) -> str:
    """What it looks for."""
    return f"hit rates of one replica {settings.gap_points:g} points apart over {length(settings.window_s)}"


KIND = Kind(
    name="prediction_gap",
    label="Prediction gap",
    about="Compares, for each replica, the hit rate that routers predicted, that answers reported, and that the engine "
    "counted. A gap means that placement works on wrong beliefs: a cache that was reset, a block size that is not what "
    "the engine uses, or a counter that does not count.",
    settings=PredictionGapSettings,
    sources=frozenset({Source.PREDICTIONS, Source.ENGINES}),
    unit="ratio",
    judge=judge,
    sentence=sentence,
    finds=finds,
    figure="Gap",
)
