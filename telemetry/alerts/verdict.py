"""What an evaluation of a rule answers. Pure.

An answer is one of three. NO_DATA (too little traffic, too little history, failed scrapes) is neither good nor bad
news: it starts no alert and ends none that fires.

The state machine of an alert: nothing -> pending -> firing -> resolved. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

Unit = Literal["ratio", "seconds", "count"]
POOL = ""  # the subject of an alert that is about the pool, or the task group, as a whole
OVER = "over"  # the figure that tells that what broke the limit has ended; it still counts within the rule's window


class Result(StrEnum):
    """What an evaluation found."""

    OK = "ok"
    BREACH = "breach"
    NO_DATA = "no_data"


class Reason(StrEnum):
    """Why it found that."""

    WITHIN = "within"  # the limit is kept
    BELOW = "below"  # the value is below the limit
    ABOVE = "above"  # or above it
    UNREAD = "unread"  # scrapes fail
    NO_READINGS = "no_readings"  # nothing was scraped in the newest window
    NOT_REPORTED = "not_reported"  # nobody reports the figure
    LITTLE_TRAFFIC = "little_traffic"  # below a floor in the newest window
    LITTLE_HISTORY = "little_history"  # too few windows with enough traffic before it
    STARTING = "starting"  # never read, and added a short time ago
    NOBODY = "nobody"  # there is no replica, or too few, to look at
    FAILED = "failed"  # the evaluation itself failed; the worker's log has the exception
    NOT_STORED = "not_stored"  # this is looked at as it is now, and nobody writes it down


@dataclass(frozen=True, slots=True)
class Verdict:
    """An answer, its reason and its figures; ``value``, ``limit`` and ``baseline`` are in ``unit``."""

    result: Result
    reason: Reason
    value: float | None = None
    limit: float | None = None
    baseline: float | None = None
    unit: Unit = "ratio"
    figures: Mapping[str, Any] = field(default_factory=dict)  # what else is known: requests, tokens, windows ...

    def as_json(self) -> dict[str, Any]:
        """What a rule's row keeps of it."""
        return {
            "answer": self.result,
            "reason": self.reason,
            "value": self.value,
            "limit": self.limit,
            "baseline": self.baseline,
            "unit": self.unit,
            "figures": dict(self.figures),
        }


Verdicts = dict[str, Verdict]  # by subject: a replica's name, or POOL
_ORDER = (Result.BREACH, Result.NO_DATA, Result.OK)


def worst(verdicts: Verdicts) -> Verdict:
    """The one that a rule is judged by: a breach first, the farthest from its limit first."""
    return min(verdicts.values(), key=lambda one: (_ORDER.index(one.result), -excess(one)))


def excess(verdict: Verdict) -> float:
    """How far beyond its limit a value is, in its unit; 0 where either is unknown."""
    if verdict.value is None or verdict.limit is None:
        return 0.0
    return abs(verdict.value - verdict.limit)


def no_data(reason: Reason, **figures: Any) -> Verdict:
    """The verdict that nothing can be said."""
    return Verdict(Result.NO_DATA, reason, figures=figures)


def over(value: float, limit: float, unit: Unit, **figures: Any) -> Verdict:
    """A breach where the value reaches its limit."""
    breach = value >= limit - 1e-9
    answer, reason = (Result.BREACH, Reason.ABOVE) if breach else (Result.OK, Reason.WITHIN)
    return Verdict(answer, reason, value, limit, unit=unit, figures=figures)


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


def next_step(timing: Timing, result: Result, alert: OpenAlert | None, now: datetime) -> Step:
    """What an answer leads to.

    No data leaves everything as it is, except for a suspicion that a whole window could not confirm.
    """
    if result is Result.NO_DATA:
        unconfirmed = alert is not None and not alert.is_firing and _quiet_s(alert, now) > timing.confirm_s
        return Step.DROP if unconfirmed else Step.NOTHING
    if result is Result.BREACH:
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
