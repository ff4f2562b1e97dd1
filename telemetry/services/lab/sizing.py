"""Everything about a pool's capacity and cost over a window: bytes, savings, sweep, shared cache, response caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import numpy as np
from django.contrib.auth.models import User
from django.db.models import Sum

from controlplane.errors import ConflictError
from controlplane.kv_cache import KvBytes
from controlplane.models import Pool, ReplicaState, TaskGroup
from telemetry.lab.breakdown import BIN
from telemetry.lab.chains import Integers
from telemetry.lab.costs import Prefill, PrefillRate, Price, prefill_of
from telemetry.lab.request_repeats import DigestedRequests, Repeats, repeats_of, served_with
from telemetry.lab.shared_cache import CacheTier
from telemetry.lab.sweeps import Sweep, is_sweep, read_sweep, summaries, sweep_candidates
from telemetry.lab.worth import NORMAL_95
from telemetry.metrics.windows import Window
from telemetry.models import BreakdownBin, WhatIf, WhatIfState
from telemetry.services.lab.breakdowns import curve_of
from telemetry.services.lab.costs import ALL_TRAFFIC, PoolSavings, prefill_rate_of, savings_in
from telemetry.services.lab.replays import capacities_of
from telemetry.services.lab.shared_cache import SharedCache, shared_cache_of
from telemetry.services.lab.what_ifs import MAX_REPLICAS, create_what_if
from telemetry.storage.decisions import digest_coverage, digested_between
from telemetry.storage.dimension_sums import route_sums, total

TTLS = {300: "5 min", 3600: "1 h", 86_400: "24 h"}  # seconds, of response caches that do not exist yet
MAX_EXAMINED = 2_000_000  # decisions: reading a million takes 1.3 s
MIN_TTL_COVERAGE = 0.95  # part of a time to live for which there is traffic


@dataclass(frozen=True, slots=True)
class Sizing:
    """Figures of a pool's capacity and cost; None: unknown."""

    kv_bytes: KvBytes | None
    rate: PrefillRate
    savings: PoolSavings | None
    sweep: PoolSweep | None
    shared_cache: SharedCache
    response_cache: ResponseCacheEstimate | None

    def as_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "kv_bytes_per_token": self.kv_bytes.bytes_per_token if self.kv_bytes else None,
            "kv_notes": list(self.kv_bytes.notes) if self.kv_bytes else [],
            "prefill_rate": self.rate.as_json(),
            "savings": self.savings and self.savings.as_json(),
            "sweep": self.sweep and _sweep_as_json(self.sweep),
            "shared_cache": self.shared_cache.as_json(),
            "response_cache": self.response_cache and self.response_cache.as_json(),
        }


def sizing_of(pool: Pool, window: Window, tiers: Sequence[CacheTier]) -> Sizing:
    """Sizing of a pool. A fixed number of queries."""
    rate = prefill_rate_of(pool)
    savings = savings_in(pool, window, rate)
    return Sizing(
        pool.kv_bytes,
        rate,
        savings,
        newest_sweep(pool),
        shared_cache_of(pool, savings, rate, curve_of(pool), tiers),
        estimate_response_cache(pool, window, rate),
    )


def _sweep_as_json(found: PoolSweep) -> dict[str, Any]:
    sweep = found.sweep
    return {
        "what_if": found.what_if.pk,
        "state": found.what_if.state,
        "is_calibrated": sweep.is_calibrated if sweep else None,
        "problems": sweep.problems if sweep else [],
        "requests": found.counted_requests,
        "by_replicas": [asdict(point) for point in sweep.by_replicas] if sweep else [],
        "by_cache": [asdict(point) for point in sweep.by_cache] if sweep else [],
        "summaries": found.summaries,
    }


# --- response caches that do not exist yet ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CacheEffect:
    """What an exact cache with one time to live would have answered in the window."""

    ttl_s: int
    repeats: Repeats
    prefill: Prefill  # of the prompt tokens that the engines' prefix caches did not have

    @property
    def ttl(self) -> str:
        """The time to live for people."""
        return TTLS[self.ttl_s]

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the share of repeats, from sampling; None: all were counted, or too few to tell."""
        ratio, error = self.repeats.ratio, self.repeats.standard_error
        if ratio is None or not error:
            return None
        return max(0.0, ratio - NORMAL_95 * error), min(1.0, ratio + NORMAL_95 * error)

    def as_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {"ttl_s": self.ttl_s, **self.repeats.as_json(), "prefill": asdict(self.prefill)}


@dataclass(frozen=True, slots=True)
class CacheEstimate:
    """Of one task group ("": requests of none), or of all that have no response cache."""

    group: str
    requests: int
    cacheable: float | None  # requests; None: it has a response cache, whose hits are in no decision
    effects: list[CacheEffect]

    def as_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "group": self.group,
            "requests": self.requests,
            "has_response_cache": self.cacheable is None,
            "cacheable_requests": self.cacheable,
            "effects": [effect.as_json() for effect in self.effects],
        }


@dataclass(frozen=True, slots=True)
class ResponseCacheEstimate:
    """What exact response caches would have answered in a window. Figures are of the window, not of a day."""

    start: datetime  # of the captured traffic
    end: datetime
    total: CacheEstimate
    groups: list[CacheEstimate]
    sample_ratio: float  # part of the prompts whose requests have digests
    traffic_ratio: float | None  # captured requests / all requests of the routers; None: not scraped
    price: Price | None
    notes: list[str]

    @property
    def rows(self) -> list[tuple[str, CacheEstimate]]:
        """The task groups by name, and their total."""
        rows = [(row.group or "no group", row) for row in self.groups]
        return [*rows, ("all without a response cache", self.total)] if len(rows) > 1 else rows

    def as_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "start": self.start,
            "end": self.end,
            "sample_ratio": self.sample_ratio,
            "traffic_ratio": self.traffic_ratio,
            "currency": self.price.currency if self.price else None,
            "total": self.total.as_json(),
            "groups": [group.as_json() for group in self.groups],
            "notes": self.notes,
        }


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
        price,
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
        self._served = {ttl_s: served_with(requests, ttl_s) for ttl_s in TTLS if MIN_TTL_COVERAGE * ttl_s <= span_s}

    def group(self, name: str, requests: int, *, has_cache: bool) -> CacheEstimate:
        """Those of a task group; without effects if it has a response cache already."""
        if has_cache:
            return CacheEstimate(name, requests, None, [])
        return self._estimate(name, requests, self._requests.groups.rows(name))

    def total(self, requests: dict[str, int]) -> CacheEstimate:
        """Those of these task groups together."""
        rows = [self._requests.groups.rows(name) for name in requests]
        return self._estimate(
            "", sum(requests.values()), np.sort(np.concatenate(rows)) if rows else np.empty(0, np.int64)
        )

    def _estimate(self, name: str, requests: int, rows: Integers) -> CacheEstimate:
        effects = []
        for ttl_s, served in self._served.items():
            repeats = repeats_of(self._requests, served, rows)
            effects.append(CacheEffect(ttl_s, repeats, prefill_of(repeats.uncached_tokens, self._rate, self._price)))
        return CacheEstimate(name, requests, len(rows) / self._requests.sample_ratio, effects)


def _notes(
    traffic_ratio: float | None, span_s: float, rate: PrefillRate, price: Price | None, *, is_shortened: bool
) -> list[str]:
    notes = []
    if is_shortened:
        notes.append(f"Only about the newest {MAX_EXAMINED:,} requests of the range were examined.")
    if span_s < MIN_TTL_COVERAGE * min(TTLS):
        notes.append("There are less than five minutes of traffic, too few for the shortest time to live.")
    if traffic_ratio is not None and traffic_ratio < ALL_TRAFFIC:
        notes.append(f"Only {100 * traffic_ratio:.0f} % of the requests were captured; their repeats may be missing.")
    if rate.tokens_per_s is None:
        notes.append(rate.source)
    if price is None:
        notes.append("No price is set in the pool's settings, so no money is shown.")
    return notes


SEARCHED = 30  # newest what-ifs


@dataclass(frozen=True, slots=True)
class PoolSweep:
    """The newest sweep of a pool. ``sweep`` is None until it is done."""

    what_if: WhatIf
    sweep: Sweep | None
    currency: str

    @property
    def summaries(self) -> list[str]:
        """What one replica fewer and one more would bring; [] without calibration."""
        return summaries(self.sweep, self.currency) if self.sweep else []

    @property
    def counted_requests(self) -> int | None:
        """Requests that the figures rest on."""
        return self.what_if.result["counted_requests"] if self.what_if.result else None


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


def newest_sweep(pool: Pool) -> PoolSweep | None:
    """The newest finished sweep, else the newest open or failed one. Two queries."""
    rows = WhatIf.objects.filter(pool=pool).exclude(state=WhatIfState.CANCELLED)
    listed = [row for row in rows.defer("result")[:SEARCHED] if is_sweep(row.candidates)]
    if not listed:
        return None
    what_if = next((row for row in listed if row.state == WhatIfState.DONE), listed[0])
    price = Price.of(pool.costs)
    sweep = None
    if what_if.result is not None:
        sweep = read_sweep(what_if.candidates, what_if.result, _counted_s(what_if.result), price)
    return PoolSweep(what_if, sweep, price.currency if price else "")


def open_sweep(pool: Pool) -> WhatIf | None:
    """A sweep that is queued or running. One query."""
    rows = WhatIf.objects.filter(pool=pool, state__in=(WhatIfState.QUEUED, WhatIfState.RUNNING)).defer("result")
    return next((row for row in rows if is_sweep(row.candidates)), None)


def _counted_s(result: dict[str, Any]) -> float:
    start, end = (datetime.fromisoformat(result[name]) for name in ("counted_from", "to"))
    return (end - start).total_seconds()
