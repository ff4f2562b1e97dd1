"""What the evaluation of a rule finds, and the state machine of its alert: none -> pending -> firing -> resolved. Pure.

A result is OK, BREACH or NO_DATA. NO_DATA (too little traffic, too little history, failed scrapes) opens no alert and
resolves none that fires.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Generic, Literal, TypeVar

import msgspec

Unit = Literal["ratio", "seconds", "count"]
POOL = ""  # the subject of an alert about the pool, or the task group, as a whole


class Result(StrEnum):
    """Result of an evaluation."""

    OK = "ok"
    BREACH = "breach"
    NO_DATA = "no_data"


class Reason(StrEnum):
    """Reason of a result."""

    WITHIN = "within"  # the value is within its limit
    BELOW = "below"  # the value is below its limit
    ABOVE = "above"  # the value is above its limit
    SCRAPES_FAIL = "scrapes_fail"
    SERVING = "serving"  # scrapes fail, and routers consider the replica healthy
    NO_READINGS = "no_readings"  # nothing was scraped in the newest window
    NOT_REPORTED = "not_reported"  # no engine or router reports the figure
    LITTLE_TRAFFIC = "little_traffic"  # below a minimum in the newest window
    LITTLE_HISTORY = "little_history"  # too few windows with enough traffic before the newest one
    STARTING = "starting"  # added recently and never scraped successfully
    NO_REPLICAS = "no_replicas"  # no replica or router, or too few
    NO_CACHE = "no_cache"  # no response cache, or no store of one
    FAILED = "failed"  # the evaluation raised an exception; the worker's log has it
    NOT_STORED = "not_stored"  # the rule looks at current state of which no history is stored


class Evidence(msgspec.Struct, frozen=True):
    """What else a kind of rule knows: requests, tokens, routers ... Each kind has its own, which rows and REST show."""


class TrafficEvidence(Evidence, frozen=True):
    """The traffic that a hit rate is measured on."""

    requests: float | None = None
    tokens: float | None = None
    accounted_ratio: float | None = None  # of a task group: share of the responses that reported cached tokens


@dataclass(frozen=True, slots=True)
class Restarts:
    """Replicas that restarted, went down or came up so lately that a drop may be their cost."""

    replicas: tuple[str, ...]
    warm_at: datetime  # later a drop is notified, whatever its cause


E_co = TypeVar("E_co", bound=Evidence, covariant=True)
NO_EVIDENCE = Evidence()


@dataclass(frozen=True, slots=True)
class Finding(Generic[E_co]):
    """What one evaluation finds about one subject; ``value``, ``limit`` and ``baseline`` are in ``unit``."""

    result: Result
    reason: Reason
    value: float | None = None
    limit: float | None = None
    baseline: float | None = None
    unit: Unit = "ratio"
    evidence: E_co = NO_EVIDENCE  # type: ignore[assignment]  # a breach has that of its kind
    has_ended: bool = False  # what broke the limit has ended, and still counts within the rule's window
    restarts: Restarts | None = None  # of a breach

    def figures(self) -> dict[str, Any]:
        """The evidence as JSON."""
        values: dict[str, Any] = msgspec.to_builtins(self.evidence, builtin_types=(datetime,))
        figures = {name: value.isoformat() if isinstance(value, datetime) else value for name, value in values.items()}
        if self.has_ended:
            figures["over"] = True
        return figures

    def as_json(self) -> dict[str, Any]:
        """The form that the rule's row stores and REST shows."""
        names = ("result", "reason", "value", "limit", "baseline", "unit")
        return {name: getattr(self, name) for name in names} | {"figures": self.figures()}


Findings = dict[str, Finding[Any]]  # by subject: a replica's name, or POOL
_ORDER = (Result.BREACH, Result.NO_DATA, Result.OK)


def worst_finding(findings: Findings) -> Finding[Any]:
    """The finding shown for the rule: a breach first, the one farthest beyond its limit first."""
    return min(findings.values(), key=lambda finding: (_ORDER.index(finding.result), -_excess(finding)))


def _excess(finding: Finding[Any]) -> float:
    return 0.0 if finding.value is None or finding.limit is None else abs(finding.value - finding.limit)


def no_data(reason: Reason, evidence: Evidence = NO_EVIDENCE) -> Finding[Any]:
    return Finding(Result.NO_DATA, reason, evidence=evidence)


def below_limit(
    value: float, limit: float, evidence: Evidence, *, is_breach: bool, baseline: float | None = None
) -> Finding[Any]:
    """A breach of a lower limit, or OK."""
    result, reason = (Result.BREACH, Reason.BELOW) if is_breach else (Result.OK, Reason.WITHIN)
    return Finding(result, reason, value, limit, baseline, evidence=evidence)


def above_limit(value: float, limit: float, unit: Unit, evidence: Evidence = NO_EVIDENCE) -> Finding[Any]:
    """A breach where the value reaches an upper limit, else OK."""
    result, reason = (Result.BREACH, Reason.ABOVE) if value >= limit - 1e-9 else (Result.OK, Reason.WITHIN)
    return Finding(result, reason, value, limit, unit=unit, evidence=evidence)


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a result must last before the alert changes, in seconds."""

    for_s: float  # of breaches before a pending alert fires
    keep_firing_s: float  # without a breach before a firing alert resolves
    confirm_s: float  # without data before a pending alert is dropped


class Action(StrEnum):
    """What a result does to an alert."""

    NONE = "none"
    OPEN = "open"  # as pending
    OPEN_FIRING = "open_firing"
    EXTEND = "extend"  # store the time of the newest breach
    FIRE = "fire"
    DROP = "drop"  # delete a pending alert
    RESOLVE = "resolve"


@dataclass(frozen=True, slots=True)
class OpenAlert:
    """State of an open alert that the next action depends on."""

    is_firing: bool
    started_at: datetime
    last_breach_at: datetime


def next_action(timing: Timing, result: Result, alert: OpenAlert | None, now: datetime) -> Action:
    """The transition that a result causes. NO_DATA changes nothing, except that it drops an old pending alert."""
    if result is Result.NO_DATA:
        is_stale = alert is not None and not alert.is_firing and _since_breach_s(alert, now) > timing.confirm_s
        return Action.DROP if is_stale else Action.NONE
    if result is Result.BREACH:
        if alert is None:
            return Action.OPEN if timing.for_s > 0 else Action.OPEN_FIRING
        is_due = (now - alert.started_at).total_seconds() >= timing.for_s
        return Action.FIRE if is_due and not alert.is_firing else Action.EXTEND
    if alert is None:
        return Action.NONE
    if not alert.is_firing:
        return Action.DROP
    return Action.RESOLVE if _since_breach_s(alert, now) >= timing.keep_firing_s else Action.NONE


def _since_breach_s(alert: OpenAlert, now: datetime) -> float:
    return (now - alert.last_breach_at).total_seconds()
