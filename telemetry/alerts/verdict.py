"""What an evaluation of a rule answers. Pure.

An answer is one of three. NO_DATA (too little traffic, too little history, failed scrapes) is neither good nor bad
news: it starts no alert and ends none that fires.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

Unit = Literal["ratio", "seconds", "count"]
POOL = ""  # the subject of an alert that is about the pool, or the task group, as a whole
OVER = "over"  # the figure that tells that what broke the limit has ended; it still counts within the rule's window


class Answer(StrEnum):
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

    answer: Answer
    reason: Reason
    value: float | None = None
    limit: float | None = None
    baseline: float | None = None
    unit: Unit = "ratio"
    figures: Mapping[str, Any] = field(default_factory=dict)  # what else is known: requests, tokens, windows ...

    def as_json(self) -> dict[str, Any]:
        """What a rule's row keeps of it."""
        return {
            "answer": self.answer,
            "reason": self.reason,
            "value": self.value,
            "limit": self.limit,
            "baseline": self.baseline,
            "unit": self.unit,
            "figures": dict(self.figures),
        }


Verdicts = dict[str, Verdict]  # by subject: a replica's name, or POOL
_ORDER = (Answer.BREACH, Answer.NO_DATA, Answer.OK)


def worst(verdicts: Verdicts) -> Verdict:
    """The one that a rule is judged by: a breach first, the farthest from its limit first."""
    return min(verdicts.values(), key=lambda one: (_ORDER.index(one.answer), -excess(one)))


def excess(verdict: Verdict) -> float:
    """How far beyond its limit a value is, in its unit; 0 where either is unknown."""
    if verdict.value is None or verdict.limit is None:
        return 0.0
    return abs(verdict.value - verdict.limit)


def no_data(reason: Reason, **figures: Any) -> Verdict:
    """The verdict that nothing can be said."""
    return Verdict(Answer.NO_DATA, reason, figures=figures)


def over(value: float, limit: float, unit: Unit, **figures: Any) -> Verdict:
    """A breach where the value reaches its limit."""
    breach = value >= limit - 1e-9
    answer, reason = (Answer.BREACH, Reason.ABOVE) if breach else (Answer.OK, Reason.WITHIN)
    return Verdict(answer, reason, value, limit, unit=unit, figures=figures)
