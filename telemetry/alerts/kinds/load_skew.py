"""One replica gets far more than its share."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from msgspec import Meta

from telemetry.alerts.history_window import Seen, Source
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
)
from telemetry.alerts.verdict import POOL, Reason, Result, Verdict, Verdicts, no_data, over


class LoadSkewSettings(WindowSettings, frozen=True):
    """Settings of ``load_skew``."""

    most_over_mean: Annotated[
        float,
        Meta(gt=1, le=100, description="The busiest replica's requests over the mean.", extra={"unit": "times"}),
    ] = 1.5
    min_replicas: Annotated[int, Meta(ge=2, le=1000, description="Fewer say nothing.", extra={"unit": "replicas"})] = 2
    window_s: WindowS = 300.0
    min_requests: MinRequests = 200.0
    for_s: ForS = 60.0
    keep_firing_s: KeepFiringS = 600.0
    min_waiting: (
        Annotated[
            float,
            Meta(
                gt=0,
                le=1e6,
                description="Only if so many requests wait at the busiest replica on average; null: in any case.",
                extra={"unit": "requests"},
            ),
        ]
        | None
    ) = None


def judge(settings: LoadSkewSettings, seen: Seen, asked: Asked) -> Verdicts:  # noqa: ARG001 - every kind's is called so
    """Compare the busiest replica with the mean of those that take traffic and were read."""
    loads = {
        name: step.requests
        for name in seen.past.replicas
        if name in seen.past.active and (step := seen.engine(name)) is not None and step.requests is not None
    }
    if not loads:
        return {POOL: no_data(Reason.NO_READINGS)}
    total = sum(loads.values())
    if len(loads) < settings.min_replicas:
        return {POOL: no_data(Reason.NOBODY, replicas=len(loads))}
    if total < settings.min_requests or not total:
        return {POOL: no_data(Reason.LITTLE_TRAFFIC, requests=total)}
    busiest = max(loads, key=lambda name: loads[name])
    skew = loads[busiest] * len(loads) / total
    pressure = seen.pressure(busiest)
    waiting = pressure.waiting if pressure else None
    figures = {"requests": total, "busiest": busiest, "replicas": len(loads), "waiting": waiting}
    verdict = over(skew, settings.most_over_mean, "count", **figures)
    if settings.min_waiting is None or verdict.result is Result.OK:
        return {POOL: verdict}
    if waiting is None:
        return {POOL: no_data(Reason.NOT_REPORTED, **figures)}
    return {
        POOL: verdict if waiting >= settings.min_waiting else replace(verdict, result=Result.OK, reason=Reason.WITHIN)
    }


def sentence(where: Where, settings: LoadSkewSettings, verdict: Verdict) -> str:
    """What is wrong."""
    busiest = verdict.figures["busiest"]
    return (
        f"Replica {busiest} of pool {where.pool} gets {verdict.value or 0:.2f} times the mean of its pool's requests, "
        f"more than {settings.most_over_mean:g}."
    )


def finds(settings: LoadSkewSettings) -> str:
    """What it looks for."""
    queue = "" if settings.min_waiting is None else f" and {settings.min_waiting:g} waiting"
    return (
        f"a replica with {settings.most_over_mean:g} times the mean's requests{queue} over {length(settings.window_s)}"
    )


KIND = Kind(
    name="load_skew",
    label="Load skew",
    about="Compares the busiest replica's requests with the mean over the pool's active replicas. Affinity is paid for "
    "in skew; a policy that bounds load keeps it low. Replicas of different weights are skewed on purpose, and so is a "
    "pool with little load: min_waiting limits the rule to skew that makes requests wait.",
    settings=LoadSkewSettings,
    sources=frozenset({Source.ENGINES, Source.PRESSURE}),
    unit="count",
    judge=judge,
    sentence=sentence,
    finds=finds,
    figure="Greatest over mean",
)
