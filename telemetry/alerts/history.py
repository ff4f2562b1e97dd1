"""Loads what routers reported of failures: failed requests of task groups, and ejections of replicas.

Loads what rules look at: the pasts of several pools at once, with the fewest queries.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, TypeVar

from django.db.models import Q

from controlplane.models import Event, EventKind, Pool, Replica, ReplicaState
from telemetry.alerts.detection.level import LOOKED_AT
from telemetry.alerts.history_window import (
    ControlNow,
    Ejection,
    FailureStep,
    Past,
    PressureStep,
    ReplicaStep,
    Source,
    WindowSum,
    together,
)
from telemetry.alerts.kept_series import Asked, fresh_series, kept_series
from telemetry.alerts.series import HitRateSeries
from telemetry.metrics.histograms import Buckets, merge
from telemetry.metrics.windows import Window
from telemetry.models import STARTING_S, ScrapeState
from telemetry.storage.dimension_sums import router_counts_by_step
from telemetry.storage.replica_facts import COLD_S, cold_bands, hit_rate_replicas
from telemetry.storage.rule_sums import pressure_sums
from telemetry.storage.sums import EngineSums, RouterSums, engine_sums, engine_ttft, router_sums, router_ttft

Failures = dict[str | None, list[FailureStep | None]]  # by task group; None: of the whole pool
OLDEST = timedelta(days=2)  # before the window: an ejection that began earlier is not found
# A router that started anew has ejected nothing; of a lost one nobody knows, and it serves nobody.
ENDS_ALL = (EventKind.ROUTER_STARTED, EventKind.ROUTER_LOST)


def failures_of(rows: Iterable[RouterSums], places: Mapping[datetime, int]) -> dict[str, Failures]:
    """Failed requests by pool and task group, in the order of the steps."""
    found: dict[str, Failures] = defaultdict(lambda: defaultdict(lambda: [None] * len(places)))
    for row in rows:
        if row.requests is None:
            continue
        for group in (row.group, None):
            steps, place = found[row.pool][group], places[row.start]
            known = steps[place] or FailureStep(0, 0)
            steps[place] = FailureStep(known.requests + row.requests, known.failed + (row.failed or 0))
    return dict(found)


def ejections_of(replica_ids: Sequence[int], window: Window) -> dict[int, list[Ejection]]:
    """Ejections of replicas by any router that reach into a window, by replica id, ascending. One query."""
    of_replicas = Q(kind__in=(EventKind.REPLICA_EJECTED, EventKind.REPLICA_READMITTED), replica_id__in=replica_ids)
    events = Event.objects.filter(
        of_replicas | Q(kind__in=ENDS_ALL),
        router__isnull=False,
        at__gt=window.start - OLDEST,
        at__lte=window.end,
        kind__in=(EventKind.REPLICA_EJECTED, EventKind.REPLICA_READMITTED, *ENDS_ALL),
    ).order_by("at", "pk")
    found: dict[int, list[Ejection]] = defaultdict(list)
    going: dict[tuple[int, int], Ejection] = {}  # by replica and router
    rows = events.values_list("kind", "replica_id", "router_id", "router__name", "at", "detail__reason")
    for kind, replica_id, router_id, router, at, reason in rows:
        if kind == EventKind.REPLICA_EJECTED:
            going.setdefault((replica_id, router_id), Ejection(router, at, None, reason or ""))
            continue
        ended = [key for key in going if key[1] == router_id and (kind in ENDS_ALL or key[0] == replica_id)]
        for key in ended:
            began = going.pop(key)
            found[key[0]].append(Ejection(began.router, began.start, at, began.reason))
    for (replica_id, _), began in going.items():
        found[replica_id].append(began)
    return {pk: sorted(ejections, key=lambda one: one.start) for pk, ejections in found.items()}


HOUR, DAY = timedelta(hours=1), timedelta(days=1)
KEPT_HOURS = 16  # answers; each is a few floats for each hour of each pool
TURNS = (EventKind.REPLICA_RESTARTED, EventKind.REPLICA_DOWN, EventKind.REPLICA_UP)
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to load: steps of one length that end at ``until``, ``count`` of them."""

    sources: frozenset[Source]
    step_s: float
    count: int
    until: datetime
    first: datetime | None = None  # the earliest moment that is judged; None: ``until`` alone
    days_back: int = 0
    series_reach_s: float = 0.0  # how far back series of bins go
    keeps_series: bool = False  # whether they are those of the evaluation before, with what came since
    restart_reach_s: float = 0.0  # how long before ``first`` restarts matter
    control: ControlNow | None = None

    @property
    def window(self) -> Window:
        """All steps."""
        return Window(self.until - timedelta(seconds=self.count * self.step_s), self.until, self.step_s)


def load_pasts(pools: Sequence[Pool], wanted: Wanted) -> dict[int, Past]:
    """The past of each pool by its id. Three queries for the replicas, and one for each source (first tokens: four)."""
    fleet = list(
        Replica.objects.filter(pool__in=pools)
        .order_by("name")
        .only("pk", "name", "pool_id", "state", "labels", "created_at")
    )
    loaded = _Loaded(wanted, pools, fleet)
    return {pool.pk: loaded.past_of(pool) for pool in pools}


@dataclass
class _Loaded:
    """Everything that was asked for, of all pools; each source is asked once, when it is first wanted."""

    wanted: Wanted
    pools: Sequence[Pool]
    fleet: Sequence[Replica]

    def __post_init__(self) -> None:
        sources, window = self.wanted.sources, self.wanted.window
        self.ids = [replica.pk for replica in self.fleet]
        self.rated = {replica.pk for replica in hit_rate_replicas(self.fleet)}
        self.names = [pool.name for pool in self.pools]
        self.places = {start: place for place, start in enumerate(window.starts())}
        counted = engine_sums(self.ids, window) if Source.ENGINES in sources else []
        self.cold = self._cold_steps() if Source.ENGINES in sources else set()
        self.starting = self._starting_until() if Source.ENGINES in sources else {}
        self.engines: dict[int, list[ReplicaStep | None]] = self._lists(
            counted, lambda row: row.replica_id, _replica_step
        )
        pressed = pressure_sums(self.ids, window) if Source.PRESSURE in sources else []
        self.pressure = self._lists(
            pressed,
            lambda row: row.replica_id,
            lambda row: PressureStep(row.kv_usage_ratio, row.preemptions, row.waiting),
        )
        answered = router_counts_by_step(self.names, window) if Source.ANSWERS in sources else []
        self.answers = self._lists(answered, lambda row: (row.pool, row.replica), lambda row: row.answers)
        routed = router_sums(self.names, window)[0] if {Source.GROUPS, Source.FAILURES} & sources else []
        self.groups = self._lists(routed, lambda row: (row.pool, row.group), _group_window)
        self.failures = failures_of(routed, self.places)
        self.ejections = ejections_of(self.ids, window) if Source.EJECTIONS in sources else {}
        self.restarts, self.turns = self._turns() if self.wanted.restart_reach_s else ({}, {})
        self.series = self._series() if Source.BINS in sources else {}
        self.first_tokens = self._first_tokens() if Source.FIRST_TOKENS in sources else {}

    def past_of(self, pool: Pool) -> Past:
        """One pool's part. A replica that is disabled by now counts in what the pool did, and is judged no more."""
        everyone = [replica for replica in self.fleet if replica.pool_id == pool.pk]
        mine = [replica for replica in everyone if replica.state != ReplicaState.DISABLED]
        starts = list(self.places)
        groups = {
            group: [step or WindowSum(start, None, None, None) for step, start in zip(steps, starts, strict=True)]
            for (name, group), steps in self.groups.items()
            if name == pool.name
        }
        counted = [replica for replica in everyone if replica.pk in self.rated]
        whole = {"": self._pool_windows(counted)} if Source.ENGINES in self.wanted.sources else {}
        return Past(
            start=self.wanted.window.start,
            step_s=self.wanted.step_s,
            count=self.wanted.count,
            replicas=tuple(replica.name for replica in mine),
            rated=frozenset(replica.name for replica in mine if replica.pk in self.rated),
            active=frozenset(replica.name for replica in mine if replica.state == ReplicaState.ACTIVE),
            starting_until={one.name: self.starting[one.pk] for one in mine if one.pk in self.starting},
            engines={one.name: self.engines[one.pk] for one in mine if one.pk in self.engines},
            pressure={one.name: self.pressure[one.pk] for one in mine if one.pk in self.pressure},
            answers={replica: steps for (name, replica), steps in self.answers.items() if name == pool.name},
            failures=self.failures.get(pool.name, {}),
            ejections={one.name: self.ejections[one.pk] for one in mine if one.pk in self.ejections},
            windows={**(groups if Source.GROUPS in self.wanted.sources else {}), **whole},
            first_tokens={group: steps for (name, group), steps in self.first_tokens.items() if name == pool.name},
            hours=self._hours(pool),
            restarts={one.name: self.restarts[one.pk] for one in mine if one.pk in self.restarts},
            turns={one.name: self.turns[one.pk] for one in everyone if one.pk in self.turns},
            series=self.series.get(pool.pk),
            control=self.wanted.control,
        )

    def _starting_until(self) -> dict[int, datetime]:
        """Until when each replica that was never read is starting. A query where one is young enough."""
        ends = {replica.pk: replica.created_at + timedelta(seconds=STARTING_S) for replica in self.fleet}
        young = {pk: end for pk, end in ends.items() if end > (self.wanted.first or self.wanted.until)}
        if not young:
            return {}
        read = set(
            ScrapeState.objects.filter(replica_id__in=young, ok_at__isnull=False).values_list("replica_id", flat=True)
        )
        return {pk: end for pk, end in young.items() if pk not in read}

    def _series(self) -> dict[int, HitRateSeries]:
        rated: dict[int, list[int]] = defaultdict(list)
        for replica in self.fleet:
            if replica.pk in self.rated:
                rated[replica.pool_id].append(replica.pk)
        first = self.wanted.first or self.wanted.until
        since = first - timedelta(seconds=self.wanted.series_reach_s)
        asked = Asked(self.pools, rated, since, self.wanted.until, self.wanted.step_s)
        return kept_series(asked) if self.wanted.keeps_series else fresh_series(asked)

    def _lists(
        self, rows: Iterable[Any], key: Callable[[Any], Any], value: Callable[[Any], Value]
    ) -> dict[Any, list[Value | None]]:
        """Rows with a ``start`` as one list per key, in the order of the steps."""
        found: dict[Any, list[Value | None]] = defaultdict(lambda: [None] * self.wanted.count)
        for row in rows:
            found[key(row)][self.places[row.start]] = value(row)
        return dict(found)

    def _pool_windows(self, mine: Sequence[Replica]) -> list[WindowSum]:
        """Sums over the pool's replicas (H2), decode replicas left out (H19), and others while cold (H18)."""
        known = [(replica.pk, self.engines[replica.pk]) for replica in mine if replica.pk in self.engines]
        return [
            together(start, [steps[place] for pk, steps in known if (pk, start) not in self.cold])
            for start, place in self.places.items()
        ]

    def _cold_steps(self) -> set[tuple[int, datetime]]:
        """Replica and start of each step that a cold band lies in. A query more where one restarted lately."""
        oldest = self.wanted.window.start - timedelta(seconds=COLD_S)
        lately = ScrapeState.objects.filter(replica_id__in=self.rated, restarted_at__gt=oldest)
        step = timedelta(seconds=self.wanted.step_s)
        return {
            (band.replica_id, start)
            for band in cold_bands(list(lately.values_list("replica_id", flat=True)), self.wanted.window)
            for start in self.places
            if band.touches(start, start + step)
        }

    def _first_tokens(self) -> dict[tuple[str, str], list[Buckets | None]]:
        """By the routers' clock, per task group and for the pool; of a pool without any by the engines' (T1)."""
        parts: dict[tuple[str, str, datetime], list[Buckets]] = defaultdict(list)
        for ((name, group), start), merged in router_ttft(self.names, self.wanted.window, by="group").items():
            parts[name, "", start].append(merged.buckets)
            if group:
                parts[name, group, start].append(merged.buckets)
        seen = {name for name, _, _ in parts}
        of_replica = {replica.pk: self._name_of(replica) for replica in self.fleet}
        quiet = [pk for pk, name in of_replica.items() if name not in seen]
        for (pk, start), merged in engine_ttft(quiet, self.wanted.window, by="replica").items() if quiet else ():
            parts[of_replica[pk], "", start].append(merged.buckets)
        found: dict[tuple[str, str], list[Buckets | None]] = defaultdict(lambda: [None] * self.wanted.count)
        for (name, group, start), buckets in parts.items():
            merged_all = merge(buckets)
            found[name, group][self.places[start]] = merged_all.buckets if merged_all else None
        return dict(found)

    def _turns(self) -> tuple[dict[int, list[datetime]], dict[int, list[datetime]]]:
        """When each replica restarted, and when it went, came back or restarted, ascending. One query."""
        since = (self.wanted.first or self.wanted.until) - timedelta(seconds=self.wanted.restart_reach_s)
        events = Event.objects.filter(kind__in=TURNS, at__gt=since, at__lte=self.wanted.until, replica_id__in=self.ids)
        restarts: dict[int, list[datetime]] = defaultdict(list)
        turns: dict[int, list[datetime]] = defaultdict(list)
        for replica_id, kind, at in events.order_by("at").values_list("replica_id", "kind", "at"):
            turns[replica_id].append(at)
            if kind == EventKind.REPLICA_RESTARTED:
                restarts[replica_id].append(at)
        return dict(restarts), dict(turns)

    def _name_of(self, replica: Replica) -> str:
        return next(pool.name for pool in self.pools if pool.pk == replica.pool_id)

    def _hours(self, pool: Pool) -> dict[str, Mapping[datetime, WindowSum]]:
        """The hours of the days before, of the pool by its engines and of its task groups by the routers."""
        hours = hours_before(self.wanted.first or self.wanted.until, self.wanted.until, self.wanted.days_back)
        found: dict[str, Mapping[datetime, WindowSum]] = {}
        if hours and Source.ENGINE_HOURS in self.wanted.sources:
            places = tuple((replica.pk, replica.pool_id) for replica in self.fleet if replica.pk in self.rated)
            found[""] = engine_hours(places, hours).get(pool.pk, {})
        if hours and Source.GROUP_HOURS in self.wanted.sources:
            found |= group_hours(tuple(self.names), hours).get(pool.name, {})
        return found


def hour_of(at: datetime) -> datetime:
    """Where an hour of UTC begins."""
    return at.astimezone(UTC).replace(minute=0, second=0, microsecond=0)


def hours_before(first: datetime, last: datetime, days: int) -> tuple[datetime, ...]:
    """The whole hours of some days and of ``LOOKED_AT`` hours before a time between two moments, ascending."""
    start = hour_of(first) - DAY * days - HOUR * LOOKED_AT if days else hour_of(last)
    return tuple(start + HOUR * number for number in range(math.floor((hour_of(last) - start) / HOUR)))


@lru_cache(maxsize=KEPT_HOURS)
def engine_hours(
    places: tuple[tuple[int, int], ...], hours: tuple[datetime, ...]
) -> dict[int, dict[datetime, WindowSum]]:
    """Pool id -> hour -> its sums, of (replica, pool) ids; a query for each run of hours.

    Kept: hours that are a day old change no more, and rules ask for the same ones all hour long.
    """
    pool_of, ids = dict(places), [pk for pk, _ in places]
    rows: dict[tuple[int, datetime], list[ReplicaStep | None]] = defaultdict(list)
    for window in _runs(hours) if ids else ():
        for row in engine_sums(ids, window):
            rows[pool_of[row.replica_id], row.start].append(_replica_step(row))
    found: dict[int, dict[datetime, WindowSum]] = defaultdict(dict)
    for (pool_id, start), steps in rows.items():
        found[pool_id][start] = together(start, steps)
    return dict(found)


@lru_cache(maxsize=KEPT_HOURS)
def group_hours(pools: tuple[str, ...], hours: tuple[datetime, ...]) -> dict[str, dict[str, dict[datetime, WindowSum]]]:
    """Pool -> task group -> hour -> its sums; a query for each run of hours. Kept likewise."""
    found: dict[str, dict[str, dict[datetime, WindowSum]]] = defaultdict(lambda: defaultdict(dict))
    for window in _runs(hours):
        for row in router_sums(pools, window)[0]:
            found[row.pool][row.group][row.start] = _group_window(row)
    return {pool: dict(groups) for pool, groups in found.items()}


def _runs(hours: Sequence[datetime]) -> Iterator[Window]:
    """Hours that follow each other, as one window."""
    start = 0
    for place in range(1, len(hours) + 1):
        if place == len(hours) or hours[place] - hours[place - 1] != HOUR:
            yield Window(hours[start], hours[place - 1] + HOUR, HOUR.total_seconds())
            start = place


def _replica_step(row: EngineSums) -> ReplicaStep:
    hits = None if row.hits is None else row.hits + (row.external_hits or 0)
    read = row.covered_s is not None or not row.stale
    return ReplicaStep(row.queries, hits, row.requests, read=read, failed=row.stale)


def _group_window(row: RouterSums) -> WindowSum:
    """A task group's window: tokens of the answers that reported both (H16)."""
    return WindowSum(row.start, row.prompt_tokens, row.cached_tokens, row.requests, row.accounted_ratio)
