"""Too many requests fail."""

from __future__ import annotations

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
    percent,
)
from telemetry.alerts.verdict import POOL, Reason, Verdict, Verdicts, no_data, over


class ErrorRatioSettings(WindowSettings, frozen=True):
    """Settings of ``error_ratio``."""

    most_ratio: Annotated[
        float,
        Meta(gt=0, le=1, description="Failed requests over all requests.", extra={"unit": "ratio"}),
    ] = 0.05
    window_s: WindowS = 300.0
    min_requests: MinRequests = 20.0
    for_s: ForS = 30.0
    keep_firing_s: KeepFiringS = 300.0


def judge(settings: ErrorRatioSettings, seen: Seen, asked: Asked) -> Verdicts:
    """Compare the share of requests that failed with its limit."""
    step = seen.failures(asked.group or None)
    if step is None:
        return {POOL: no_data(Reason.NO_READINGS)}
    figures = {"requests": step.requests, "failed_requests": step.failed}
    if step.requests < max(settings.min_requests, 1):
        return {POOL: no_data(Reason.LITTLE_TRAFFIC, **figures)}
    return {POOL: over(step.failed / step.requests, settings.most_ratio, "ratio", **figures)}


def sentence(where: Where, settings: ErrorRatioSettings, verdict: Verdict) -> str:
    """What is wrong."""
    failed, requests = verdict.figures["failed_requests"], verdict.figures["requests"]
    counts = f"{failed:.0f} of {requests:.0f} in {length(settings.window_s)}"
    return f"{percent(verdict.value)} of the requests to {where.words} failed ({counts})."


def finds(settings: ErrorRatioSettings) -> str:
    """What it looks for."""
    return f"{percent(settings.most_ratio)} of the requests failed, over {length(settings.window_s)}"


KIND = Kind(
    name="error_ratio",
    label="Error ratio",
    about="Compares failed requests with all requests, as routers count them: errors of replicas, and requests that no "
    "replica could take. Errors of clients and cancelled requests are no failures.",
    settings=ErrorRatioSettings,
    sources=frozenset({Source.FAILURES}),
    group_sources=frozenset({Source.FAILURES}),
    unit="ratio",
    judge=judge,
    sentence=sentence,
    finds=finds,
    figure="Failed requests",
)
