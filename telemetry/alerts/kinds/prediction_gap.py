"""What the router predicts, what answers report and what the engine counts disagree (H17).

Theory of operation. Of each replica three hit rates can be known: what the router predicted and what the answers
reported, both of the same answers, and what the engine's own counters say of as good as the same requests. They are
compared as the page of the replica compares them (``metrics/rates.py``): the prediction with the answers that had
one, and the engine with all answers, where routers have those of nearly all of its requests. A pair that is far apart
means that placement works on wrong beliefs, or that a counter lies; the verdict is that of the pair farthest apart.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from telemetry.alerts.history_window import ReplicaStep, Seen, Source
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
from telemetry.alerts.verdict import Reason, Verdict, Verdicts, no_data, over
from telemetry.metrics.rates import Agreement, EngineCounts, RouterCounts, compare

_REASONS = {Agreement.TOO_FEW: Reason.LITTLE_TRAFFIC, Agreement.NOT_REPORTED: Reason.NOT_REPORTED}


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
    """Compare the three of each replica that routers had answers of."""
    return {
        name: _replica(settings, seen.answers(name), _engine(seen.engine(name), decodes=name not in seen.past.rated))
        for name in seen.past.replicas
        if name in seen.past.answers
    }


def _engine(step: ReplicaStep | None, *, decodes: bool) -> EngineCounts:
    if step is None:
        return EngineCounts(decodes=decodes)
    reports = step.hits is not None or not step.requests
    return EngineCounts(step.queries, step.hits, requests=step.requests, reports=reports, decodes=decodes)


def _replica(settings: PredictionGapSettings, answers: RouterCounts | None, engine: EngineCounts) -> Verdict:
    found = compare(engine, answers or RouterCounts(), least_requests=max(settings.min_requests, 1.0))
    requests = answers.requests if answers else None
    if found.points is None or found.rates is None:
        return no_data(_REASONS[found.agreement], requests=requests)
    one = "predicted" if found.is_of_prediction else "counted"
    figures = {"requests": requests, "between": [one, "delivered"], one: found.rates[0], "delivered": found.rates[1]}
    return over(found.points / 100, settings.gap_points / 100, "ratio", **figures)


def sentence(where: Where, settings: PredictionGapSettings, verdict: Verdict) -> str:  # noqa: ARG001 - as above
    """What is wrong."""
    one, other = verdict.figures["between"]
    whose = "routers predict" if one == "predicted" else "the engine counts"
    told = f"{whose} {percent(verdict.figures[one])} and answers report {percent(verdict.figures[other])}"
    return f"Hit rates of {where.words} disagree: {told}."


def finds(settings: PredictionGapSettings) -> str:
    """What it looks for."""
    return f"hit rates of one replica {settings.gap_points:g} points apart over {length(settings.window_s)}"


KIND = Kind(
    name="prediction_gap",
    label="Prediction gap",
    about="Compares, for each replica, the hit rate that routers predicted, that answers reported, and that the engine "
    "counted, as its page does. A gap means that placement works on wrong beliefs: a cache that was reset, a block "
    "size that is not what the engine uses, or a counter that does not count. Where more than a tenth of an engine's "
    "requests come past the routers it is not held against answers.",
    settings=PredictionGapSettings,
    sources=frozenset({Source.ANSWERS, Source.ENGINES}),
    unit="ratio",
    judge=judge,
    sentence=sentence,
    finds=finds,
    figure="Gap",
)
