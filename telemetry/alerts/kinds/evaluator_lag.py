"""Telemetry itself is behind: nobody scrapes, or rules are evaluated too late."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from telemetry.alerts.history_window import Seen, Source, steps_in
from telemetry.alerts.kinds.base import Asked, ForS, KeepFiringS, Kind, RuleSettings, Where, length
from telemetry.alerts.verdict import POOL, Reason, Result, Verdict, Verdicts, no_data


class EvaluatorLagSettings(RuleSettings, frozen=True):
    """Settings of ``evaluator_lag``."""

    behind_s: Annotated[
        float,
        Meta(
            ge=10,
            le=3600,
            description="Without a scrape or an evaluation for so long; three intervals are as good a start as any.",
            extra={"unit": "seconds"},
        ),
    ] = 15.0
    for_s: ForS = 0.0
    keep_firing_s: KeepFiringS = 60.0

    @property
    def step_s(self) -> float:
        """As long as nothing may happen."""
        return self.behind_s

    @property
    def reach_s(self) -> float:
        """Enough to tell an outage from a beginning."""
        return max(3600.0, self.behind_s)


def judge(settings: EvaluatorLagSettings, seen: Seen, asked: Asked) -> Verdicts:  # noqa: ARG001 - every kind's is called so
    """Whether anything was tried lately."""
    if not seen.past.replicas:
        return {POOL: no_data(Reason.NOBODY)}
    if late_s := _late_s(settings, seen):
        return {POOL: _behind(settings, late_s, "evaluated")}
    if any(seen.engine(name) is not None for name in seen.past.replicas):
        return {POOL: Verdict(Result.OK, Reason.WITHIN, 0.0, settings.behind_s, unit="seconds")}
    quiet_s = _quiet_s(seen, settings.reach_s)
    if quiet_s is None:
        return {POOL: no_data(Reason.NO_READINGS)}  # nothing was ever scraped: it has not begun
    return {POOL: _behind(settings, quiet_s, "scraped")}


def _late_s(settings: EvaluatorLagSettings, seen: Seen) -> float | None:
    """How long ago rules were evaluated before this time, where that is too long."""
    late_s = seen.past.control.unevaluated_s if seen.past.control else 0.0
    return late_s if late_s >= settings.behind_s else None


def _quiet_s(seen: Seen, reach_s: float) -> float | None:
    """Seconds since any scrape was tried, in whole steps; None where none was in this past."""
    for back in range(min(steps_in(reach_s, seen.past.step_s), seen.index + 1)):
        if any(steps[seen.index - back] is not None for steps in seen.past.engines.values()):
            return back * seen.past.step_s
    return None


def _behind(settings: EvaluatorLagSettings, value: float, what: str) -> Verdict:
    return Verdict(Result.BREACH, Reason.ABOVE, value, settings.behind_s, unit="seconds", figures={"what": what})


def sentence(where: Where, settings: EvaluatorLagSettings, verdict: Verdict) -> str:  # noqa: ARG001 - as above
    """What is wrong."""
    if verdict.figures.get("what") == "evaluated":
        return f"Alert rules were not evaluated for {length(verdict.value)}: what happened meanwhile may be untold."
    return f"No replica of {where.words} was scraped for {length(verdict.value)}: its figures are those of before."


def finds(settings: EvaluatorLagSettings) -> str:
    """What it looks for."""
    return f"no scrape, or no evaluation of rules, for {length(settings.behind_s)}"


KIND = Kind(
    name="evaluator_lag",
    label="Telemetry behind",
    about="Fires when scraping stopped or rules were evaluated late: the worker is overloaded, was away, or its "
    "database was. While it fires, no other figure of the pool is of now. If no worker evaluates rules for 30 s, a web "
    "process sends this alert. When web processes are gone too, only a heartbeat watched from outside reports it.",
    settings=EvaluatorLagSettings,
    sources=frozenset({Source.ENGINES, Source.CONTROL}),
    unit="seconds",
    judge=judge,
    sentence=sentence,
    finds=finds,
    figure="Behind by",
)
