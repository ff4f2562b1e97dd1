"""The interface of a kind of rule, the settings and figures that several kinds share, and texts for values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from controlplane.errors import InvalidError
from controlplane.schema_fields import canonical
from routing.schema import Frozen
from telemetry.alerts.findings import (
    E_co,
    Finding,
    Findings,
    Reason,
    Restarts,
    Result,
    Timing,
    TrafficEvidence,
)
from telemetry.alerts.history_window import CURRENT_ONLY, HistoryView, Source, WindowSum
from telemetry.models import RuleKind

Problem = tuple[str, str]  # the invalid setting, and why


def setting(unit: str, description: str, *, le: float, ge: float | None = None, gt: float | None = None) -> Meta:
    """Annotation of a setting: unit, description and limits, for checks, forms and documents."""
    if gt is None:
        return Meta(description=description, extra={"unit": unit}, ge=ge, le=le)
    return Meta(description=description, extra={"unit": unit}, gt=gt, le=le)


# Fire after at least two scrapes, resolve after two windows.
ForS = Annotated[
    float, setting("seconds", "How long the limit must be broken before the alert fires.", ge=0, le=86_400)
]
KeepFiringS = Annotated[
    float, setting("seconds", "How long the limit must be kept before the alert resolves.", ge=0, le=86_400)
]
WindowS = Annotated[float, setting("seconds", "Length of the window that is measured.", ge=10, le=3600)]
MinRequests = Annotated[float, setting("requests", "A window with fewer requests gives no result.", ge=0, le=1e9)]
MinTokens = Annotated[float, setting("tokens", "A window with fewer queried tokens gives no result.", ge=0, le=1e12)]
WarmUpS = Annotated[
    float,
    setting(
        "seconds",
        "For how long after a replica's restart a drop that this replica alone causes is not notified; 0: notify.",
        ge=0,
        le=86_400,
    ),
]


class RuleSettings(Frozen, frozen=True):
    """Settings of a kind. Forms show fields in the order of declaration, so each kind declares the common ones too."""

    if TYPE_CHECKING:
        for_s: ForS
        keep_firing_s: KeepFiringS

    @property
    def step_s(self) -> float:
        """Length of the history's steps."""
        raise NotImplementedError

    @property
    def lookback_s(self) -> float:
        """Length of the history that an evaluation needs."""
        return self.step_s

    @property
    def days_back(self) -> int:
        """Number of past days whose hours are compared."""
        return 0

    @property
    def warm_up_lookback_s(self) -> float:
        """How long restarts of replicas matter."""
        return 0.0

    @property
    def series_lookback_s(self) -> float:
        """Length of the series of bins; 0: none."""
        return 0.0

    @property
    def timing(self) -> Timing:
        return Timing(self.for_s, self.keep_firing_s, self.step_s)

    def problem(self) -> Problem | None:
        """What is wrong with valid settings in combination."""
        return None


class CurrentSettings(RuleSettings, frozen=True):
    """Settings of a kind that evaluates current state, of which no history is stored."""

    @property
    def step_s(self) -> float:
        return 60.0  # any


class WindowSettings(RuleSettings, frozen=True):
    """Settings of a kind that evaluates the newest window."""

    if TYPE_CHECKING:
        window_s: WindowS

    @property
    def step_s(self) -> float:
        return self.window_s


@dataclass(frozen=True, slots=True)
class Scope:
    """What an alert is about."""

    pool: str
    group: str = ""
    replica: str = ""

    def __str__(self) -> str:
        if self.replica:
            return f"replica {self.replica} (pool {self.pool})"
        return f"task group {self.group} (pool {self.pool})" if self.group else f"pool {self.pool}"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of rule."""

    name: str
    about: str  # what it finds and what it does not, for the person who writes a rule
    settings: type[RuleSettings]
    sources: frozenset[Source]
    evaluate: Callable[[Any, HistoryView, str], Findings]  # pure: settings, history, task group ("": the pool)
    summarize: Callable[[Scope, Any, Any], str]  # a breach as a sentence
    condition: Callable[[Any], str]  # when a rule with these settings fires, in half a sentence
    inhibited_by: tuple[RuleKind, ...]  # kinds that explain its alerts while they fire in the same pool
    is_fleet_wide: bool = False  # one cause for all pools: one pool's alert is notified
    group_sources: frozenset[Source] | None = None  # of a rule for one task group; None: the kind has no such rules
    is_drop: bool = False  # of a hit rate, so that causes are looked for
    figure: str = "Value"  # name of the value

    @property
    def label(self) -> str:
        return str(RuleKind(self.name).label)

    def needs(self, group: str) -> frozenset[Source]:
        """Data that a rule of a task group needs, or of the pool for ``group`` ""."""
        return self.group_sources if group and self.group_sources is not None else self.sources

    @property
    def can_be_replayed(self) -> bool:
        """Whether its history is stored, so that a preview is possible."""
        return not self.sources <= CURRENT_ONLY

    def read(self, document: object) -> Any:
        """A rule's JSON as settings with defaults. InvalidError names everything that is wrong."""
        if not isinstance(document, dict):
            raise InvalidError("$.settings", "expected an object of settings")
        settings = msgspec.convert(canonical(self.settings, document, "$.settings"), self.settings)
        if problem := settings.problem():
            raise InvalidError(f"$.settings.{problem[0]}", problem[1])
        return settings


def each_replica(find: Callable[[Any, HistoryView, str], Finding[Any]]) -> Callable[[Any, HistoryView, str], Findings]:
    """The evaluation of a kind that looks at one replica after the other."""
    return lambda settings, view, _: {name: find(settings, view, name) for name in view.history.replicas}


def percent(ratio: float | None) -> str:
    return "unknown" if ratio is None else f"{ratio * 100:.1f} %"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    if seconds < 120:
        rounded = round(seconds, 1 if seconds >= 10 else 2)
        return f"{rounded:g} s" if rounded >= 1 or not seconds else f"{seconds * 1000:.0f} ms"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def capitalized(scope: Scope) -> str:
    text = str(scope)
    return f"{text[0].upper()}{text[1:]}"


def with_restarts(finding: Finding[E_co], view: HistoryView, warm_up_s: float) -> Finding[E_co]:
    """The finding; a breach has the replicas to which something happened within the rule's warm-up time."""
    changes = view.recent_membership_changes(warm_up_s) if finding.result is Result.BREACH else {}
    if not changes:
        return finding
    warm_at = max(changes.values()) + timedelta(seconds=warm_up_s)
    return replace(finding, restarts=Restarts(tuple(sorted(changes)), warm_at))


class Minimums(Protocol):
    """Settings with both minimums of traffic."""

    @property
    def min_requests(self) -> float: ...
    @property
    def min_tokens(self) -> float: ...


def has_traffic(window: WindowSum, minimums: Minimums) -> bool:
    """Whether a window reaches both minimums; where requests are unknown, tokens alone decide."""
    if not window.queries or window.queries < minimums.min_tokens:
        return False
    return window.requests is None or window.requests >= minimums.min_requests


def no_result_reason(window: WindowSum) -> Reason:
    return Reason.NO_READINGS if window.queries is None else Reason.LITTLE_TRAFFIC


def basis_text(evidence: TrafficEvidence) -> str:
    """The share of responses that a task group's hit rate is computed from; "" for a pool, which engines count."""
    share = evidence.accounted_ratio
    return "" if share is None else f" Measured on {percent(share)} of the responses."
