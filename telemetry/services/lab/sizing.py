"""Everything about a pool's capacity and cost over a window: bytes, prefill, sweep, shared cache, response caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

import numpy as np
from django.contrib.auth.models import User
from django.db.models import Sum
from msgspec import Meta

from controlplane.errors import ConflictError
from controlplane.models import Pool, ReplicaState, TaskGroup
from telemetry.lab.breakdown import BIN, Breakdown
from telemetry.lab.chains import Integers
from telemetry.lab.costs import PrefillRate, Price
from telemetry.lab.request_repeats import DigestedRequests, Repeats, repeats_of, served_with
from telemetry.lab.shared_cache import CacheTier, Gaps, Situation, TierAdvice, advise
from telemetry.lab.sweeps import Sweep, is_sweep, sweep_candidates, with_curves
from telemetry.metrics.windows import Window
from telemetry.models import BreakdownBin, WhatIf, WhatIfState
from telemetry.services.lab.breakdowns import breakdown_of, curve_of
from telemetry.services.lab.costs import ALL_TRAFFIC, PoolPrefill, basis_notes, prefill_in, prefill_rate_of
from telemetry.services.lab.replays import capacities_of
from telemetry.services.lab.what_ifs import MAX_REPLICAS, create_what_if
from telemetry.storage.decisions import digest_coverage, digested_between
from telemetry.storage.dimension_sums import route_sums, total

TTLS_S = (300, 3600, 86_400)  # of response caches that do not exist yet
MAX_EXAMINED = 2_000_000  # decisions: reading a million takes 1.3 s
MIN_TTL_COVERAGE = 0.95  # part of a time to live for which there is traffic


@dataclass(frozen=True, slots=True)
class Sizing:
    """Figures of a pool's capacity and cost from ``start`` to ``end``; None: unknown."""

    pool: str
    start: datetime
    end: datetime
    kv_bytes_per_token: int | None
    kv_notes: tuple[str, ...]
    prefill_rate: PrefillRate
    prefill: Annotated[PoolPrefill | None, Meta(description="null without replayed requests")]
    sweep: Annotated[Sweep | None, Meta(description="the newest capacity sweep; null until one was requested")]
    shared_cache: SharedCache
    response_cache: Annotated[ResponseCacheEstimate | None, Meta(description="null: no captured request was examined")]


def sizing_of(pool: Pool, window: Window, tiers: Sequence[CacheTier]) -> Sizing:
    """Sizing of a pool. A fixed number of queries."""
    rate, breakdown, kv_bytes = prefill_rate_of(pool), breakdown_of(pool, window), pool.kv_bytes
    prefill = prefill_in(pool, window, breakdown, rate)
    return Sizing(
        pool.name,
        window.start,
        window.end,
        kv_bytes.bytes_per_token if kv_bytes else None,
        tuple(kv_bytes.notes) if kv_bytes else (),
        rate,
        prefill,
        newest_sweep(pool),
        _shared_cache(pool, breakdown, prefill, rate, tiers),
        estimate_response_cache(pool, window, rate),
    )


# --- a shared or offloaded cache --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SharedCache:
    """The baseline without a tier, and the advice on each tier. Ratios are of the prompt tokens; None: unknown."""

    delivered_ratio: float | None
    reachable_ratio: float | None
    lost_ratio: Annotated[float | None, Meta(description="to capacity and fragmentation: what a tier can add")]
    placement_ratio: Annotated[
        float | None, Meta(description="lost to spreading and placement: what a policy can add without a tier")
    ]
    requests: Annotated[int | None, Meta(description="whose lost prefixes were measured")]
    tiers: list[TierAdvice]
    notes: list[str]


def _shared_cache(
    pool: Pool,
    breakdown: Breakdown | None,
    prefill: PoolPrefill | None,
    rate: PrefillRate,
    tiers: Sequence[CacheTier],
) -> SharedCache:
    """Advice from a breakdown and the pool's curve. One query."""
    curve = curve_of(pool)
    gaps = Gaps.read(curve.gaps) if curve is not None and curve.gaps is not None else None
    delivered, reachable, lost, placement = (
        (
            breakdown.ratio(breakdown.delivered),
            breakdown.ratio(breakdown.reachable),
            _lost_ratio(breakdown, breakdown.reachable, breakdown.split),
            _lost_ratio(breakdown, breakdown.split, breakdown.predicted),
        )
        if breakdown
        else (None, None, None, None)
    )
    situation = Situation(
        kv_bytes=pool.kv_bytes_per_token,
        prefill_rate=rate.tokens_per_s,
        gaps=gaps,
        lost_tokens=None if lost is None or prefill is None else lost * prefill.prompt_tokens_per_day,
        computed_tokens=prefill.computed_per_day.tokens if prefill else None,
        price=Price.of(pool.costs),
    )
    notes = []
    if gaps is not None and gaps.error_tokens:
        notes.append(
            "Only a part of the block hashes was captured, so the length of a lost prefix is known to about "
            f"{2 * gaps.error_tokens:,.0f} tokens only."
        )
    advice = [advise(tier, situation) for tier in tiers]
    return SharedCache(delivered, reachable, lost, placement, gaps.requests if gaps else None, advice, notes)


def _lost_ratio(breakdown: Breakdown, above: float | None, below: float | None) -> float | None:
    """Share lost between two terms of the breakdown; None if one is unknown."""
    return None if above is None or below is None else breakdown.ratio(max(0.0, above - below))


# --- response caches that do not exist yet ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CacheEstimate:
    """A task group ("": requests of none), or all without a response cache."""

    group: str
    requests: int
    has_response_cache: Annotated[bool, Meta(description="no estimate, because its hits are in no decision")]
    cacheable_requests: float | None
    effects: Annotated[list[Repeats], Meta(description="by time to live, at most the length of the traffic")]


@dataclass(frozen=True, slots=True)
class ResponseCacheEstimate:
    """What exact response caches would have answered in a window. Figures are of the window, not of a day."""

    start: Annotated[datetime, Meta(description="of the captured traffic")]
    end: datetime
    total: Annotated[CacheEstimate, Meta(description="all task groups without a response cache")]
    groups: list[CacheEstimate]
    sample_ratio: Annotated[float, Meta(description="part of the prompts whose requests have digests")]
    traffic_ratio: Annotated[float | None, Meta(description="captured requests / all requests; null: not scraped")]
    currency: str | None
    notes: list[str]

    @property
    def rows(self) -> list[tuple[str, CacheEstimate]]:
        """The task groups by name, and their total."""
        rows = [(row.group or "no group", row) for row in self.groups]
        return [*rows, ("all without a response cache", self.total)] if len(rows) > 1 else rows


def estimate_response_cache(pool: Pool, window: Window, rate: PrefillRate) -> ResponseCacheEstimate | None:
    """What exact response caches would have answered; None without requests that were examined. Five queries."""
    whole, window = window, _newest(pool, window)
    coverage = digest_coverage(pool.name, window.start, window.end)
    if coverage is None:
        return None
    requests = digested_between(pool.name, window.start, window.end, coverage.level)
    with_cache = set(TaskGroup.objects.filter(pool=pool, response_cache__isnull=False).values_list("name", flat=True))
    price = Price.of(pool.costs)
    span_s = (window.end - coverage.start).total_seconds()
    effects = _Effects(requests, span_s, rate.tokens_per_s, price)
    counted = total(
        route_sums([pool.name], Window(coverage.start, window.end, span_s), ("requests",), whole=True), "requests"
    )
    traffic_ratio = min(1.0, sum(coverage.requests.values()) / counted) if counted else None
    return ResponseCacheEstimate(
        coverage.start,
        coverage.end,
        effects.total({name: count for name, count in coverage.requests.items() if name not in with_cache}),
        [effects.group(*item, has_cache=item[0] in with_cache) for item in sorted(coverage.requests.items())],
        requests.sample_ratio,
        traffic_ratio,
        price.currency if price else None,
        _notes(traffic_ratio, span_s, rate, price, is_shortened=window is not whole),
    )


def _newest(pool: Pool, window: Window) -> Window:
    """The newest part of a window with at most ``MAX_EXAMINED`` requests, by the bins of the breakdown. One query."""
    bins = BreakdownBin.objects.filter(pool=pool, at__gte=window.start, at__lt=window.end)
    left = MAX_EXAMINED
    for at, requests in bins.values("at").annotate(n=Sum("requests")).order_by("-at").values_list("at", "n"):
        left -= requests
        if left < 0 and at + BIN < window.end:
            return Window(at + BIN, window.end, window.step_s)
    return window


class _Effects:
    """Effects by time to live, of the requests of one task group or of several."""

    def __init__(self, requests: DigestedRequests, span_s: float, rate: float | None, price: Price | None) -> None:
        self._requests = requests
        self._rate, self._price = rate, price
        self._served = [served_with(requests, ttl_s) for ttl_s in TTLS_S if MIN_TTL_COVERAGE * ttl_s <= span_s]

    def group(self, name: str, requests: int, *, has_cache: bool) -> CacheEstimate:
        """Those of a task group; without effects if it has a response cache already."""
        if has_cache:
            return CacheEstimate(name, requests, has_response_cache=True, cacheable_requests=None, effects=[])
        return self._estimate(name, requests, self._requests.groups.rows(name))

    def total(self, requests: dict[str, int]) -> CacheEstimate:
        """Those of these task groups together."""
        rows = [self._requests.groups.rows(name) for name in requests]
        return self._estimate(
            "", sum(requests.values()), np.sort(np.concatenate(rows)) if rows else np.empty(0, np.int64)
        )

    def _estimate(self, name: str, requests: int, rows: Integers) -> CacheEstimate:
        effects = [repeats_of(self._requests, served, rows, self._rate, self._price) for served in self._served]
        cacheable = len(rows) / self._requests.sample_ratio
        return CacheEstimate(name, requests, has_response_cache=False, cacheable_requests=cacheable, effects=effects)


def _notes(
    traffic_ratio: float | None, span_s: float, rate: PrefillRate, price: Price | None, *, is_shortened: bool
) -> list[str]:
    notes = []
    if is_shortened:
        notes.append(f"Only about the newest {MAX_EXAMINED:,} requests of the range were examined.")
    if span_s < MIN_TTL_COVERAGE * min(TTLS_S):
        notes.append("There are less than five minutes of traffic, too few for the shortest time to live.")
    if traffic_ratio is not None and traffic_ratio < ALL_TRAFFIC:
        notes.append(f"Only {100 * traffic_ratio:.0f} % of the requests were captured; their repeats may be missing.")
    return notes + basis_notes(rate, price)


SEARCHED = 30  # newest what-ifs


def create_sweep(
    pool: Pool, *, start: datetime | None = None, end: datetime | None = None, by: User | None = None
) -> WhatIf:
    """Queue a sweep around the pool's current size; errors as of ``create_what_if``, ConflictError without replicas."""
    replicas = pool.replicas.filter(state=ReplicaState.ACTIVE).count()
    if not replicas:
        raise ConflictError(f"Pool {pool.name} has no active replica.")
    sizes = capacities_of(pool, set()).tokens
    cache_tokens = sum(sizes.values()) // len(sizes) if sizes else None
    return create_what_if(
        pool, sweep_candidates(replicas, cache_tokens, max_replicas=MAX_REPLICAS), start=start, end=end, by=by
    )


def newest_sweep(pool: Pool) -> Sweep | None:
    """The newest finished sweep, else the newest open or failed one. Two queries."""
    rows = WhatIf.objects.filter(pool=pool).exclude(state=WhatIfState.CANCELLED)
    listed = [row for row in rows.defer("result")[:SEARCHED] if is_sweep(row.candidates)]
    if not listed:
        return None
    what_if = next((row for row in listed if row.state == WhatIfState.DONE), listed[0])
    sweep = Sweep(what_if.pk, what_if.state, what_if.reason, what_if.end)
    result = what_if.result
    return sweep if result is None else with_curves(sweep, what_if.candidates, result, Price.of(pool.costs))


def open_sweep(pool: Pool) -> WhatIf | None:
    """A sweep that is queued or running. One query."""
    rows = WhatIf.objects.filter(pool=pool, state__in=(WhatIfState.QUEUED, WhatIfState.RUNNING)).defer("result")
    return next((row for row in rows if is_sweep(row.candidates)), None)
