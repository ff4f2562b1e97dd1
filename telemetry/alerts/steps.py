"""The state machine of an alert: nothing -> pending -> firing -> resolved. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from telemetry.alerts.verdict import Answer


@dataclass(frozen=True, slots=True)
class Timing:
    """How long an answer must hold to be believed, in seconds."""

    for_s: float  # broken, before the alert fires
    keep_firing_s: float  # not broken, before it ends
    confirm_s: float  # without data, before a suspicion is dropped


class Step(StrEnum):
    """What an answer does to an alert."""

    NOTHING = "nothing"
    OPEN = "open"  # a pending alert
    OPEN_FIRING = "open_firing"  # one that fires at once
    EXTEND = "extend"  # still broken: note when
    FIRE = "fire"
    DROP = "drop"  # a pending alert that proved unfounded
    RESOLVE = "resolve"


@dataclass(frozen=True, slots=True)
class OpenAlert:
    """What the next step depends on."""

    is_firing: bool
    started_at: datetime
    last_breach_at: datetime


def next_step(timing: Timing, answer: Answer, alert: OpenAlert | None, now: datetime) -> Step:
    """What an answer leads to.

    No data leaves everything as it is, except for a suspicion that a whole window could not confirm.
    """
    if answer is Answer.NO_DATA:
        unconfirmed = alert is not None and not alert.is_firing and _quiet_s(alert, now) > timing.confirm_s
        return Step.DROP if unconfirmed else Step.NOTHING
    if answer is Answer.BREACH:
        if alert is None:
            return Step.OPEN if timing.for_s > 0 else Step.OPEN_FIRING
        due = (now - alert.started_at).total_seconds() >= timing.for_s
        return Step.FIRE if due and not alert.is_firing else Step.EXTEND
    if alert is None:
        return Step.NOTHING
    if not alert.is_firing:
        return Step.DROP
    return Step.RESOLVE if _quiet_s(alert, now) >= timing.keep_firing_s else Step.NOTHING


def _quiet_s(alert: OpenAlert, now: datetime) -> float:
    """Seconds since the last breach."""
    return (now - alert.last_breach_at).total_seconds()
