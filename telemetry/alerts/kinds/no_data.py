"""Nothing is known of a pool, although something should be."""

from __future__ import annotations

from telemetry.alerts.history_window import Seen, Source
from telemetry.alerts.kinds.base import Asked, ForS, KeepFiringS, Kind, Where, WindowS, WindowSettings, length
from telemetry.alerts.verdict import POOL, Reason, Result, Verdict, Verdicts, no_data


class NoDataSettings(WindowSettings, frozen=True):
    """Settings of ``no_data``."""

    window_s: WindowS = 60.0
    for_s: ForS = 60.0
    keep_firing_s: KeepFiringS = 30.0


def judge(settings: NoDataSettings, seen: Seen, asked: Asked) -> Verdicts:  # noqa: ARG001 - every kind's is called so
    """Whether any replica was read."""
    if not seen.past.replicas:
        return {POOL: no_data(Reason.NOBODY)}
    if all(seen.is_starting(name) for name in seen.past.replicas):
        return {POOL: no_data(Reason.STARTING)}
    steps = [seen.engine(name) for name in seen.past.replicas]
    read = sum(step is not None and step.read for step in steps)
    answer, reason = (Result.OK, Reason.WITHIN) if read else (Result.BREACH, Reason.NO_READINGS)
    figures = {"replicas": len(steps), "failed": sum(step is not None and step.failed for step in steps)}
    return {POOL: Verdict(answer, reason, float(read), 1.0, unit="count", figures=figures)}


def sentence(where: Where, settings: NoDataSettings, verdict: Verdict) -> str:
    """What is wrong."""
    failed = verdict.figures["failed"]
    why = f"scrapes of {failed} fail" if failed else "no scrape was tried"
    count = verdict.figures["replicas"]
    return f"Nothing was read of {where.words} for {length(settings.window_s)}, of {count} replicas: {why}."


def finds(settings: NoDataSettings) -> str:
    """What it looks for."""
    return f"no reading of any replica for {length(settings.window_s)}"


KIND = Kind(
    name="no_data",
    label="No data",
    about="Fires when no replica of the pool could be read, which leaves every other rule of it without an answer: "
    "without this one, silence would look like health.",
    settings=NoDataSettings,
    sources=frozenset({Source.ENGINES}),
    unit="count",
    judge=judge,
    sentence=sentence,
    finds=finds,
    figure="Replicas read",
)
