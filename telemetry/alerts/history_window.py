"""The stored history of a pool that rules evaluate, as steps of one length, and the view of it at one time. Pure.

Theory of operation. ``History`` has the steps of one pool, ascending: a list per replica, task group or pool, with
None for a step without readings. ``HistoryView`` is the history up to the end of one step. An evaluation uses the last
step; a preview evaluates one step after the other with the same view.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TypeVar

from telemetry.alerts.hit_rate_series import HitRateSeries
from telemetry.metrics.histograms import Buckets
from telemetry.metrics.rates import RouterCounts

Step = TypeVar("Step")


class Source(StrEnum):
    """Data that a kind of rule needs; each source costs its own queries."""

    ENGINES = "engines"  # counters of each replica
    PRESSURE = "pressure"  # KV cache usage, preemptions and waiting requests of each replica
    GROUPS = "groups"  # tokens of each task group, by the routers
    FAILURES = "failures"  # failed requests of each task group, by the routers
    STREAMS = "streams"  # streams of the pool, and those whose replica failed, by the decisions of the routers
    SCRAPES = "scrapes"  # the last scrape of each replica, and whether routers consider it healthy; current state only
    EJECTIONS = "ejections"  # of replicas, by routers' circuit breakers
    RESPONSES = "responses"  # predicted and reported cached tokens of each replica's responses
    FIRST_TOKENS = "first_tokens"  # TTFT histograms by task group
    ENGINE_HOURS = "engine_hours"  # counters of the pool by hour, days back
    GROUP_HOURS = "group_hours"  # tokens of each task group by hour, days back
    BINS = "bins"  # tokens of each task group in short bins, as a series for detectors
    DAYS = "days"  # requests of the pool, now and at the same time of the days before, by the routers
    CACHE_REQUESTS = "cache_requests"  # hits and misses of response caches by task group
    CACHE_STORE = "cache_store"  # whether routers can use the store of response caches
    CONTROL = "control"  # which configuration routers run and when rules were last evaluated; current state only
    SEMANTIC_CACHES = "semantic_caches"  # of task groups, at the last scrape of each router; current state only


CURRENT_ONLY = frozenset(
    {Source.CONTROL, Source.DAYS, Source.SCRAPES, Source.SEMANTIC_CACHES}
)  # no history of them is stored


def whole_steps(length_s: float, step_s: float) -> int:
    """Number of whole steps in a length of time, at least one."""
    return max(math.floor(length_s / step_s + 1e-9), 1)


@dataclass(frozen=True, slots=True)
class WindowSum:
    """Counters of one window; None where nothing was scraped."""

    start: datetime
    queries: float | None  # tokens
    hits: float | None  # tokens, of every cache tier
    requests: float | None
    accounted_ratio: float | None = None  # of a task group: share of successful responses that reported cached tokens

    @property
    def ratio(self) -> float | None:
        """Hit rate, 0 to 1; None for no traffic."""
        return self.hits / self.queries if self.hits is not None and self.queries else None


@dataclass(frozen=True, slots=True)
class ReplicaStep:
    """Counters of one replica in one step."""

    queries: float | None
    hits: float | None
    requests: float | None
    read: bool  # a scrape succeeded
    failed: bool  # a scrape failed


def sum_replicas(start: datetime, steps: Sequence[ReplicaStep | None]) -> WindowSum:
    """Sum of several replicas' steps. Unknown steps are left out; without a known step the sum is unknown."""
    known_steps = [step for step in steps if step is not None and step.queries is not None]
    if not known_steps:
        return WindowSum(start, None, None, None)
    requests = [step.requests for step in known_steps if step.requests is not None]
    hits = sum(step.hits or 0 for step in known_steps)
    return WindowSum(start, sum(step.queries or 0 for step in known_steps), hits, sum(requests) if requests else None)


@dataclass(frozen=True, slots=True)
class PressureStep:
    """Memory pressure of one replica in one step."""

    kv_usage_ratio: float | None  # mean
    preemptions: float | None
    waiting: float | None = None  # requests in the engine's queue, mean


@dataclass(frozen=True, slots=True)
class ShareStep:
    """Requests of a pool or task group in one step, and a part of them."""

    requests: float  # all, or those that a response cache may answer
    part: float  # that failed because of a replica or a router, or that the cache answered


@dataclass(frozen=True, slots=True)
class Ejection:
    """One ejection of a replica by a router's circuit breaker."""

    router: str
    start: datetime
    end: datetime | None  # None: the replica is still ejected
    reason: str


@dataclass(frozen=True, slots=True)
class ScrapedReplica:
    """What is known of a replica at its last scrape and those of the routers."""

    was_read: bool  # whether any scrape of it ever succeeded
    reason: str  # why the last one failed; "" if it did not
    serving_at: tuple[str, ...]  # routers that consider it healthy


@dataclass(frozen=True, slots=True)
class DailyRequests:
    """Requests of a pool in the newest window, and at the same time of each of the days before."""

    now: float | None  # None: no router was scraped, or not all of them
    days: Sequence[float | None]  # the day before first; the fewest around that time; None: unknown


@dataclass(frozen=True, slots=True)
class SemanticCacheState:
    """The current state of a task group's semantic cache."""

    min_precision: float  # as configured
    precision: float | None = None  # of the most recent checks, the lowest of all routers; None: no checks
    checks: float = 0.0
    stopped_at: tuple[str, ...] = ()  # routers that stopped serving because of it


@dataclass(frozen=True, slots=True)
class ControlPlaneState:
    """Current state of which no history is stored."""

    behind_s: Mapping[str, float] = field(default_factory=dict)  # router -> seconds behind the newest configuration
    rejections: Mapping[str, str] = field(default_factory=dict)  # router -> why it rejected the newest configuration
    routers: int = 0  # number of routers that are present
    lost: tuple[str, ...] = ()  # routers without heartbeat that nothing replaced, the latest first
    silent_s: float = 0.0  # since the last heartbeat of those
    peers: Mapping[str, int | None] = field(default_factory=dict)  # of routers that share; None: cut off from all
    since_evaluation_s: float = 0.0


@dataclass(frozen=True, slots=True)
class History:
    """A pool's steps. Every list has ``count`` items."""

    start: datetime
    step_s: float
    count: int
    replicas: tuple[str, ...]  # names of the replicas that should be scraped
    active: frozenset[str]  # those of them that should receive requests
    hit_rate_replicas: frozenset[str]  # those of them whose counters are part of the pool's hit rate
    starting_until: Mapping[str, datetime] = field(default_factory=dict)  # of replicas that were added recently
    engines: Mapping[str, Sequence[ReplicaStep | None]] = field(default_factory=dict)
    pressure: Mapping[str, Sequence[PressureStep | None]] = field(default_factory=dict)
    responses: Mapping[str, Sequence[RouterCounts | None]] = field(default_factory=dict)
    failures: Mapping[str | None, Sequence[ShareStep | None]] = field(default_factory=dict)  # None: the pool
    streams: Mapping[str, Sequence[int | None]] = field(default_factory=dict)  # by failed replica; "": none failed
    scrapes: Mapping[str, ScrapedReplica] = field(default_factory=dict)
    requests: DailyRequests | None = None
    ejections: Mapping[str, Sequence[Ejection]] = field(default_factory=dict)  # by replica, ascending
    windows: Mapping[str, Sequence[WindowSum]] = field(default_factory=dict)  # "": the pool, by engines; else groups
    first_tokens: Mapping[str, Sequence[Buckets | None]] = field(default_factory=dict)  # "": the pool
    hours: Mapping[str, Mapping[datetime, WindowSum]] = field(default_factory=dict)  # by start; "": the pool
    series: HitRateSeries | None = None
    membership_changes: Mapping[str, Sequence[datetime]] = field(default_factory=dict)  # by replica, ascending
    has_response_cache: bool = False  # whether a task group of the pool has one now
    cache_requests: Mapping[str | None, Sequence[ShareStep | None]] = field(default_factory=dict)  # None: the pool
    # Share of each router's scrapes that found the store of response caches down; None: no scrape, or no store.
    cache_stores: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    control: ControlPlaneState | None = None
    semantic_caches: Mapping[str, SemanticCacheState] = field(default_factory=dict)  # by task group; reported ones

    def at(self, index: int) -> HistoryView:
        """The view at the end of a step."""
        return HistoryView(self, index, self.start + timedelta(seconds=(index + 1) * self.step_s))


@dataclass(frozen=True, slots=True)
class HistoryView:
    """A pool's history up to ``now``, the end of step ``index``. "Newest" is that step."""

    history: History
    index: int
    now: datetime

    def window(self, group: str) -> WindowSum:
        """The newest window of the pool ("") or a task group."""
        windows = self.history.windows.get(group)
        return windows[self.index] if windows else WindowSum(self._step_start, None, None, None)

    def is_starting(self, replica: str) -> bool:
        """Whether a replica was added recently and no scrape succeeded up to the end of the newest step.

        Steps are evaluated late, so a scrape that succeeded since then does not count.
        """
        until = self.history.starting_until.get(replica)
        if until is None or self.now >= until:
            return False
        steps = self.history.engines.get(replica, ())[: self.index + 1]
        return not any(step is not None and step.read for step in steps)

    def engine(self, replica: str) -> ReplicaStep | None:
        """A replica's newest step; None where no scrape was attempted."""
        return self._newest(self.history.engines.get(replica))

    def scraped(self, replica: str) -> ScrapedReplica | None:
        """The last scrape of a replica; None where it is unknown, and in steps before the newest one."""
        return self.history.scrapes.get(replica) if self.index == self.history.count - 1 else None

    def is_serving(self, replica: str) -> bool:
        """Whether a router considers a replica healthy, whatever scrapes of it say."""
        state = self.scraped(replica)
        return state is not None and bool(state.serving_at)

    def since_success_s(self, replica: str, lookback_s: float) -> float | None:
        """Seconds since the last successful scrape of a replica, in whole steps.

        None if there is none in the last ``lookback_s`` seconds.
        """
        back = (back for back, step in self._scrapes(replica, lookback_s) if step.read)
        return next((steps * self.history.step_s for steps in back), None)

    def since_first_scrape_s(self, replica: str, lookback_s: float) -> float:
        """Seconds since the first attempted scrape in the last ``lookback_s`` seconds, in whole steps."""
        return max((back for back, _ in self._scrapes(replica, lookback_s)), default=0) * self.history.step_s

    def since_any_scrape_s(self, lookback_s: float) -> float | None:
        """Seconds since the last attempted scrape of any replica, in whole steps.

        None if there is none in the last ``lookback_s`` seconds.
        """
        newest = [back for name in self.history.engines for back, _ in self._scrapes(name, lookback_s)]
        return min(newest) * self.history.step_s if newest else None

    def recent_membership_changes(self, within_s: float) -> dict[str, datetime]:
        """When each replica that changed within some seconds last went down, came up or restarted."""
        since, changes = self.now - timedelta(seconds=within_s), self.history.membership_changes
        recent = {name: [at for at in times if since < at <= self.now] for name, times in changes.items()}
        return {name: times[-1] for name, times in recent.items() if times}

    def pressure(self, replica: str) -> PressureStep | None:
        return self._newest(self.history.pressure.get(replica))

    def failures(self, group: str | None) -> ShareStep | None:
        """The newest step of a task group, or of the pool (None); None where no router counted a request."""
        return self._newest(self.history.failures.get(group))

    def streams(self) -> dict[str, int]:
        """Streams that began in the newest step, by the replica that failed during them; "": none did."""
        newest = {replica: self._newest(steps) for replica, steps in self.history.streams.items()}
        return {replica: count for replica, count in newest.items() if count is not None}

    def cache_requests(self, group: str | None, steps: int, *, before: int = 0) -> list[ShareStep]:
        """The last known steps of a task group or the pool (None), without the newest ``before``."""
        parts, end = self.history.cache_requests.get(group, ()), max(self.index + 1 - before, 0)
        return [part for part in parts[max(end - steps, 0) : end] if part is not None]

    def cache_stores(self) -> dict[str, float]:
        """Share of the newest step's scrapes that found the store down, by router; without unknown ones."""
        newest = {router: self._newest(steps) for router, steps in self.history.cache_stores.items()}
        return {router: ratio for router, ratio in newest.items() if ratio is not None}

    def ejections(self, replica: str) -> list[tuple[Ejection, float]]:
        """Ejections of a replica in the newest step, with the seconds of each within the step."""
        lasted = [
            (
                ejection,
                (min(ejection.end or self.now, self.now) - max(ejection.start, self._step_start)).total_seconds(),
            )
            for ejection in self.history.ejections.get(replica, ())
        ]
        return [(ejection, seconds) for ejection, seconds in lasted if seconds > 0]

    def responses(self, replica: str) -> RouterCounts | None:
        return self._newest(self.history.responses.get(replica))

    def first_tokens(self, group: str, steps: int) -> list[Buckets]:
        """TTFT histograms of the last steps of the pool ("") or a task group, without empty steps."""
        parts = self.history.first_tokens.get(group, ())
        return [part for part in parts[max(self.index + 1 - steps, 0) : self.index + 1] if part is not None]

    @property
    def _step_start(self) -> datetime:
        return self.now - timedelta(seconds=self.history.step_s)

    def _scrapes(self, replica: str, lookback_s: float) -> list[tuple[int, ReplicaStep]]:
        """(number of steps back, step) of attempted scrapes in the last ``lookback_s`` seconds, newest first."""
        steps = self.history.engines.get(replica)
        count = min(whole_steps(lookback_s, self.history.step_s), self.index + 1) if steps else 0
        return [(back, step) for back in range(count) if steps and (step := steps[self.index - back]) is not None]

    def _newest(self, steps: Sequence[Step | None] | None) -> Step | None:
        return steps[self.index] if steps else None
