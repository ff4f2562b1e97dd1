"""Figures of the overview (fleet tiles, rows of replicas and task groups), health of scrape targets, and the subject
(fleet, pool, task group or replica) that pages query figures of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from functools import cached_property, partial
from typing import Any, TypeVar

from django.conf import settings
from django.utils import timezone

from controlplane.models import Pool, Replica, ReplicaState, TaskGroup
from telemetry.metrics.histograms import Merged, quantile
from telemetry.metrics.rates import hit_rate_ratio, ratio, sum_known
from telemetry.metrics.windows import FleetTiles, GroupRow, PointState, ReachableShare, ReplicaRow, Window
from telemetry.models import STARTING_S, Health, ScrapeState
from telemetry.storage import sums
from telemetry.storage.reachable import reachable_by_group, reachable_share
from telemetry.storage.replica_facts import COLD_S, is_decode, removed_replicas

T = TypeVar("T")
NON_STREAMED = partial(sums.router_latency, streamed=False)

NOT_ATTEMPTED = "no recent scrape attempt"
SILENT_INTERVALS = 3  # scrape intervals without an attempt: the scraper itself is down, and gauges are not current


@dataclass(frozen=True, slots=True)
class TargetHealth:
    """``up``, ``starting``, ``down``, ``stale``, ``cold`` or ``unknown``; ``reason`` is "" for ``up``."""

    status: str
    reason: str = ""

    @property
    def is_serving(self) -> bool:
        """Whether the target serves requests, as far as known."""
        return self.status in {"up", "cold"}


def health_of(state: ScrapeState | None, now: datetime, *, added_at: datetime | None = None) -> TargetHealth:
    """Health by the last scrape. A target not yet scraped successfully starts for ``STARTING_S`` after ``added_at``."""
    if state is None:
        return TargetHealth("unknown", "not scraped yet")
    if (now - state.at).total_seconds() > SILENT_INTERVALS * settings.SCRAPE_INTERVAL_S + 1:
        return TargetHealth("stale", NOT_ATTEMPTED)
    if state.ok_at is None and state.failures and added_at is not None:
        left_s = STARTING_S - (now - added_at).total_seconds()
        if left_s > 0:
            return TargetHealth("starting", f"{state.reason}; counts as down in {math.ceil(left_s / 60)} min")
    if state.health == Health.DOWN:
        return TargetHealth("down", state.reason)
    if state.failures:
        return TargetHealth("stale", state.reason)
    if state.asleep:
        return TargetHealth("cold", "the engine is asleep")
    if state.lacks_prefix_cache:
        return TargetHealth("cold", "prefix caching is off")
    if state.restarted_at is not None and (now - state.restarted_at).total_seconds() < COLD_S:
        return TargetHealth("cold", "recently restarted")
    return TargetHealth("up") if state.ok_at is not None else TargetHealth("unknown", "not scraped yet")


def timed_ratio(ttft: Merged | None, non_streamed: Merged | None) -> float | None:
    """Responses with TTFT timed by routers / all responses; None without responses."""
    timed, untimed = (part.buckets.total if part else 0 for part in (ttft, non_streamed))
    return timed / (timed + untimed) if timed + untimed else None


def timed_note(ttft: Iterable[Merged], non_streamed: Iterable[Merged]) -> str:
    """Text about the responses that a TTFT of routers covers; "" if that is all of them, or none."""
    ratio = timed_ratio(sums.merge_histograms(ttft), sums.merge_histograms(non_streamed))
    return "" if ratio is None or ratio == 1 else f"Of streamed responses: {ratio:.0%} of all."


def share_of_responses(part: Iterable[Merged], whole: Iterable[Merged]) -> float | None:
    """Responses in some histograms / in all, at most 1; None without responses."""
    merged_part, merged_whole = sums.merge_histograms(part), sums.merge_histograms(whole)
    total = merged_whole.buckets.total if merged_whole else 0
    return min(1.0, (merged_part.buckets.total if merged_part else 0) / total) if total else None


def quantile_s(merged: Merged | None, q: float) -> float | None:
    """A quantile in seconds; None for no observations."""
    found = quantile(merged.buckets, q) if merged else None
    return found.value if found else None


Pools = Sequence[Pool] | None  # None: all pools


class Fleet:
    """What the figures of one page are computed from: each query runs once, when a figure first needs it."""

    def __init__(self, subject: Subject, since: datetime | None = None) -> None:
        """``since``: the earliest start of the windows; None: figures are of the replicas that exist."""
        self.subject, self._since = subject, since
        self._known: dict[Hashable, Any] = {}

    def _once(self, read: Callable[..., T], selected: Any, *times: Window | datetime, **options: Any) -> T:
        if (read, times) not in self._known:
            self._known[read, times] = read(selected, *times, **options)
        found: T = self._known[read, times]
        return found

    @cached_property
    def replicas(self) -> list[Replica]:
        return self.subject.replicas()

    @cached_property
    def removed(self) -> list[Replica]:
        """Replicas that were removed from its pools since."""
        if self.subject.replica is not None or self._since is None:
            return []
        return removed_replicas(self._since, self.subject.pools)

    @cached_property
    def states(self) -> dict[int, ScrapeState]:
        """The state of the scrapes of each replica, by its id."""
        states = ScrapeState.objects.filter(replica__in=self.replicas).defer("raw_counters")
        return {state.replica_id: state for state in states if state.replica_id is not None}

    @cached_property
    def counted_ids(self) -> list[int]:
        """Ids of the replicas whose counters make the hit rate of pools, also of those removed since."""
        roles = {pk: state.role for pk, state in self.states.items()}
        every = (*self.replicas, *self.removed)
        return [replica.pk for replica in every if not is_decode(replica, roles.get(replica.pk, ""))]

    def engine_sums(self, window: Window) -> dict[int, sums.EngineSums]:
        """By the replica's id, also of those removed since."""
        ids = [replica.pk for replica in (*self.replicas, *self.removed)]
        return {row.replica_id: row for row in self._once(sums.engine_sums, ids, window, whole=True)}

    def gauges(self, at: datetime) -> dict[int, sums.Gauges]:
        """The gauges that are current at a time, by the replica's id."""
        since = at - timedelta(seconds=SILENT_INTERVALS * settings.SCRAPE_INTERVAL_S + 1)
        return self._once(sums.newest_gauges, [replica.pk for replica in self.replicas], since, at)

    def router_sums(self, window: Window) -> tuple[list[sums.RouterSums], list[sums.Coverage]]:
        return self._once(sums.router_sums, self.subject.pool_names(), window, whole=True)

    def by_group(self, read: Callable[..., sums.Histograms], window: Window) -> dict[tuple[str, str], Merged]:
        """Histograms of routers by pool and task group."""
        found = self._once(read, self.subject.pool_names(), window, by="group", whole=True)
        return {key: merged for (key, _), merged in found.items()}


def fleet_tiles(fleet: Fleet, window: Window) -> FleetTiles:
    """The fleet's figures over a window; gauges and replicas up are as of its end. At most 10 queries."""
    ids = [replica.pk for replica in fleet.replicas if replica.state != ReplicaState.DISABLED]
    states, engine, newest = fleet.states, fleet.engine_sums(window), fleet.gauges(window.end)
    routed, coverage = fleet.router_sums(window)
    gauges = [newest[pk] for pk in ids if pk in newest]
    source, ttft = _ttft(fleet, ids, window)
    non_streamed = sums.merge_histograms(fleet.by_group(NON_STREAMED, window).values())
    hit_rate_rows = [engine[pk] for pk in fleet.counted_ids if pk in engine]
    queries = sum_known(row.queries for row in hit_rate_rows)
    now = timezone.now()
    return FleetTiles(
        hit_rate_ratio=hit_rate_ratio(
            queries, sum_known(row.hits for row in hit_rate_rows), sum_known(row.external_hits for row in hit_rate_rows)
        ),
        hit_rate_state=sums.combined_state(hit_rate_rows),
        reachable=reachable_share(fleet.subject.pool_names(), window),
        ttft_p50_s=quantile_s(ttft, 0.5),
        ttft_p95_s=quantile_s(ttft, 0.95),
        ttft_source=source,
        ttft_timed_ratio=1.0 if source == "engine" else timed_ratio(ttft, non_streamed),
        plain_p50_s=quantile_s(non_streamed, 0.5),
        plain_p95_s=quantile_s(non_streamed, 0.95),
        requests_per_s=_requests_per_s(routed, coverage, [engine[pk] for pk in ids if pk in engine]),
        waiting=sum_known(gauge.waiting for gauge in gauges),
        replicas_up=_replicas_up([health_of(states.get(pk), now) for pk in ids]),
        replicas_total=len(ids),
        read_at=max((state.ok_at for state in states.values() if state.ok_at), default=None),
    )


@dataclass(frozen=True, slots=True)
class Change:
    """How figures differ from those of the period before; None where either is unknown."""

    hit_rate: float | None  # difference
    ttft_p50: float | None  # factor, by the same clock
    ttft_p95: float | None


def before(window: Window) -> Window:
    """The period of the same length before a window, as one step."""
    length = window.end - window.start
    return Window(window.start - length, window.start, length.total_seconds())


def change_of(tiles: FleetTiles, fleet: Fleet, period: Window) -> Change:
    """The tiles against those of the period before. At most three queries."""
    rows = sums.hit_sums_by_set([fleet.counted_ids], period)
    rate = next((hit_rate_ratio(row.queries, row.hits, row.external_hits) for row in rows), None)
    if tiles.ttft_source == "engine":
        histograms = sums.engine_ttft(fleet.counted_ids, period, whole=True)
    else:
        histograms = sums.router_ttft(fleet.subject.pool_names(), period, whole=True)
    ttft = sums.merge_histograms(histograms.values())
    return Change(
        None if rate is None or tiles.hit_rate_ratio is None else tiles.hit_rate_ratio - rate,
        ratio(tiles.ttft_p50_s, quantile_s(ttft, 0.5)),
        ratio(tiles.ttft_p95_s, quantile_s(ttft, 0.95)),
    )


def _replicas_up(healths: Sequence[TargetHealth]) -> int | None:
    """Replicas that serve requests; None if there was no scrape attempt that could tell."""
    known = [health for health in healths if health.status != "unknown" and health.reason != NOT_ATTEMPTED]
    return sum(health.is_serving for health in known) if known else None


def replica_rows(fleet: Fleet, window: Window) -> list[ReplicaRow]:
    """One row per replica, including disabled ones, in the same order, without TTFT. At most 5 queries."""
    states, engine, gauges = fleet.states, fleet.engine_sums(window), fleet.gauges(window.end)
    now = timezone.now()
    return [
        _replica_row(
            replica,
            _health(replica, states.get(replica.pk), now),
            engine=engine.get(replica.pk),
            gauges=gauges.get(replica.pk, sums.Gauges(None, None, None)),
            state=states.get(replica.pk),
        )
        for replica in fleet.replicas
    ]


def with_ttft(rows: Sequence[ReplicaRow], replicas: Iterable[Replica], window: Window) -> list[ReplicaRow]:
    """The rows with TTFT quantiles. Two queries, of which one takes longer than all others of a large fleet."""
    names = {row.name for row in rows}
    ids = {replica.pk: replica.name for replica in replicas if replica.name in names}
    histograms = sums.engine_ttft(list(ids), window, by="replica", whole=True)
    ttft = {ids[pk]: (quantile_s(merged, 0.5), quantile_s(merged, 0.95)) for (pk, _), merged in histograms.items()}
    pairs = ((row, *ttft.get(row.name, (None, None))) for row in rows)
    return [replace(row, ttft_p50_s=p50_s, ttft_p95_s=p95_s) for row, p50_s, p95_s in pairs]


HEALTHS = ("down", "stale", "unknown", "starting", "cold", "up")  # the worst first
_LEVELS = 10  # of the hit rate: rows of about the same rate keep their order from refresh to refresh


def worst_first(rows: Iterable[ReplicaRow]) -> list[ReplicaRow]:
    """Rows by health, then by level of the hit rate, lowest first, then as before. Disabled replicas come last."""
    return sorted(rows, key=_badness)


def _badness(row: ReplicaRow) -> tuple[bool, int, int]:
    level = _LEVELS + 1 if row.hit_rate_ratio is None else int(row.hit_rate_ratio * _LEVELS)
    return row.state == ReplicaState.DISABLED, HEALTHS.index(row.health), level


def _hit_rate_state(engine: sums.EngineSums | None, state: ScrapeState | None) -> PointState:
    """Without prefix caching vLLM counts no queries whatever it serves."""
    if engine is None:
        return PointState.UNKNOWN
    if engine.state is PointState.NO_TRAFFIC and state is not None and state.lacks_prefix_cache:
        return PointState.NOT_REPORTED
    return engine.state


def _replica_row(
    replica: Replica,
    health: TargetHealth,
    *,
    engine: sums.EngineSums | None,
    gauges: sums.Gauges,
    state: ScrapeState | None,
) -> ReplicaRow:
    return ReplicaRow(
        name=replica.name,
        pool=replica.pool.name,
        state=replica.state,
        health=health.status,
        reason=health.reason,
        hit_rate_ratio=hit_rate_ratio(engine.queries, engine.hits, engine.external_hits) if engine else None,
        hit_rate_state=_hit_rate_state(engine, state),
        running=gauges.running,
        waiting=gauges.waiting,
        kv_usage_ratio=gauges.kv_usage_ratio,
        requests_per_s=ratio(engine.finished, engine.covered_s) if engine else None,
        prompt_tokens_per_s=ratio(engine.prompt_tokens, engine.covered_s) if engine else None,
    )


def group_rows(fleet: Fleet, window: Window) -> list[GroupRow]:
    """One row per task group that exists or had requests, by pool and name, from router metrics. At most 5 queries."""
    ttft, latency = fleet.by_group(sums.router_ttft, window), fleet.by_group(NON_STREAMED, window)
    pools = fleet.subject.pools
    routed, coverage = fleet.router_sums(window)
    groups = TaskGroup.objects.values_list("pool__name", "name")
    routed_by_group = {(row.pool, row.group): row for row in routed}
    names = set(groups if pools is None else groups.filter(pool__in=pools)) | set(routed_by_group)
    reachable = reachable_by_group(fleet.subject.pool_names(), window)
    return [
        _group_row(
            name,
            routed_by_group.get(name),
            ttft.get(name),
            latency.get(name),
            coverage=coverage,
            reachable=reachable.get(name),
        )
        for name in sorted(names)
    ]


def _group_row(
    name: tuple[str, str],
    row: sums.RouterSums | None,
    ttft: Merged | None,
    non_streamed: Merged | None,
    *,
    coverage: list[sums.Coverage],
    reachable: ReachableShare | None,
) -> GroupRow:
    return GroupRow(
        name=name[1],
        pool=name[0],
        hit_rate_ratio=ratio(row.cached_tokens, row.prompt_tokens) if row else None,
        hit_rate_state=group_state(row, coverage[0] if coverage else None),
        reachable=reachable,
        ttft_p50_s=quantile_s(ttft, 0.5),
        ttft_p95_s=quantile_s(ttft, 0.95),
        ttft_timed_ratio=timed_ratio(ttft, non_streamed),
        plain_p50_s=quantile_s(non_streamed, 0.5),
        plain_p95_s=quantile_s(non_streamed, 0.95),
        requests_per_s=sums.per_second(row.requests if row else None, coverage),
        prompt_tokens_per_s=sums.per_second(row.prompt_tokens if row else None, coverage),
        failed_ratio=ratio(row.failed, row.requests) if row else None,
        rejected_ratio=ratio(row.client_error_requests, row.requests) if row else None,
        accounted_ratio=row.accounted_ratio if row else None,
    )


def group_state(row: sums.RouterSums | None, coverage: sums.Coverage | None) -> PointState:
    """State of a task group's hit rate in one step; without traffic there are no readings, so coverage decides."""
    if row is not None and row.prompt_tokens:
        return PointState.OK
    if row is not None and row.requests:
        return PointState.UNKNOWN  # responses without usage: not reported
    if coverage is None:
        return PointState.UNKNOWN
    if coverage.covered_s > 0:
        return PointState.NO_TRAFFIC
    return PointState.STALE if coverage.stale else PointState.UNKNOWN


def _health(replica: Replica, state: ScrapeState | None, now: datetime) -> TargetHealth:
    if replica.state == ReplicaState.DISABLED:
        return TargetHealth("unknown", "disabled: not scraped")
    return health_of(state, now, added_at=replica.created_at)


def pool_names(pools: Pools) -> list[str] | None:
    return None if pools is None else [pool.name for pool in pools]


def _ttft(fleet: Fleet, replica_ids: list[int], window: Window) -> tuple[str | None, Merged | None]:
    """(clock, histogram): of the routers if they observed requests, else of the engines."""
    routed = sums.merge_histograms(fleet.by_group(sums.router_ttft, window).values())
    if routed is not None:
        return "router", routed
    engine = sums.merge_histograms(sums.engine_ttft(replica_ids, window, whole=True).values())
    return ("engine", engine) if engine is not None else (None, None)


def _requests_per_s(
    routed: list[sums.RouterSums], coverage: list[sums.Coverage], engine: list[sums.EngineSums]
) -> float | None:
    """From routers if they were scraped, else from the engines' finished requests."""
    if any(step.covered_s for step in coverage):
        return sums.per_second(sum_known(row.requests for row in routed), coverage)
    rates = [rate for row in engine if (rate := ratio(row.finished, row.covered_s)) is not None]
    return sum(rates) if rates else None


class Kind(StrEnum):
    """Kind of a subject."""

    FLEET = "fleet"
    POOL = "pool"
    GROUP = "group"
    REPLICA = "replica"


@dataclass(frozen=True, slots=True)
class Subject:
    """What figures are of: pools (None: all), narrowed to a task group or replica."""

    pools: Pools = None
    pool: Pool | None = None
    group: str | None = None  # of ``pool``; "": requests of no task group
    replica: Replica | None = None

    @classmethod
    def of_pool(cls, pool: Pool, group: str | None = None) -> Subject:
        """A pool, or one of its task groups."""
        return cls([pool], pool, group)

    @classmethod
    def of_replica(cls, replica: Replica) -> Subject:
        """A replica, with its pool loaded."""
        return cls([replica.pool], replica.pool, None, replica)

    @property
    def kind(self) -> Kind:
        if self.replica is not None:
            return Kind.REPLICA
        if self.group is not None:
            return Kind.GROUP
        return Kind.POOL if self.pool is not None else Kind.FLEET

    def replicas(self) -> list[Replica]:
        """Replicas that may serve the subject, with their pool, sorted by name. At most one query."""
        if self.replica is not None:
            return [self.replica]
        replicas = Replica.objects.select_related("pool").order_by("pool__name", "name")
        return list(replicas if self.pools is None else replicas.filter(pool__in=self.pools))

    def ids(self) -> list[int]:
        return [replica.pk for replica in self.replicas()]

    def counted_ids(self, window: Window) -> list[int]:
        """Ids of the replicas whose counters make the subject's hit rate in a window."""
        return [self.replica.pk] if self.replica is not None else Fleet(self, window.start).counted_ids

    def pool_names(self) -> list[str] | None:
        """Names of the subject's pools; None for all."""
        return pool_names(self.pools)
