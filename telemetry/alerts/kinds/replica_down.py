"""A replica cannot be read."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from telemetry.alerts.history_window import Seen, Source
from telemetry.alerts.kinds.base import Asked, ForS, KeepFiringS, Kind, RuleSettings, Where, length
from telemetry.alerts.verdict import Reason, Result, Verdict, Verdicts, no_data

LONGEST_S = 3600.0  # how far back the last reading is looked for


class ReplicaDownSettings(RuleSettings, frozen=True):
    """Settings of ``replica_down``."""

    silent_s: Annotated[
        float,
        Meta(ge=10, le=3600, description="Every scrape failed for so long.", extra={"unit": "seconds"}),
    ] = 30.0
    for_s: ForS = 0.0
    keep_firing_s: KeepFiringS = 30.0

    @property
    def step_s(self) -> float:
        """As long as it may be silent."""
        return self.silent_s

    @property
    def reach_s(self) -> float:
        """As far as the last reading is looked for."""
        return max(LONGEST_S, self.silent_s)


def judge(settings: ReplicaDownSettings, seen: Seen, asked: Asked) -> Verdicts:  # noqa: ARG001 - every kind's is called so
    """Whether each replica was read."""
    return {name: _replica(settings, seen, name) for name in seen.past.replicas}


def _replica(settings: ReplicaDownSettings, seen: Seen, name: str) -> Verdict:
    step = seen.engine(name)
    if step is None:
        return no_data(Reason.NO_READINGS)  # nobody tried: the scraper is away, not the replica
    if step.read:
        return Verdict(Result.OK, Reason.WITHIN, 0.0, settings.silent_s, unit="seconds")
    silent_s = seen.unread_s(name, settings.reach_s)
    if silent_s is None and seen.is_starting(name):
        return no_data(Reason.STARTING)
    value = seen.tried_s(name, settings.reach_s) if silent_s is None else silent_s
    if value < settings.silent_s:
        return no_data(Reason.UNREAD)  # never read, and tried for less: it may be starting
    figures = {"at_least": silent_s is None}
    return Verdict(Result.BREACH, Reason.UNREAD, value, settings.silent_s, unit="seconds", figures=figures)


def sentence(where: Where, settings: ReplicaDownSettings, verdict: Verdict) -> str:  # noqa: ARG001 - as above
    """What is wrong."""
    told = "more than " if verdict.figures.get("at_least") else ""
    return f"{where.words[0].upper()}{where.words[1:]} has not been read for {told}{length(verdict.value)}."


def finds(settings: ReplicaDownSettings) -> str:
    """What it looks for."""
    return f"a replica of which every scrape failed for {length(settings.silent_s)}"


KIND = Kind(
    name="replica_down",
    label="Replica down",
    about="Fires for each replica whose metrics cannot be read: it is down, hangs, or refuses. Replicas that are "
    "disabled are not looked at, and where no scrape was even tried it is telemetry that is away. A replica that was "
    "never read is starting, not down, for 15 min after it was added.",
    settings=ReplicaDownSettings,
    sources=frozenset({Source.ENGINES}),
    unit="seconds",
    judge=judge,
    sentence=sentence,
    finds=finds,
    figure="Not read for",
)
