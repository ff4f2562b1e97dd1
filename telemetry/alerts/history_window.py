"""What rules look at: a pool's past in steps, and the view of it at one moment. Pure.

Theory of operation. ``Past`` holds one pool's steps side by side, all of one length, ascending; a list per replica,
task group or pool, with None where nothing was written down. ``Seen`` is the same up to a moment: the newest step is
the one that ends there. An evaluation looks at the last step of a past that ends now; a preview moves through a past
that begins long ago, with the very same view.

What the control plane is at now: routers that do not run what they should.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TypeVar

from controlplane.models import ConfigSnapshot, Router
from telemetry.alerts.series import HitRateSeries
from telemetry.metrics.histograms import Buckets
from telemetry.metrics.rates import RouterCounts

Step = TypeVar("Step")


class Source(StrEnum):
    """What can be loaded; each costs its own queries, so a kind names what it needs."""

    ENGINES = "engines"  # counters of each replica
    PRESSURE = "pressure"  # KV usage, preemptions and waiting requests of each replica
    GROUPS = "groups"  # what routers counted of each task group
    FAILURES = "failures"  # failed requests of each task group, by the routers
    EJECTIONS = "ejections"  # replicas that routers' circuit breakers ejected
    ANSWERS = "answers"  # what answers of each replica told, and routers had predicted of them
    FIRST_TOKENS = "first_tokens"  # TTFT histograms by task group
    ENGINE_HOURS = "engine_hours"  # counters of the pool, hour by hour, days back
    GROUP_HOURS = "group_hours"  # the same of each task group
    BINS = "bins"  # tokens of each task group in short bins, as a series that detectors follow
    CONTROL = "control"  # which configuration routers run, and when rules were last evaluated: as it is now


def steps_in(reach_s: float, step_s: float) -> int:
    """How many whole steps a reach holds, at least one."""
    return max(math.floor(reach_s / step_s + 1e-9), 1)


@dataclass(frozen=True, slots=True)
class WindowSum:
    """What was counted in one window; None where nothing was scraped."""

    start: datetime
    queries: float | None  # tokens
    hits: float | None  # tokens, of every tier
    requests: float | None
    accounted_ratio: float | None = None  # of a task group: share of successful responses that these tokens are of

    @property
    def ratio(self) -> float | None:
        """Hit rate, 0 to 1; None for no traffic (H11)."""
        return self.hits / self.queries if self.hits is not None and self.queries else None


@dataclass(frozen=True, slots=True)
class ReplicaStep:
    """One replica in one step."""

    queries: float | None
    hits: float | None
    requests: float | None
    read: bool  # a scrape succeeded
    failed: bool  # a scrape failed


def together(start: datetime, steps: Sequence[ReplicaStep | None]) -> WindowSum:
    """Several replicas' steps as one (H2): what is unknown of one is left out, and unknown of all is unknown."""
    known = [step for step in steps if step is not None and step.queries is not None]
    if not known:
        return WindowSum(start, None, None, None)
    counted = [step.requests for step in known if step.requests is not None]
    hits = sum(step.hits or 0 for step in known)
    return WindowSum(start, sum(step.queries or 0 for step in known), hits, sum(counted) if counted else None)


@dataclass(frozen=True, slots=True)
class PressureStep:
    """How full one replica was in one step."""

    kv_usage_ratio: float | None  # mean
    preemptions: float | None
    waiting: float | None = None  # requests in the engine's queue, mean


@dataclass(frozen=True, slots=True)
class FailureStep:
    """What routers counted of a pool's or task group's requests in one step."""

    requests: float
    failed: float  # by the fault of a replica or a router


@dataclass(frozen=True, slots=True)
class Ejection:
    """One time that a router's circuit breaker ejected a replica."""

    router: str
    start: datetime
    end: datetime | None  # None: it still is ejected
    reason: str


@dataclass(frozen=True, slots=True)
class ControlNow:
    """What is not stored step by step."""

    behind_s: Mapping[str, float] = field(default_factory=dict)  # router -> seconds since what it should run was made
    refusing: Mapping[str, str] = field(default_factory=dict)  # router -> why it refused the newest configuration
    routers: int = 0  # that are present
    unevaluated_s: float = 0.0  # since the evaluation before this one


@dataclass(frozen=True, slots=True)
class Past:
    """A pool's steps. Every list is as long as ``count``."""

    start: datetime
    step_s: float
    count: int
    replicas: tuple[str, ...]  # that should be scraped, by name
    active: frozenset[str]  # those of them that should take traffic
    rated: frozenset[str]  # and those whose counters make the pool's hit rate (H19)
    starting_until: Mapping[str, datetime] = field(default_factory=dict)  # of replicas that were never read
    engines: Mapping[str, Sequence[ReplicaStep | None]] = field(default_factory=dict)
    pressure: Mapping[str, Sequence[PressureStep | None]] = field(default_factory=dict)
    answers: Mapping[str, Sequence[RouterCounts | None]] = field(default_factory=dict)
    failures: Mapping[str | None, Sequence[FailureStep | None]] = field(default_factory=dict)  # by group; None: of all
    ejections: Mapping[str, Sequence[Ejection]] = field(default_factory=dict)  # by replica, ascending
    windows: Mapping[str, Sequence[WindowSum]] = field(default_factory=dict)  # "" is the pool, by engines; else groups
    first_tokens: Mapping[str, Sequence[Buckets | None]] = field(default_factory=dict)  # "" is the pool
    hours: Mapping[str, Mapping[datetime, WindowSum]] = field(default_factory=dict)  # by their start; "" is the pool
    series: HitRateSeries | None = None
    restarts: Mapping[str, Sequence[datetime]] = field(default_factory=dict)  # by replica, ascending
    turns: Mapping[str, Sequence[datetime]] = field(default_factory=dict)  # the same, and when it went and came back
    control: ControlNow | None = None

    def end_of(self, index: int) -> datetime:
        """When a step ends."""
        return self.start + timedelta(seconds=(index + 1) * self.step_s)

    def at(self, index: int) -> Seen:
        """The view at the end of a step."""
        return Seen(self, index, self.end_of(index))


@dataclass(frozen=True, slots=True)
class Seen:
    """A pool's past up to a moment, which is the end of step ``index``."""

    past: Past
    index: int
    now: datetime

    def windows(self, group: str, reach_s: float = 0.0) -> Sequence[WindowSum]:
        """The windows that lie in a reach before now, ascending, the newest at least: of the pool ("") or a group."""
        known = self.past.windows.get(group)
        if known is None:
            return [WindowSum(self.now - timedelta(seconds=self.past.step_s), None, None, None)]
        return known[max(self.index + 1 - steps_in(reach_s, self.past.step_s), 0) : self.index + 1]

    def is_starting(self, replica: str) -> bool:
        """Whether a replica was never read and was added too short a time ago to count as down."""
        until = self.past.starting_until.get(replica)
        return until is not None and self.now < until

    def engine(self, replica: str) -> ReplicaStep | None:
        """A replica's newest step; None where no scrape of it was even tried."""
        return self._newest(self.past.engines.get(replica))

    def unread_s(self, replica: str, reach_s: float) -> float | None:
        """Seconds since a scrape of a replica last succeeded, in whole steps; None where none did in a reach."""
        steps = self.past.engines.get(replica)
        for back in range(min(steps_in(reach_s, self.past.step_s), self.index + 1) if steps else 0):
            step = steps[self.index - back] if steps else None
            if step is not None and step.read:
                return back * self.past.step_s
        return None

    def tried_s(self, replica: str, reach_s: float) -> float:
        """Seconds since a scrape of a replica was first tried in a reach, in whole steps; 0.0: in the newest one."""
        steps = self.past.engines.get(replica, ())
        tried = range(min(steps_in(reach_s, self.past.step_s), self.index + 1)) if steps else range(0)
        return max((back for back in tried if steps[self.index - back] is not None), default=0) * self.past.step_s

    def restarted(self, within_s: float) -> dict[str, datetime]:
        """The replicas that restarted in the last seconds, and when they last did."""
        return {name: times[-1] for name, times in self._lately(self.past.restarts, within_s).items()}

    def disturbed(self, within_s: float) -> dict[str, list[datetime]]:
        """The replicas that went, came back or restarted in the last seconds, and when they did, ascending."""
        return self._lately(self.past.turns, within_s)

    def newest_without(self, replicas: Collection[str]) -> WindowSum:
        """The pool's newest window without some replicas (H18)."""
        steps = [self.engine(name) for name in self.past.rated if name not in replicas]
        return together(self.now - timedelta(seconds=self.past.step_s), steps)

    def pressure(self, replica: str) -> PressureStep | None:
        """A replica's newest step."""
        return self._newest(self.past.pressure.get(replica))

    def failures(self, group: str | None) -> FailureStep | None:
        """The newest step of a task group, or of the pool (None); None where no router counted anything."""
        return self._newest(self.past.failures.get(group))

    def ejections(self, replica: str) -> list[tuple[Ejection, float]]:
        """Ejections of a replica in the newest step, with the seconds that each lasted within it."""
        since = self.now - timedelta(seconds=self.past.step_s)
        lasted = [
            (one, (min(one.end or self.now, self.now) - max(one.start, since)).total_seconds())
            for one in self.past.ejections.get(replica, ())
        ]
        return [(one, seconds) for one, seconds in lasted if seconds > 0]

    def answers(self, replica: str) -> RouterCounts | None:
        """A replica's newest step."""
        return self._newest(self.past.answers.get(replica))

    def first_tokens(self, group: str, steps: int) -> list[Buckets]:
        """The TTFT histograms of the last steps of the pool ("") or a task group; those of nothing are left out."""
        known = self.past.first_tokens.get(group, ())
        return [part for part in known[max(self.index + 1 - steps, 0) : self.index + 1] if part is not None]

    def _lately(self, known: Mapping[str, Sequence[datetime]], within_s: float) -> dict[str, list[datetime]]:
        since = self.now - timedelta(seconds=within_s)
        found = {name: [at for at in times if since < at <= self.now] for name, times in known.items() if within_s}
        return {name: times for name, times in found.items() if times}

    def _newest(self, steps: Sequence[Step | None] | None) -> Step | None:
        return steps[self.index] if steps else None


def control_now(now: datetime, evaluated_at: datetime | None) -> ControlNow:
    """Routers and rules as they are now. Two queries, and one for each router that is behind."""
    newest = ConfigSnapshot.objects.only("number", "sha256").order_by("-number").first()
    present = list(Router.objects.filter(lost_at=None))
    behind = [router for router in present if newest and not router.runs(newest.number, newest.sha256)]
    return ControlNow(
        behind_s={router.name: _behind_s(router, now) for router in behind},
        refusing={router.name: str(router.last_nack.get("reason", "")) for router in behind if router.last_nack},
        routers=len(present),
        unevaluated_s=(now - evaluated_at).total_seconds() if evaluated_at else 0.0,
    )


def _behind_s(router: Router, now: datetime) -> float:
    """Seconds since the first configuration was made that a router should have run and does not, while it was there."""
    later = ConfigSnapshot.objects.filter(number__gt=router.running_number or 0).order_by("number")
    made_at = later.values_list("created_at", flat=True).first() or now
    return max((now - max(made_at, router.first_seen_at)).total_seconds(), 0.0)
