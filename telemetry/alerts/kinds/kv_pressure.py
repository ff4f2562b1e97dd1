"""A replica's KV cache is too full: running requests hold most of it, or are put back in the queue."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from telemetry.alerts.history_window import PressureStep, Seen, Source
from telemetry.alerts.kinds.base import Asked, ForS, KeepFiringS, Kind, Where, WindowS, WindowSettings, length, percent
from telemetry.alerts.verdict import Reason, Result, Verdict, Verdicts, no_data, over


class KvPressureSettings(WindowSettings, frozen=True):
    """Settings of ``kv_pressure``."""

    usage_ratio: Annotated[
        float,
        Meta(gt=0, le=1, description="A mean KV usage of this is too much.", extra={"unit": "ratio"}),
    ] = 0.95
    preemptions_per_minute: (
        Annotated[
            float,
            Meta(gt=0, le=1e6, description="As many preemptions are too many; null: any.", extra={"unit": "a minute"}),
        ]
        | None
    ) = 6.0
    window_s: WindowS = 300.0
    for_s: ForS = 60.0
    keep_firing_s: KeepFiringS = 600.0


def judge(settings: KvPressureSettings, seen: Seen, asked: Asked) -> Verdicts:  # noqa: ARG001 - every kind's is called so
    """Compare each replica's usage and preemptions with their limits."""
    return {name: _replica(settings, seen.pressure(name)) for name in seen.past.replicas}


def _replica(settings: KvPressureSettings, step: PressureStep | None) -> Verdict:
    if step is None:
        return no_data(Reason.NO_READINGS)
    per_minute = None if step.preemptions is None else step.preemptions * 60 / settings.window_s
    figures = {"preemptions_per_minute": per_minute, "kv_usage_ratio": step.kv_usage_ratio}
    limit = settings.preemptions_per_minute
    if per_minute is not None and limit is not None and per_minute >= limit:
        return Verdict(Result.BREACH, Reason.ABOVE, per_minute, limit, unit="count", figures=figures)
    if step.kv_usage_ratio is None:
        return no_data(Reason.NOT_REPORTED, **figures)
    return over(step.kv_usage_ratio, settings.usage_ratio, "ratio", **figures)


def sentence(where: Where, settings: KvPressureSettings, verdict: Verdict) -> str:
    """What is wrong."""
    whose = f"{where.words[0].upper()}{where.words[1:]}"
    if verdict.unit == "count":
        return f"{whose} preempts {verdict.value or 0:.1f} requests a minute: its KV cache is too small for its load."
    return f"{whose} holds {percent(verdict.value)} of its KV cache for running requests ({length(settings.window_s)})."


def finds(settings: KvPressureSettings) -> str:
    """What it looks for."""
    more = settings.preemptions_per_minute
    preempts = f", or {more:g} preemptions a minute" if more is not None else ""
    return f"KV usage of {percent(settings.usage_ratio)}{preempts}, over {length(settings.window_s)}"


KIND = Kind(
    name="kv_pressure",
    label="KV pressure",
    about="Fires for each replica whose running requests hold nearly all of its KV cache, or whose engine puts "
    "requests back in the queue. What running requests hold, warm prefixes cannot: hit rates fall next.",
    settings=KvPressureSettings,
    sources=frozenset({Source.PRESSURE}),
    unit="ratio",
    judge=judge,
    sentence=sentence,
    finds=finds,
    figure="KV usage",
)
