"""A configuration does not reach the routers."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from telemetry.alerts.history_window import Seen, Source
from telemetry.alerts.kinds.base import Asked, ForS, KeepFiringS, Kind, RuleSettings, Where, length
from telemetry.alerts.verdict import POOL, Reason, Timing, Verdict, Verdicts, no_data, over


class RolloutStuckSettings(RuleSettings, frozen=True):
    """Settings of ``rollout_stuck``."""

    after_s: Annotated[
        float,
        Meta(ge=10, le=86_400, description="A router behind for so long is stuck.", extra={"unit": "seconds"}),
    ] = 120.0
    for_s: ForS = 0.0
    keep_firing_s: KeepFiringS = 0.0

    @property
    def step_s(self) -> float:
        """It looks at now alone."""
        return 60.0

    @property
    def timing(self) -> Timing:
        """How long an answer must hold."""
        return Timing(self.for_s, self.keep_firing_s, self.after_s)


def judge(settings: RolloutStuckSettings, seen: Seen, asked: Asked) -> Verdicts:  # noqa: ARG001 - every kind's is called so
    """Compare how long routers have been behind with how long they may."""
    control = seen.past.control
    if control is None:
        return {POOL: no_data(Reason.NOT_STORED)}
    if not control.routers:
        return {POOL: no_data(Reason.NOBODY)}
    behind = sorted(control.behind_s, key=lambda name: -control.behind_s[name])
    figures = {"routers": behind[:20], "present": control.routers, "refusing": dict(control.refusing)}
    longest_s = control.behind_s[behind[0]] if behind else 0.0
    return {POOL: over(longest_s, settings.after_s, "seconds", **figures)}


def sentence(where: Where, settings: RolloutStuckSettings, verdict: Verdict) -> str:  # noqa: ARG001 - as above
    """What is wrong."""
    routers = verdict.figures["routers"]
    count = f"{len(routers)} of {verdict.figures['present']} routers"
    why = next((f"; {name} refuses it: {why}" for name, why in verdict.figures["refusing"].items()), "")
    return f"{count} have not run the newest configuration for {length(verdict.value)}{why}."[:300]


def finds(settings: RolloutStuckSettings) -> str:
    """What it looks for."""
    return f"a router that does not run the newest configuration for {length(settings.after_s)}"


KIND = Kind(
    name="rollout_stuck",
    label="Configuration not converged",
    about="Fires when a router that is present has not run the newest configuration for a while: it refuses it, or "
    "cannot be reached. All routers serve all pools, so one pool's rule is enough. It looks at now, of which no "
    "history is kept: there is no preview.",
    settings=RolloutStuckSettings,
    sources=frozenset({Source.CONTROL}),
    unit="seconds",
    judge=judge,
    sentence=sentence,
    finds=finds,
    figure="Behind for",
)
