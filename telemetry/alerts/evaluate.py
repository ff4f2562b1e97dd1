"""A rule and the windows before now -> an answer with its reason. Pure.

Theory of operation. ``hit_rate_drop`` compares the newest window's hit rate with the pool's own baseline: the median of
the windows before it, each as long as the newest one. A window counts only with enough traffic, here and there, since
a rate of few tokens says nothing. A fleet that is minutes old has few windows, and ``MIN_WINDOWS`` of them are enough;
as history grows the baseline takes in all of ``baseline_s``, and the median forgets what was unusual in it. While an
alert is open its baseline stays that of the time before it began, or a long drop would become its own standard; after
``baseline_s`` it does, and the alert ends.

An answer is one of three. NO_DATA (too little traffic, too little history, failed scrapes) is neither good nor bad
news: it starts no alert and ends none that fires.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

MIN_WINDOWS = 3  # with enough traffic, for a baseline


class RuleError(ValueError):
    """Settings that no rule can have; ``field`` names the one that is wrong, "" the whole."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}" if field else reason)
        self.field = field
        self.reason = reason


class Answer(StrEnum):
    """What an evaluation found."""

    OK = "ok"
    BREACH = "breach"
    NO_DATA = "no_data"


class Reason(StrEnum):
    """Why it found that."""

    WITHIN = "within"  # no further below the baseline than allowed
    BELOW = "below"  # further below
    NO_READINGS = "no_readings"  # nothing was scraped in the newest window
    LITTLE_TRAFFIC = "little_traffic"  # below a floor in the newest window
    LITTLE_HISTORY = "little_history"  # too few windows with enough traffic before it


# name -> (lowest, highest, default, unit and meaning); OPERATORS names the floors
LIMITS: dict[str, tuple[float, float, float, str]] = {
    "window_s": (10, 3600, 60, "seconds that a rate is measured over"),
    "baseline_s": (60, 86_400, 3600, "seconds of history that the baseline is the median of"),
    "drop_points": (1, 100, 15, "points of 100 below the baseline that are too many"),
    "min_requests": (0, 1e9, 50, "requests that a window must have to count"),
    "min_tokens": (0, 1e12, 20_000, "queried tokens that a window must have to count"),
    "for_s": (0, 86_400, 10, "seconds below before the alert fires"),
    "keep_firing_s": (0, 86_400, 60, "seconds above before it ends"),
}


@dataclass(frozen=True, slots=True)
class DropSettings:
    """Settings of ``hit_rate_drop``; LIMITS has units, ranges and defaults."""

    window_s: float
    baseline_s: float
    drop_points: float
    min_requests: float
    min_tokens: float
    for_s: float
    keep_firing_s: float

    @classmethod
    def parse(cls, document: object) -> DropSettings:
        """Read a rule's JSON; what is missing takes its default. RuleError names the first thing wrong."""
        if not isinstance(document, dict):
            raise RuleError("", "expected an object of settings")
        names = [field.name for field in fields(cls)]
        if unknown := sorted(set(document) - set(names)):
            raise RuleError(str(unknown[0]), f"there is no such setting; there are {', '.join(names)}")
        settings = cls(**{name: _number(name, document.get(name, LIMITS[name][2])) for name in names})
        if settings.baseline_s < settings.window_s * MIN_WINDOWS:
            raise RuleError("baseline_s", f"expected at least {MIN_WINDOWS} times window_s")
        return settings


def _number(name: str, value: object) -> float:
    low, high, _, _ = LIMITS[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RuleError(name, "expected a number")
    if not low <= value <= high:  # nor is NaN, and a whole number may be too long for a float
        raise RuleError(name, f"expected {low:g} to {high:g}")
    return float(value)


@dataclass(frozen=True, slots=True)
class WindowSum:
    """What a pool's engines counted in one window; None where nothing was scraped."""

    start: datetime
    queries: float | None  # tokens
    hits: float | None  # tokens, of every tier
    requests: float | None

    @property
    def ratio(self) -> float | None:
        """Hit rate, 0 to 1; None for no traffic (H11)."""
        return self.hits / self.queries if self.hits is not None and self.queries else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """An answer, its reason and its figures."""

    answer: Answer
    reason: Reason
    value_ratio: float | None = None
    baseline_ratio: float | None = None
    windows: int = 0  # that made the baseline
    requests: float | None = None
    queries: float | None = None

    def as_json(self) -> dict[str, Any]:
        """What a rule's row keeps of it."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def evaluate_drop(settings: DropSettings, newest: WindowSum, past: Sequence[WindowSum]) -> Verdict:
    """Judge the newest window by the ones before it."""
    if newest.queries is None:
        return Verdict(Answer.NO_DATA, Reason.NO_READINGS)
    figures: dict[str, Any] = {
        "value_ratio": newest.ratio,
        "requests": newest.requests,
        "queries": newest.queries,
    }
    if not has_traffic(newest, settings):
        return Verdict(Answer.NO_DATA, Reason.LITTLE_TRAFFIC, **figures)
    rates = [ratio for window in past if has_traffic(window, settings) and (ratio := window.ratio) is not None]
    if len(rates) < MIN_WINDOWS or newest.ratio is None:
        return Verdict(Answer.NO_DATA, Reason.LITTLE_HISTORY, windows=len(rates), **figures)
    baseline = statistics.median(rates)
    figures |= {"baseline_ratio": baseline, "windows": len(rates)}
    if (baseline - newest.ratio) * 100 >= settings.drop_points - 1e-9:
        return Verdict(Answer.BREACH, Reason.BELOW, **figures)
    return Verdict(Answer.OK, Reason.WITHIN, **figures)


def has_traffic(window: WindowSum, settings: DropSettings) -> bool:
    """Whether a window is above both floors; one whose requests are unknown is judged by its tokens."""
    if not window.queries or window.queries < settings.min_tokens:
        return False
    return window.requests is None or window.requests >= settings.min_requests


def baseline_span(settings: DropSettings, now: datetime, opened_at: datetime | None) -> tuple[datetime, datetime]:
    """From when to when the baseline's history reaches: up to the newest window, or up to where an open alert began."""
    window, history = timedelta(seconds=settings.window_s), timedelta(seconds=settings.baseline_s)
    is_its_own_standard = opened_at is None or now - opened_at > history
    end = (now if opened_at is None or is_its_own_standard else opened_at) - window
    return end - history, end


class Step(StrEnum):
    """What an answer does to an alert."""

    NOTHING = "nothing"
    OPEN = "open"  # a pending alert
    OPEN_FIRING = "open_firing"  # one that fires at once
    EXTEND = "extend"  # still below: note when
    FIRE = "fire"
    DROP = "drop"  # a pending alert that proved unfounded
    RESOLVE = "resolve"


@dataclass(frozen=True, slots=True)
class OpenAlert:
    """What the next step depends on."""

    is_firing: bool
    started_at: datetime
    last_breach_at: datetime


def next_step(settings: DropSettings, answer: Answer, alert: OpenAlert | None, now: datetime) -> Step:
    """The state machine: nothing -> pending -> firing -> resolved.

    No data leaves everything as it is, except for a suspicion that a whole window could not confirm.
    """
    if answer is Answer.NO_DATA:
        unconfirmed = alert is not None and not alert.is_firing and _silence_s(alert, now) > settings.window_s
        return Step.DROP if unconfirmed else Step.NOTHING
    if answer is Answer.BREACH:
        if alert is None:
            return Step.OPEN if settings.for_s > 0 else Step.OPEN_FIRING
        due = (now - alert.started_at).total_seconds() >= settings.for_s
        return Step.FIRE if due and not alert.is_firing else Step.EXTEND
    if alert is None:
        return Step.NOTHING
    if not alert.is_firing:
        return Step.DROP
    return Step.RESOLVE if _silence_s(alert, now) >= settings.keep_firing_s else Step.NOTHING


def _silence_s(alert: OpenAlert, now: datetime) -> float:
    """Seconds since the last breach."""
    return (now - alert.last_breach_at).total_seconds()
