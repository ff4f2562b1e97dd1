"""What a kind of rule is, and the settings that kinds have in common.

A drop that is a restarted replica's alone (H18): found, and not told.

Whether a window says anything: the floors that kinds share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from controlplane.errors import InvalidError
from controlplane.schema_fields import canonical
from routing.schema import Frozen
from telemetry.alerts.history_window import Seen, Source, WindowSum
from telemetry.alerts.verdict import Reason, Result, Timing, Unit, Verdict, Verdicts

Fault = tuple[str, str]  # the setting that is wrong, and why

# Lengths that most kinds have; OPERATORS 2.6: fire after two scrapes at least, end after two windows.
ForS = Annotated[
    float, Meta(ge=0, le=86_400, description="Broken for so long before it fires.", extra={"unit": "seconds"})
]
KeepFiringS = Annotated[
    float, Meta(ge=0, le=86_400, description="Not broken for so long before it ends.", extra={"unit": "seconds"})
]
WindowS = Annotated[
    float, Meta(ge=10, le=3600, description="That the figure is measured over.", extra={"unit": "seconds"})
]
MinRequests = Annotated[
    float, Meta(ge=0, le=1e9, description="A window with fewer says nothing.", extra={"unit": "requests"})
]
MinTokens = Annotated[
    float, Meta(ge=0, le=1e12, description="A window with fewer queried tokens says nothing.", extra={"unit": "tokens"})
]


WarmUpS = Annotated[
    float,
    Meta(
        ge=0,
        le=86_400,
        description="For so long after a replica's restart a drop that is its alone is not told; 0: it is.",
        extra={"unit": "seconds"},
    ),
]


class RuleSettings(Frozen, frozen=True):
    """The settings of a kind. ``step_s`` and ``reach_s`` say what past an evaluation needs.

    Fields stay in the order in which they were first declared, and forms show them so: what all kinds have is therefore
    each kind's to declare, where it stands among its own.
    """

    if TYPE_CHECKING:
        for_s: ForS
        keep_firing_s: KeepFiringS

    @property
    def step_s(self) -> float:
        """The length of the steps that it looks at."""
        raise NotImplementedError

    @property
    def reach_s(self) -> float:
        """How far back they go; one step unless the kind says otherwise."""
        return self.step_s

    @property
    def open_reach_s(self) -> float:
        """The same while an alert is open."""
        return self.reach_s

    @property
    def days_back(self) -> int:
        """How many days back hours are looked at."""
        return 0

    @property
    def warm_up_reach_s(self) -> float:
        """How far back restarts of replicas matter."""
        return 0.0

    @property
    def series_reach_s(self) -> float:
        """How far back a series of bins goes that it looks at; 0: it looks at none."""
        return 0.0

    @property
    def timing(self) -> Timing:
        """How long an answer must hold; a suspicion that a whole step could not confirm is dropped."""
        return Timing(self.for_s, self.keep_firing_s, self.step_s)

    def fault(self) -> Fault | None:
        """What is wrong with the settings together, though each could be."""
        return None


class WindowSettings(RuleSettings, frozen=True):
    """The settings of a kind that looks at the newest window."""

    if TYPE_CHECKING:
        window_s: WindowS

    @property
    def step_s(self) -> float:
        """A window."""
        return self.window_s


@dataclass(frozen=True, slots=True)
class Where:
    """What a rule looks at, in names."""

    pool: str
    group: str = ""
    subject: str = ""  # a replica

    @property
    def words(self) -> str:
        """Whose figure it is, in a sentence."""
        if self.subject:
            return f"replica {self.subject} of pool {self.pool}"
        return f"task group {self.group} of pool {self.pool}" if self.group else f"pool {self.pool}"


@dataclass(frozen=True, slots=True)
class Asked:
    """What an evaluation is of, besides the past that it looks at."""

    group: str = ""  # a task group's name; "": the whole pool
    opened: Mapping[str, datetime] | None = None  # by subject: since when an alert is open


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of rule. ``judge`` is pure: the settings, the view of the past, and what is asked -> verdicts."""

    name: str
    label: str
    about: str  # for whoever writes a rule: what it finds, and what it does not
    settings: type[RuleSettings]
    sources: frozenset[Source]
    unit: Unit
    judge: Callable[[Any, Seen, Asked], Verdicts]
    sentence: Callable[[Where, Any, Verdict], str]  # what is wrong, for people
    finds: Callable[[Any], str]  # what the rule looks for, in half a sentence
    group_sources: frozenset[Source] | None = None  # where it looks for a task group; None: it cannot
    is_drop: bool = False  # of a hit rate, so that causes can be named
    figure: str = "Value"  # what the value is
    window_of: Callable[[Verdict, datetime], WindowSum] | None = None  # what a verdict is about; None: a step
    judge_window: Callable[[Any, Verdict, WindowSum], Verdict] | None = None  # the same verdict of another hit rate

    def needs(self, group: str) -> frozenset[Source]:
        """What has to be loaded."""
        return self.group_sources if group and self.group_sources is not None else self.sources

    @property
    def can_be_replayed(self) -> bool:
        """Whether its past is stored, so that a preview can be made."""
        return Source.CONTROL not in self.sources or len(self.sources) > 1

    def read(self, document: object) -> Any:
        """A rule's JSON as settings; what is missing takes its default. InvalidError names everything that is wrong."""
        if not isinstance(document, dict):
            raise InvalidError("$.settings", "expected an object of settings")
        settings = msgspec.convert(canonical(self.settings, document, "$.settings"), self.settings)
        if fault := settings.fault():
            raise InvalidError(f"$.settings.{fault[0]}", fault[1])
        return settings


def percent(ratio: float | None) -> str:
    """A ratio in a sentence."""
    return "unknown" if ratio is None else f"{ratio * 100:.1f} %"


def length(seconds_: float | None) -> str:
    """A length of time in a sentence."""
    if seconds_ is None:
        return "unknown"
    if seconds_ < 120:
        return f"{seconds_:g} s" if seconds_ >= 1 or not seconds_ else f"{seconds_ * 1000:.0f} ms"
    return f"{seconds_ / 60:.0f} min" if seconds_ < 7200 else f"{seconds_ / 3600:.1f} h"


MUTED = "restarted"  # the figure by which telling knows
OTHERS = "others"  # and what the answer would be without those replicas


def unless_cold(verdict: Verdict, seen: Seen, warm_up_s: float, judge: Callable[[WindowSum], Verdict]) -> Verdict:
    """The verdict, with the restarted replicas among its figures where without them there would be no breach."""
    cold = seen.restarted(warm_up_s) if verdict.result is Result.BREACH else {}
    if not cold or (others := judge(seen.newest_without(cold)).result) is Result.BREACH:
        return verdict
    found = muted(verdict, cold, warm_up_s)
    return replace(found, figures={**found.figures, OTHERS: others})


def muted(verdict: Verdict, since: Mapping[str, datetime], warm_up_s: float) -> Verdict:
    """The verdict, as one that is due to what happened to some replicas, each at a moment."""
    until = max(since.values()) + timedelta(seconds=warm_up_s)
    return replace(verdict, figures={**verdict.figures, MUTED: sorted(since), "warm_at": until.isoformat()})


class Floors(Protocol):
    """Settings with both floors."""

    @property
    def min_requests(self) -> float:
        """Requests."""

    @property
    def min_tokens(self) -> float:
        """Queried tokens."""


def has_traffic(window: WindowSum, floors: Floors) -> bool:
    """Whether a window is above both floors; one whose requests are unknown is judged by its tokens."""
    if not window.queries or window.queries < floors.min_tokens:
        return False
    return window.requests is None or window.requests >= floors.min_requests


def silence_of(window: WindowSum, floors: Floors) -> Reason | None:
    """Why a window says nothing; None where it does."""
    if window.queries is None:
        return Reason.NO_READINGS
    return None if has_traffic(window, floors) and window.ratio is not None else Reason.LITTLE_TRAFFIC


def traffic_of(window: WindowSum) -> dict[str, float | None]:
    """A window's traffic, for a verdict's figures."""
    figures = {"requests": window.requests, "tokens": window.queries}
    return figures if window.accounted_ratio is None else {**figures, "accounted_ratio": window.accounted_ratio}


def basis_of(verdict: Verdict) -> str:
    """What a task group's hit rate rests on, as the end of a sentence; nothing for a pool's, which engines count."""
    share = verdict.figures.get("accounted_ratio")
    return "" if share is None else f" It rests on {percent(share)} of the responses."
