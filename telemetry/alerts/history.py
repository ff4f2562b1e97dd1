"""Loads the histories of several pools at once, with few queries for each source that some rule needs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar

from django.conf import settings
from django.db.models import Q

from controlplane.models import ConfigSnapshot, Event, EventKind, Pool, Replica, ReplicaState, Router, TaskGroup
from telemetry.alerts.detection.level import TESTED_HOURS
from telemetry.alerts.history_window import (
    ControlPlaneState,
    DailyRequests,
    Ejection,
    History,
    PressureStep,
    ReplicaStep,
    ScrapedReplica,
    SemanticCacheState,
    ShareStep,
    Source,
    WindowSum,
    sum_replicas,
)
from telemetry.alerts.hit_rate_series import HitRateSeries, SeriesQuery, grid_floor, load_series
from telemetry.metrics.histograms import Buckets, merge
from telemetry.metrics.windows import Window
from telemetry.models import STARTING_S, ScrapeState
from telemetry.storage.dimension_sums import response_cache_sums, router_counts_by_step
from telemetry.storage.replica_facts import COLD_S, cold_bands, hit_rate_replicas
from telemetry.storage.rule_sums import pressure_sums, store_sums, stream_sums
from telemetry.storage.sums import EngineSums, RouterSums, engine_sums, engine_ttft, router_sums, router_ttft

MAX_EJECTION_AGE = timedelta(days=2)  # before the window: an ejection that began earlier is not found
# A router that started again has ejected nothing; a lost router serves no requests.
ENDS_ALL_EJECTIONS = (EventKind.ROUTER_STARTED, EventKind.ROUTER_LOST)
MEMBERSHIP_CHANGES = (EventKind.REPLICA_RESTARTED, EventKind.REPLICA_DOWN, EventKind.REPLICA_UP)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
LOST_FOR = HOUR  # a router that is lost for longer counts as removed if others are present
REPLACED_BEFORE = timedelta(minutes=10)  # a router that joined so long before another one was lost may replace it
KNOWN_INTERVALS = 3  # scrape intervals after which a router's report is out of date
PATTERN_DAYS = 7  # a week, so that a weekend is compared with one
GRID_S = 300.0  # starts of windows of the days before, which are queried once for each
MIN_COVERED_RATIO = 0.9  # of a window that scrapes of routers must cover
CACHED_DAY_QUERIES = 4 * PATTERN_DAYS
CACHED_HOUR_QUERIES = 16  # results; each has a few floats for each hour of each pool
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class HistoryQuery:
    """What to load: ``count`` steps of one length, the last of which ends at ``until``."""

    sources: frozenset[Source]
    step_s: float
    count: int
    until: datetime
    first: datetime | None = None  # end of the first step to evaluate; None: the last step alone
    days_back: int = 0  # of hours
    series_lookback_s: float = 0.0  # length of the series of bins before ``first``
    caches_series: bool = False  # keep the series of bins for the next evaluation
    restart_lookback_s: float = 0.0  # how long before ``first`` restarts matter
    control: ControlPlaneState | None = None

    @property
    def window(self) -> Window:
        return Window(self.until - timedelta(seconds=self.count * self.step_s), self.until, self.step_s)


def load_histories(pools: Sequence[Pool], query: HistoryQuery) -> dict[int, History]:
    """The history of each pool by its id.

    Three queries for the replicas, one for each source (first tokens: four, semantic caches: two).
    """
    fields = ("pk", "name", "pool_id", "state", "labels", "role", "created_at")
    replicas = list(Replica.objects.filter(pool__in=pools).order_by("name").only(*fields))
    loader = _Loader(query, pools, replicas)
    return {pool.pk: loader.history_of(pool) for pool in pools}


def load_control_plane_state(now: datetime, evaluated_at: datetime | None) -> ControlPlaneState:
    """Current state of routers and of the evaluation. Three queries, and one for each router that is behind."""
    newest = ConfigSnapshot.objects.only("number", "sha256").order_by("-number").first()
    every = list(Router.objects.all())
    routers = [router for router in every if router.lost_at is None]
    lost = _lost_routers(every, now)
    behind = [router for router in routers if newest and not router.runs(newest.number, newest.sha256)]
    return ControlPlaneState(
        behind_s={router.name: _behind_s(router, now) for router in behind},
        rejections={router.name: str(router.last_nack.get("reason", "")) for router in behind if router.last_nack},
        routers=len(routers),
        lost=tuple(router.name for router in lost),
        silent_s=min((router.silent_for_s(now) for router in lost), default=0.0),
        peers=_peers(),
        since_evaluation_s=(now - evaluated_at).total_seconds() if evaluated_at else 0.0,
    )


def _peers() -> dict[str, int | None]:
    """Peers of each router that shares its state, as of its last scrape; None if it does not reach the server."""
    sharing = Router.objects.filter(lost_at=None, scrape_state__shared_state__has_key="peers").order_by("name")
    states: list[tuple[str, Any]] = list(sharing.values_list("name", "scrape_state__shared_state"))
    return {name: int(state["peers"]) if "age_s" in state else None for name, state in states}


def _lost_routers(every: Sequence[Router], now: datetime) -> list[Router]:
    """Routers without heartbeat that nothing replaced, the latest first.

    A router that joined at about the time of the loss or later replaces one, as in a rolling update. A router that was
    lost earlier than ``LOST_FOR`` counts as removed, unless no router is left.
    """
    lost = sorted((it for it in every if it.lost_at), key=lambda router: router.last_seen_at, reverse=True)
    if len(lost) == len(every):
        return lost
    recent = [router for router in lost if router.lost_at and router.lost_at > now - LOST_FOR]
    since = min((router.last_seen_at for router in recent), default=now) - REPLACED_BEFORE
    replaced = sum(router.lost_at is None and router.first_seen_at >= since for router in every)
    return recent[: max(len(recent) - replaced, 0)]


def load_scrapes(pools: Sequence[Pool], replicas: Sequence[Replica], now: datetime) -> dict[int, ScrapedReplica]:
    """The last scrape of each replica that failed, by its id; and which routers consider it healthy. Two queries."""
    since = now - timedelta(seconds=KNOWN_INTERVALS * settings.SCRAPE_INTERVAL_S + 1)
    failing = ScrapeState.objects.filter(replica__in=replicas, failures__gt=0)
    states = {pk: (ok_at, reason) for pk, ok_at, reason in failing.values_list("replica", "ok_at", "reason")}
    if not states:
        return {}
    routers = ScrapeState.objects.filter(router__lost_at=None, failures=0, at__gt=since, serving_replicas__isnull=False)
    serving: list[tuple[str, Any]] = list(
        routers.order_by("router__name").values_list("router__name", "serving_replicas")
    )
    name_of_pool = {pool.pk: pool.name for pool in pools}
    return {
        replica.pk: ScrapedReplica(
            ok_at is not None,
            reason,
            tuple(
                name for name, of_pools in serving if replica.name in of_pools.get(name_of_pool[replica.pool_id], ())
            ),
        )
        for replica in replicas
        if replica.pk in states
        for ok_at, reason in (states[replica.pk],)
    }


@lru_cache(maxsize=CACHED_DAY_QUERIES)
def requests_around(pool_names: tuple[str, ...], start: datetime, window_s: float) -> dict[str, float] | None:
    """The fewest requests of each pool in a window that starts within ``window_s`` of ``start``; None if unknown.

    The time around is long enough to be read from rollups, which are kept longer than readings.
    """
    around = timedelta(seconds=window_s)
    window = Window(start - around, start + 2 * around, window_s / 2)
    rows, coverage = router_sums(list(pool_names), window)
    if len({step.start for step in coverage if step.covered_s > 0}) < len(list(window.starts())):
        return None
    steps: dict[str, dict[datetime, float]] = defaultdict(lambda: defaultdict(float))
    for row in rows:
        steps[row.pool][row.start] += row.requests or 0
    starts = list(window.starts())
    return {
        pool: min(steps[pool][first] + steps[pool][second] for first, second in pairwise(starts)) for pool in pool_names
    }


def load_daily_requests(pools: Sequence[Pool], until: datetime, window_s: float) -> dict[str, DailyRequests]:
    """Requests of each pool now and on the days before. One query, and every few minutes one for each day."""
    names = tuple(pool.name for pool in pools)
    window = Window(until - timedelta(seconds=window_s), until, window_s)
    rows, coverage = router_sums(list(names), window)
    is_known = any(step.covered_s >= MIN_COVERED_RATIO * window_s and not step.stale for step in coverage)
    now: dict[str, float] = defaultdict(float)
    for row in rows:
        now[row.pool] += row.requests or 0
    start = grid_floor(window.start, GRID_S)
    days = [requests_around(names, start - DAY * back, window_s) for back in range(1, PATTERN_DAYS + 1)]
    return {
        name: DailyRequests(now[name] if is_known else None, [None if day is None else day[name] for day in days])
        for name in names
    }


def load_semantic_caches(pools: Sequence[Pool]) -> dict[tuple[str, str], SemanticCacheState]:
    """The semantic caches that routers reported at their last scrape, by pool name and task group. Two queries."""
    groups = TaskGroup.objects.filter(pool__in=pools, semantic_cache__isnull=False).select_related("pool")
    settings = {(group.pool.name, group.name): group.semantic_cache or {} for group in groups}
    if not settings:
        return {}
    scraped = Router.objects.filter(lost_at=None, scrape_state__semantic_caches__isnull=False).order_by("name")
    routers: list[tuple[str, Any]] = list(scraped.values_list("name", "scrape_state__semantic_caches"))
    found = {
        (pool, group): {name: caches[pool][group] for name, caches in routers if group in caches.get(pool, {})}
        for pool, group in settings
    }
    return {key: _semantic_cache(settings[key]["min_precision"], of) for key, of in found.items() if of}


def _semantic_cache(min_precision: float, routers: Mapping[str, Mapping[str, Any]]) -> SemanticCacheState:
    known = [cache["recent_precision"] for cache in routers.values() if "recent_precision" in cache]
    return SemanticCacheState(
        min_precision,
        min(known, default=None),
        max(cache.get("window_checks", 0.0) for cache in routers.values()),
        tuple(name for name, cache in routers.items() if cache.get("states", {}).get("stopped")),
    )


def _behind_s(router: Router, now: datetime) -> float:
    """Seconds since the oldest configuration that a present router should run and does not."""
    newer = ConfigSnapshot.objects.filter(number__gt=router.running_number or 0).order_by("number")
    created_at = newer.values_list("created_at", flat=True).first() or now
    return max((now - max(created_at, router.first_seen_at)).total_seconds(), 0.0)


@dataclass
class _Loader:
    """The rows of all pools by source."""

    query: HistoryQuery
    pools: Sequence[Pool]
    replicas: Sequence[Replica]

    def __post_init__(self) -> None:
        sources, window = self.query.sources, self.query.window
        self.ids = [replica.pk for replica in self.replicas]
        self.hit_rate_ids = {replica.pk for replica in hit_rate_replicas(self.replicas)}
        self.pool_names = [pool.name for pool in self.pools]
        self.index = {start: index for index, start in enumerate(window.starts())}
        has_engines = Source.ENGINES in sources
        self.engines = self._steps(
            engine_sums(self.ids, window) if has_engines else (), lambda row: row.replica_id, _replica_step
        )
        self.cold = self._cold_steps() if has_engines else set()
        self.starting_until = self._starting_until() if has_engines else {}
        self.pressure = self._steps(
            pressure_sums(self.ids, window) if Source.PRESSURE in sources else (),
            lambda row: row.replica_id,
            lambda row: PressureStep(row.kv_usage_ratio, row.preemptions, row.waiting),
        )
        self.responses = self._steps(
            router_counts_by_step(self.pool_names, window) if Source.RESPONSES in sources else (),
            lambda row: (row.pool, row.replica),
            lambda row: row.responses,
        )
        rows = router_sums(self.pool_names, window)[0] if {Source.GROUPS, Source.FAILURES} & sources else []
        self.groups = self._steps(rows, lambda row: (row.pool, row.group), _group_window)
        counted = ((row, row.requests) for row in rows if row.requests is not None)
        self.failures = self._shares(
            (row.pool, row.group, row.start, ShareStep(requests, row.failed or 0)) for row, requests in counted
        )
        self.streams = self._steps(
            stream_sums(self.pool_names, window) if Source.STREAMS in sources else (),
            lambda row: (row.pool, row.failed_replica),
            lambda row: row.streams,
        )
        self.scrapes = load_scrapes(self.pools, self.replicas, self.query.until) if Source.SCRAPES in sources else {}
        has_days = Source.DAYS in sources and self.pools
        self.requests = load_daily_requests(self.pools, window.end, self.query.step_s) if has_days else {}
        self.ejections = load_ejections(self.ids, window) if Source.EJECTIONS in sources else {}
        self.changes = self._membership_changes() if self.query.restart_lookback_s else {}
        self.series = self._series() if Source.BINS in sources else {}
        self.first_tokens = self._first_tokens() if Source.FIRST_TOKENS in sources else {}
        self.cached_pools = self._cached_pools() if {Source.CACHE_REQUESTS, Source.CACHE_STORE} & sources else set()
        self.cache_requests = self._shares(self._cache_requests()) if Source.CACHE_REQUESTS in sources else {}
        self.cache_stores = self._steps(
            store_sums(window) if Source.CACHE_STORE in sources and self.cached_pools else (),
            lambda row: row.router,
            lambda row: row.down_ratio,
        )
        self.semantic_caches = load_semantic_caches(self.pools) if Source.SEMANTIC_CACHES in sources else {}

    def history_of(self, pool: Pool) -> History:
        """One pool's history. A disabled replica is part of the pool's sums, but is not evaluated itself."""
        all_replicas = [replica for replica in self.replicas if replica.pool_id == pool.pk]
        enabled = [replica for replica in all_replicas if replica.state != ReplicaState.DISABLED]
        windows: dict[str, list[WindowSum]] = {}
        if Source.GROUPS in self.query.sources:
            for group, steps in _of_pool(self.groups, pool).items():
                steps_and_starts = zip(steps, self.index, strict=True)
                windows[group] = [step or WindowSum(start, None, None, None) for step, start in steps_and_starts]
        if Source.ENGINES in self.query.sources:
            windows[""] = self._pool_windows(
                [replica.pk for replica in all_replicas if replica.pk in self.hit_rate_ids]
            )
        return History(
            start=self.query.window.start,
            step_s=self.query.step_s,
            count=self.query.count,
            replicas=tuple(replica.name for replica in enabled),
            hit_rate_replicas=frozenset(replica.name for replica in enabled if replica.pk in self.hit_rate_ids),
            active=frozenset(replica.name for replica in enabled if replica.state == ReplicaState.ACTIVE),
            starting_until=_by_name(enabled, self.starting_until),
            engines=_by_name(enabled, self.engines),
            pressure=_by_name(enabled, self.pressure),
            responses=_of_pool(self.responses, pool),
            failures=_of_pool(self.failures, pool),
            streams=_of_pool(self.streams, pool),
            ejections=_by_name(enabled, self.ejections),
            scrapes=_by_name(enabled, self.scrapes),
            requests=self.requests.get(pool.name),
            windows=windows,
            first_tokens=_of_pool(self.first_tokens, pool),
            hours=self._hours(pool),
            membership_changes=_by_name(all_replicas, self.changes),
            series=self.series.get(pool.pk),
            has_response_cache=pool.pk in self.cached_pools,
            cache_requests=_of_pool(self.cache_requests, pool),
            cache_stores=self.cache_stores,
            control=self.query.control,
            semantic_caches=_of_pool(self.semantic_caches, pool),
        )

    @property
    def _first_end(self) -> datetime:
        """End of the first evaluated window."""
        return self.query.first or self.query.until

    def _steps(
        self, rows: Iterable[Any], key: Callable[[Any], Any], value: Callable[[Any], Value]
    ) -> dict[Any, list[Value | None]]:
        """Rows with a ``start`` as one list per key, in the order of the steps."""
        steps: dict[Any, list[Value | None]] = defaultdict(lambda: [None] * self.query.count)
        for row in rows:
            steps[key(row)][self.index[row.start]] = value(row)
        return dict(steps)

    def _shares(
        self, rows: Iterable[tuple[str, str, datetime, ShareStep]]
    ) -> dict[tuple[str, str | None], list[ShareStep | None]]:
        """Rows of (pool name, task group, start, step) by pool and task group (None: the whole pool)."""
        shares: dict[tuple[str, str | None], list[ShareStep | None]] = defaultdict(lambda: [None] * self.query.count)
        for pool, name, start, step in rows:
            for group in (name, None):
                steps, index = shares[pool, group], self.index[start]
                before = steps[index] or ShareStep(0, 0)
                steps[index] = ShareStep(before.requests + step.requests, before.part + step.part)
        return shares

    def _cached_pools(self) -> set[int]:
        """The ids of the pools that have a task group with a response cache. One query."""
        groups = TaskGroup.objects.filter(pool__in=self.pools, response_cache__isnull=False)
        return set(groups.values_list("pool_id", flat=True))

    def _cache_requests(self) -> Iterator[tuple[str, str, datetime, ShareStep]]:
        """Hits among cacheable requests. No query without response caches."""
        names = [pool.name for pool in self.pools if pool.pk in self.cached_pools]
        for row in response_cache_sums(names, self.query.window, by_group=True) if names else ():
            hits, misses = row.get("cache_hits") or 0, row.get("cache_misses") or 0
            yield row.key[0], row.key[1], row.start, ShareStep(hits + misses, hits)

    def _starting_until(self) -> dict[int, datetime]:
        """When each replica that was added recently counts as down if no scrape succeeded until then."""
        ends = {replica.pk: replica.created_at + timedelta(seconds=STARTING_S) for replica in self.replicas}
        return {pk: end for pk, end in ends.items() if end > self._first_end}

    def _series(self) -> dict[int, HitRateSeries]:
        ids_of_pool: dict[int, list[int]] = defaultdict(list)
        for replica in self.replicas:
            if replica.pk in self.hit_rate_ids:
                ids_of_pool[replica.pool_id].append(replica.pk)
        start = grid_floor(self._first_end - timedelta(seconds=self.query.series_lookback_s), self.query.step_s)
        through = grid_floor(self.query.until, self.query.step_s)
        query = SeriesQuery(self.pools, ids_of_pool, start, through, self.query.step_s)
        return load_series(query, cached=self.query.caches_series)

    def _pool_windows(self, replica_ids: Sequence[int]) -> list[WindowSum]:
        """Sums over the pool's replicas without decode replicas and replicas while they are cold."""
        engines = [(pk, self.engines[pk]) for pk in replica_ids if pk in self.engines]
        return [
            sum_replicas(start, [steps[index] for pk, steps in engines if (pk, start) not in self.cold])
            for start, index in self.index.items()
        ]

    def _cold_steps(self) -> set[tuple[int, datetime]]:
        """(replica, start) of each step that overlaps a cold band. One more query where a replica restarted."""
        oldest = self.query.window.start - timedelta(seconds=COLD_S)
        restarted = ScrapeState.objects.filter(replica_id__in=self.hit_rate_ids, restarted_at__gt=oldest)
        bands = cold_bands(list(restarted.values_list("replica_id", flat=True)), self.query.window)
        step = timedelta(seconds=self.query.step_s)
        return {(band.replica_id, start) for band in bands for start in self.index if band.touches(start, start + step)}

    def _first_tokens(self) -> dict[tuple[str, str], list[Buckets | None]]:
        """TTFT per task group and pool (""), by the routers' clock; a pool without any has the engines' TTFT."""
        parts: dict[tuple[str, str, datetime], list[Buckets]] = defaultdict(list)
        for ((pool, group), start), merged in router_ttft(self.pool_names, self.query.window, by="group").items():
            for name in {group, ""}:
                parts[pool, name, start].append(merged.buckets)
        routed = {pool for pool, _, _ in parts}
        name_of_pool = {pool.pk: pool.name for pool in self.pools}
        pool_of = {replica.pk: name_of_pool[replica.pool_id] for replica in self.replicas}
        unrouted = [pk for pk, pool in pool_of.items() if pool not in routed]
        for (pk, start), merged in engine_ttft(unrouted, self.query.window, by="replica").items() if unrouted else ():
            parts[pool_of[pk], "", start].append(merged.buckets)
        steps: dict[tuple[str, str], list[Buckets | None]] = defaultdict(lambda: [None] * self.query.count)
        for (pool, group, start), buckets in parts.items():
            total = merge(buckets)
            steps[pool, group][self.index[start]] = total.buckets if total else None
        return steps

    def _membership_changes(self) -> dict[int, list[datetime]]:
        """Times at which each replica went down, came up or restarted, ascending. One query."""
        since = self._first_end - timedelta(seconds=self.query.restart_lookback_s)
        events = Event.objects.filter(
            kind__in=MEMBERSHIP_CHANGES, at__gt=since, at__lte=self.query.until, replica_id__in=self.ids
        )
        changes: dict[int, list[datetime]] = defaultdict(list)
        for replica_id, at in events.order_by("at").values_list("replica_id", "at"):
            changes[replica_id].append(at)
        return changes

    def _hours(self, pool: Pool) -> dict[str, Mapping[datetime, WindowSum]]:
        """Hourly sums of previous days: the pool's from engine counters, its task groups' from router counters."""
        hours = hours_before(self._first_end, self.query.until, self.query.days_back)
        by_group: dict[str, Mapping[datetime, WindowSum]] = {}
        if hours and Source.ENGINE_HOURS in self.query.sources:
            owners = tuple(
                (replica.pk, replica.pool_id) for replica in self.replicas if replica.pk in self.hit_rate_ids
            )
            by_group[""] = engine_hours(owners, hours).get(pool.pk, {})
        if hours and Source.GROUP_HOURS in self.query.sources:
            by_group |= group_hours(tuple(self.pool_names), hours).get(pool.name, {})
        return by_group


def _by_name(replicas: Iterable[Replica], values: Mapping[int, Value]) -> dict[str, Value]:
    return {replica.name: values[replica.pk] for replica in replicas if replica.pk in values}


def _of_pool(values: Mapping[tuple[str, Any], Value], pool: Pool) -> dict[Any, Value]:
    return {key: value for (name, key), value in values.items() if name == pool.name}


def load_ejections(replica_ids: Sequence[int], window: Window) -> dict[int, list[Ejection]]:
    """Ejections of replicas by any router that overlap a window, by replica id, ascending. One query."""
    kinds = (EventKind.REPLICA_EJECTED, EventKind.REPLICA_READMITTED)
    events = Event.objects.filter(
        Q(kind__in=kinds, replica_id__in=replica_ids) | Q(kind__in=ENDS_ALL_EJECTIONS),
        kind__in=(*kinds, *ENDS_ALL_EJECTIONS),  # for the index
        router__isnull=False,
        at__gt=window.start - MAX_EJECTION_AGE,
        at__lte=window.end,
    ).order_by("at", "pk")
    ejections: dict[int, list[Ejection]] = defaultdict(list)
    current: dict[tuple[int, int], Ejection] = {}  # by replica and router
    rows = events.values_list("kind", "replica_id", "router_id", "router__name", "at", "detail__reason")
    for kind, replica_id, router_id, router, at, reason in rows:
        if kind == EventKind.REPLICA_EJECTED:
            current.setdefault((replica_id, router_id), Ejection(router, at, None, reason or ""))
            continue
        ended = [key for key in current if key[1] == router_id and (kind in ENDS_ALL_EJECTIONS or key[0] == replica_id)]
        for key in ended:
            ejection = current.pop(key)
            ejections[key[0]].append(Ejection(ejection.router, ejection.start, at, ejection.reason))
    for (replica_id, _), ejection in current.items():
        ejections[replica_id].append(ejection)
    return {pk: sorted(of_replica, key=lambda ejection: ejection.start) for pk, of_replica in ejections.items()}


def _hour_of(at: datetime) -> datetime:
    return at.astimezone(UTC).replace(minute=0, second=0, microsecond=0)


def hours_before(first: datetime, last: datetime, days: int) -> tuple[datetime, ...]:
    """Starts of whole hours, ascending: from ``days`` days plus ``TESTED_HOURS`` before ``first``, until ``last``."""
    start = _hour_of(first) - DAY * days - HOUR * TESTED_HOURS if days else _hour_of(last)
    return tuple(start + HOUR * number for number in range(math.floor((_hour_of(last) - start) / HOUR)))


@lru_cache(maxsize=CACHED_HOUR_QUERIES)
def engine_hours(
    owners: tuple[tuple[int, int], ...], hours: tuple[datetime, ...]
) -> dict[int, dict[datetime, WindowSum]]:
    """Pool id -> hour -> sum of its replicas, given as (replica, pool) ids. A query for each run of hours.

    Cached: an hour that is over does not change, and rules compare the same hours all hour long.
    """
    pool_of, ids = dict(owners), [pk for pk, _ in owners]
    rows: dict[tuple[int, datetime], list[ReplicaStep | None]] = defaultdict(list)
    for window in _runs(hours) if ids else ():
        for row in engine_sums(ids, window):
            rows[pool_of[row.replica_id], row.start].append(_replica_step(row))
    sums: dict[int, dict[datetime, WindowSum]] = defaultdict(dict)
    for (pool_id, start), steps in rows.items():
        sums[pool_id][start] = sum_replicas(start, steps)
    return sums


@lru_cache(maxsize=CACHED_HOUR_QUERIES)
def group_hours(pools: tuple[str, ...], hours: tuple[datetime, ...]) -> dict[str, dict[str, dict[datetime, WindowSum]]]:
    """Pool -> task group -> hour -> its sum. A query for each run of hours; cached like ``engine_hours``."""
    sums: dict[str, dict[str, dict[datetime, WindowSum]]] = defaultdict(lambda: defaultdict(dict))
    for window in _runs(hours):
        for row in router_sums(pools, window)[0]:
            sums[row.pool][row.group][row.start] = _group_window(row)
    return sums


def _runs(hours: Sequence[datetime]) -> Iterator[Window]:
    """Consecutive hours as one window."""
    start = 0
    for end in range(1, len(hours) + 1):
        if end == len(hours) or hours[end] - hours[end - 1] != HOUR:
            yield Window(hours[start], hours[end - 1] + HOUR, HOUR.total_seconds())
            start = end


def _replica_step(row: EngineSums) -> ReplicaStep:
    hits = None if row.hits is None else row.hits + (row.external_hits or 0)
    is_read = row.covered_s is not None or not row.stale
    return ReplicaStep(row.queries, hits, row.requests, read=is_read, failed=row.stale)


def _group_window(row: RouterSums) -> WindowSum:
    """A task group's window: tokens of the responses that reported both counts."""
    return WindowSum(row.start, row.prompt_tokens, row.cached_tokens, row.requests, row.accounted_ratio)
