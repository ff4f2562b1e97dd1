"""What scraping knows of a target, in one word and a reason.

Quantiles of response times, and what share of responses a TTFT of routers rests on (T1b).

The figures of the overview: tiles of the fleet, rows of replicas, rows of task groups.

Whose figures a page shows: everybody's, a pool's, those of one of its task groups, or a replica's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from django.conf import settings
from django.utils import timezone

from controlplane.models import Pool, Replica, ReplicaState, TaskGroup
from telemetry.metrics.histograms import Merged, quantile
from telemetry.metrics.rates import hit_rate_ratio, ratio, sum_known
from telemetry.metrics.windows import FleetTiles, GroupRow, PointState, ReplicaRow, Window
from telemetry.models import STARTING_S, Health, ScrapeState
from telemetry.storage import sums
from telemetry.storage.reachable import ReachableShare, reachable_by_group, reachable_share
from telemetry.storage.replica_facts import COLD_S, is_decode

SILENT_INTERVALS = 3  # nothing tried for so long: it is the scraper that is away


@dataclass(frozen=True, slots=True)
class HealthWord:
    """``up``, ``starting``, ``down``, ``stale``, ``cold`` or ``unknown``, and why; ``reason`` is "" when up."""

    word: str
    reason: str = ""

    @property
    def answers(self) -> bool:
        """Whether it answers requests as far as we know."""
        return self.word in {"up", "cold"}


def health_of(state: ScrapeState | None, now: datetime, *, added_at: datetime | None = None) -> HealthWord:
    """Judge a target by its last scrape; one that was never read is starting for ``STARTING_S`` from ``added_at``."""
    if state is None:
        return HealthWord("unknown", "not scraped yet")
    if (now - state.at).total_seconds() > SILENT_INTERVALS * settings.SCRAPE_INTERVAL_S + 1:
        return HealthWord("stale", "no scrape was tried lately")
    if state.ok_at is None and state.failures and added_at is not None:
        left_s = STARTING_S - (now - added_at).total_seconds()
        if left_s > 0:
            return HealthWord("starting", f"{state.reason}; counts as down in {math.ceil(left_s / 60)} min")
    if state.health == Health.DOWN:
        return HealthWord("down", state.reason)
    if state.failures:
        return HealthWord("stale", state.reason)
    if state.asleep:
        return HealthWord("cold", "the engine sleeps")
    if state.restarted_at is not None and (now - state.restarted_at).total_seconds() < COLD_S:
        return HealthWord("cold", "restarted a moment ago")
    return HealthWord("up") if state.ok_at is not None else HealthWord("unknown", "not scraped yet")


def timed_ratio(ttft: Merged | None, plain: Merged | None) -> float | None:
    """Responses whose first token routers timed / those and the plain ones; None where there are neither."""
    timed, others = (part.buckets.total if part else 0 for part in (ttft, plain))
    return timed / (timed + others) if timed + others else None


def timed_note(ttft: Iterable[Merged], plain: Iterable[Merged]) -> str:
    """What a TTFT of routers rests on, in words; "" where that is every response, or none."""
    ratio = timed_ratio(sums.merge_histograms(ttft), sums.merge_histograms(plain))
    return "" if ratio is None or ratio == 1 else f"Of streamed responses: {ratio:.0%} of all."


def share_of_responses(some: Iterable[Merged], every: Iterable[Merged]) -> float | None:
    """Responses counted in some histograms / in all of them, at most 1; None where there are none."""
    part, whole = sums.merge_histograms(some), sums.merge_histograms(every)
    total = whole.buckets.total if whole else 0
    return min(1.0, (part.buckets.total if part else 0) / total) if total else None


def quantile_s(merged: Merged | None, q: float) -> float | None:
    """A quantile in seconds; None for no observations."""
    found = quantile(merged.buckets, q) if merged else None
    return found.value if found else None


Pools = Sequence[Pool] | None  # whose figures; None: all there are
GAUGE_INTERVALS = 3  # gauges older than this are no longer now


def replicas_of(pools: Pools) -> list[Replica]:
    """The replicas of some pools, or of all, with their pool; by name."""
    replicas = Replica.objects.select_related("pool").order_by("pool__name", "name")
    return list(replicas if pools is None else replicas.filter(pool__in=pools))


def fleet_tiles(pools: Pools, window: Window) -> FleetTiles:
    """The fleet's figures over a window; running, waiting and replicas up are as of its end. At most 11 queries."""
    replicas = [replica for replica in replicas_of(pools) if replica.state != ReplicaState.DISABLED]
    ids = [replica.pk for replica in replicas]
    states = _states(ids)
    engine = sums.engine_sums(ids, window, whole=True)
    routed, coverage = sums.router_sums(names_of(pools), window, whole=True)
    gauges = _newest(ids, window).values()
    source, ttft = _ttft(pools, ids, window)
    plain = sums.merge_histograms(sums.router_latency(names_of(pools), window, streamed=False, whole=True).values())
    told = {pk: state.role for pk, state in states.items()}
    decodes = {replica.pk for replica in replicas if is_decode(replica, told.get(replica.pk, ""))}
    rated = [row for row in engine if row.replica_id not in decodes]  # H19
    queries = sum_known(row.queries for row in rated)
    now = timezone.now()
    healths = [health_of(states.get(pk), now) for pk in ids]
    return FleetTiles(
        hit_rate_ratio=hit_rate_ratio(
            queries, sum_known(row.hits for row in rated), sum_known(row.external_hits for row in rated)
        ),
        hit_rate_state=sums.combined_state(rated),
        reachable=reachable_share(names_of(pools), window),
        ttft_p50_s=quantile_s(ttft, 0.5),
        ttft_p95_s=quantile_s(ttft, 0.95),
        ttft_source=source,
        ttft_timed_ratio=1.0 if source == "engine" else timed_ratio(ttft, plain),
        plain_p50_s=quantile_s(plain, 0.5),
        plain_p95_s=quantile_s(plain, 0.95),
        requests_per_s=_requests_per_s(routed, coverage, engine),
        running=sum_known(gauge.running for gauge in gauges),
        waiting=sum_known(gauge.waiting for gauge in gauges),
        replicas_up=sum(health.answers for health in healths) if states else None,
        replicas_total=len(replicas),
        read_at=max((state.ok_at for state in states.values() if state.ok_at), default=None),
    )


def replica_rows(pools: Pools, window: Window) -> list[ReplicaRow]:
    """One row per replica, disabled ones too, by pool and name. 6 queries."""
    replicas = replicas_of(pools)
    ids = [replica.pk for replica in replicas]
    states = _states(ids)
    engine = {row.replica_id: row for row in sums.engine_sums(ids, window, whole=True)}
    gauges = _newest(ids, window)
    ttft = {pk: merged for (pk, _), merged in sums.engine_ttft(ids, window, by="replica", whole=True).items()}
    now = timezone.now()
    return [
        _replica_row(
            replica,
            _health(replica, states.get(replica.pk), now),
            engine=engine.get(replica.pk),
            gauges=gauges.get(replica.pk, sums.Gauges(None, None, None)),
            ttft=ttft.get(replica.pk),
            state=states.get(replica.pk),
        )
        for replica in replicas
    ]


def _replica_row(
    replica: Replica,
    health: HealthWord,
    *,
    engine: sums.EngineSums | None,
    gauges: sums.Gauges,
    ttft: Merged | None,
    state: ScrapeState | None,
) -> ReplicaRow:
    return ReplicaRow(
        name=replica.name,
        pool=replica.pool.name,
        state=replica.state,
        health=health.word,
        reason=health.reason,
        hit_rate_ratio=hit_rate_ratio(engine.queries, engine.hits, engine.external_hits) if engine else None,
        hit_rate_state=engine.state if engine else PointState.UNKNOWN,
        ttft_p50_s=quantile_s(ttft, 0.5),
        ttft_p95_s=quantile_s(ttft, 0.95),
        running=gauges.running,
        waiting=gauges.waiting,
        kv_usage_ratio=gauges.kv_usage_ratio,
        requests_per_s=ratio(engine.finished, engine.covered_s) if engine else None,
        prompt_tokens_per_s=ratio(engine.prompt_tokens, engine.covered_s) if engine else None,
        last_read_at=state.ok_at if state else None,
    )


def group_rows(pools: Pools, window: Window) -> list[GroupRow]:
    """One row per task group that exists or was seen, by pool and name, as the routers saw it. 7 queries."""
    routed, coverage = sums.router_sums(names_of(pools), window, whole=True)
    timed = sums.router_ttft(names_of(pools), window, by="group", whole=True)
    plain = sums.router_latency(names_of(pools), window, streamed=False, by="group", whole=True)
    ttft, latency = ({key: merged for (key, _), merged in found.items()} for found in (timed, plain))
    groups = TaskGroup.objects.values_list("pool__name", "name")
    seen = {(row.pool, row.group): row for row in routed}
    names = set(groups if pools is None else groups.filter(pool__in=pools)) | set(seen)
    reachable = reachable_by_group(names_of(pools), window)
    return [
        _group_row(
            name, seen.get(name), ttft.get(name), latency.get(name), coverage=coverage, reachable=reachable.get(name)
        )
        for name in sorted(names)
    ]


def _group_row(
    name: tuple[str, str],
    row: sums.RouterSums | None,
    ttft: Merged | None,
    plain: Merged | None,
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
        ttft_timed_ratio=timed_ratio(ttft, plain),
        plain_p50_s=quantile_s(plain, 0.5),
        plain_p95_s=quantile_s(plain, 0.95),
        requests_per_s=_per_s(row.requests if row else None, coverage),
        prompt_tokens_per_s=_per_s(row.prompt_tokens if row else None, coverage),
        failed_ratio=ratio(row.failed, row.requests) if row else None,
        accounted_ratio=row.accounted_ratio if row else None,
    )


def group_state(row: sums.RouterSums | None, coverage: sums.Coverage | None) -> PointState:
    """What a task group's hit rate of a step is worth. Keys without traffic leave no reading, so the scrapes tell."""
    if row is not None and row.prompt_tokens:
        return PointState.OK
    if row is not None and row.requests:
        return PointState.UNKNOWN  # answers without usage: not reported (H16)
    if coverage is None:
        return PointState.UNKNOWN
    if coverage.covered_s > 0:
        return PointState.NO_TRAFFIC
    return PointState.STALE if coverage.stale else PointState.UNKNOWN


def _health(replica: Replica, state: ScrapeState | None, now: datetime) -> HealthWord:
    if replica.state == ReplicaState.DISABLED:
        return HealthWord("unknown", "disabled: not scraped")
    return health_of(state, now, added_at=replica.created_at)


def names_of(pools: Pools) -> list[str] | None:
    """Their names; None for all."""
    return None if pools is None else [pool.name for pool in pools]


def _states(replica_ids: list[int]) -> dict[int, ScrapeState]:
    states = ScrapeState.objects.filter(replica_id__in=replica_ids).defer("raw_counters")
    return {state.replica_id: state for state in states if state.replica_id is not None}


def _newest(replica_ids: list[int], window: Window) -> dict[int, sums.Gauges]:
    span = timedelta(seconds=GAUGE_INTERVALS * settings.SCRAPE_INTERVAL_S + 1)
    return sums.newest_gauges(replica_ids, since=window.end - span, until=window.end)


def _ttft(pools: Pools, replica_ids: list[int], window: Window) -> tuple[str | None, Merged | None]:
    """(whose clock, histogram): the routers' where they observed anything, else the engines' (T1)."""
    routed = sums.merge_histograms(sums.router_ttft(names_of(pools), window, whole=True).values())
    if routed is not None:
        return "router", routed
    engine = sums.merge_histograms(sums.engine_ttft(replica_ids, window, whole=True).values())
    return ("engine", engine) if engine is not None else (None, None)


def _requests_per_s(
    routed: list[sums.RouterSums], coverage: list[sums.Coverage], engine: list[sums.EngineSums]
) -> float | None:
    """By the routers where they were read, else by the engines' finished requests."""
    if any(step.covered_s for step in coverage):
        return _per_s(sum_known(row.requests for row in routed), coverage)
    rates = [rate for row in engine if (rate := ratio(row.finished, row.covered_s)) is not None]
    return sum(rates) if rates else None


def _per_s(count: int | None, coverage: list[sums.Coverage]) -> float | None:
    """Counted by all routers together, a second; 0 where they were read and counted nothing."""
    covered = sum(step.covered_s for step in coverage)
    routers = max((step.routers for step in coverage), default=0)
    return (count or 0) / covered * routers if covered else None


class Kind(StrEnum):
    """What a subject is."""

    FLEET = "fleet"
    POOL = "pool"
    GROUP = "group"
    REPLICA = "replica"


@dataclass(frozen=True, slots=True)
class Subject:
    """``among`` are the pools that count (None: all there are); the rest narrows them to one object."""

    among: Pools = None
    pool: Pool | None = None
    group: str | None = None  # of ``pool``; "": requests of no task group
    replica: Replica | None = None

    @classmethod
    def of_pool(cls, pool: Pool, group: str | None = None) -> Subject:
        """A pool, or one of its task groups."""
        return cls([pool], pool, group)

    @classmethod
    def of_replica(cls, replica: Replica) -> Subject:
        """A replica; its pool has to be there already."""
        return cls([replica.pool], replica.pool, None, replica)

    @property
    def kind(self) -> Kind:
        """What it is."""
        if self.replica is not None:
            return Kind.REPLICA
        if self.group is not None:
            return Kind.GROUP
        return Kind.POOL if self.pool is not None else Kind.FLEET

    def replicas(self) -> list[Replica]:
        """Those whose engines count: all that may serve it. At most one query."""
        return [self.replica] if self.replica is not None else replicas_of(self.among)

    def pool_names(self) -> list[str] | None:
        """Its pools as the routers name them; None for all."""
        return names_of(self.among)
