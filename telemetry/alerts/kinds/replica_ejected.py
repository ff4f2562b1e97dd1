"""A router's circuit breaker ejected a replica."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from telemetry.alerts.history_window import Seen, Source
from telemetry.alerts.kinds.base import Asked, ForS, KeepFiringS, Kind, Where, WindowS, WindowSettings, length
from telemetry.alerts.verdict import OVER, Verdict, Verdicts, over


class ReplicaEjectedSettings(WindowSettings, frozen=True):
    """Settings of ``replica_ejected``."""

    ejected_s: Annotated[
        float,
        Meta(
            gt=0, le=3600, description="Ejected by one router for so long within the window.", extra={"unit": "seconds"}
        ),
    ] = 30.0
    window_s: WindowS = 300.0
    for_s: ForS = 0.0
    keep_firing_s: KeepFiringS = 60.0

    def fault(self) -> tuple[str, str] | None:
        """A replica cannot be ejected for longer than the window."""
        return ("ejected_s", "expected at most window_s") if self.ejected_s > self.window_s else None


def judge(settings: ReplicaEjectedSettings, seen: Seen, asked: Asked) -> Verdicts:  # noqa: ARG001 - every kind's is called so
    """Compare how long each replica was ejected with its limit; of several routers the longest counts."""
    return {name: _replica(settings, seen, name) for name in seen.past.replicas}


def _replica(settings: ReplicaEjectedSettings, seen: Seen, name: str) -> Verdict:
    lasted: dict[str, float] = {}
    reason = ""
    ejections = seen.ejections(name)
    for ejection, seconds in ejections:
        lasted[ejection.router] = lasted.get(ejection.router, 0.0) + seconds
        reason = ejection.reason
    is_over = all(ejection.end is not None and ejection.end <= seen.now for ejection, _ in ejections)
    figures = {"routers": sorted(lasted)[:20], "ejected_because": reason, OVER: is_over}
    return over(max(lasted.values(), default=0.0), settings.ejected_s, "seconds", **figures)


def sentence(where: Where, settings: ReplicaEjectedSettings, verdict: Verdict) -> str:
    """What is wrong."""
    routers, reason = ", ".join(verdict.figures["routers"][:3]), verdict.figures["ejected_because"]
    told = f"{where.words[0].upper()}{where.words[1:]} was ejected by {routers} for {length(round(verdict.value or 0))}"
    return f"{told} of the last {length(settings.window_s)}{f': {reason}' if reason else ''}."[:300]


def finds(settings: ReplicaEjectedSettings) -> str:
    """What it looks for."""
    return f"a replica that a router ejected for {length(settings.ejected_s)} of {length(settings.window_s)}"


KIND = Kind(
    name="replica_ejected",
    label="Replica ejected",
    about="Fires for each replica that a router's circuit breaker ejected: its requests failed or timed out, so the "
    "router sends it none, though its metrics may be readable. Short ejections add up, so a breaker that opens and "
    "closes is found too. An ejection that began more than two days ago is not found.",
    settings=ReplicaEjectedSettings,
    sources=frozenset({Source.EJECTIONS}),
    unit="seconds",
    judge=judge,
    sentence=sentence,
    finds=finds,
    figure="Ejected for",
)
