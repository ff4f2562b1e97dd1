"""What caches save: prefix caches a day, from the breakdown, and response caches over a window, from routers' counts.

Both are converted to prefill time and money by the pool's measured prefill rate and its price.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Max, Min
from django.utils import timezone

from controlplane.models import Pool, Replica, ReplicaRole, ReplicaState, TaskGroup
from telemetry.lab.breakdown import BIN, MIN_REQUESTS, Breakdown, bin_start
from telemetry.lab.captured import EngineFit
from telemetry.lab.costs import DAY_S, LearntRate, Prefill, PrefillRate, Price, Savings, prefill_of, savings_of
from telemetry.metrics.rates import ratio
from telemetry.metrics.windows import Window
from telemetry.models import BreakdownBin, CapacityCurve
from telemetry.services.lab.breakdowns import breakdown_of, breakdowns_by_group
from telemetry.storage.dimension_sums import (
    CACHE_COUNTS,
    counter_sums_by_replica,
    coverage,
    response_cache_sums,
    route_sums,
    total,
)

MIN_EXTRAPOLATED = timedelta(hours=20)  # of traffic; figures a day from less are an extrapolation
ALL_TRAFFIC = 0.95  # of the requests


@dataclass(frozen=True, slots=True)
class PoolSavings:
    """Savings of a pool and of its task groups, and what they rest on."""

    start: datetime  # of the traffic
    end: datetime
    measured_s: float  # seconds of traffic between them, without outages
    pool: Savings
    breakdown: Breakdown
    groups: list[tuple[str, Savings]]  # "": requests without a task group
    rate: PrefillRate
    price: Price | None
    traffic_ratio: float | None  # replayed requests / all requests of the routers; None: not scraped
    replicas: int  # that serve now
    notes: list[str]

    @property
    def replica_day_s(self) -> float:
        """Seconds that all replicas together have in a day: what the saved seconds compare with."""
        return self.replicas * DAY_S

    @property
    def is_extrapolated(self) -> bool:
        """Whether the figures are of much less than a day."""
        return self.measured_s < MIN_EXTRAPOLATED.total_seconds()

    def as_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "start": self.start,
            "end": self.end,
            "measured_hours": self.measured_s / 3600,
            "replica_hours_per_day": self.replica_day_s / 3600,
            "traffic_ratio": self.traffic_ratio,
            "currency": self.price.currency if self.price else None,
            "replica_day_price": self.price.replica_day if self.price else None,
            **asdict(self.pool),
            "groups": [{"group": name, **asdict(savings)} for name, savings in self.groups],
            "notes": self.notes,
        }


def savings_in(pool: Pool, window: Window, rate: PrefillRate) -> PoolSavings | None:
    """Savings of a window; None without replayed requests. Eight queries."""
    breakdown = breakdown_of(pool, window)
    span = BreakdownBin.objects.filter(pool=pool, at__gte=bin_start(window.start), at__lt=window.end).aggregate(
        first=Min("at"), last=Max("at")
    )
    if breakdown is None or span["first"] is None:
        return None
    start = max(span["first"], pool.created_at)  # of whole bins, but for one that is being filled
    end = max(min(span["last"] + BIN, max(window.end, timezone.now())), start + timedelta(seconds=1))
    measured = Window(start, end, (end - start).total_seconds())
    covered_s = sum(step.covered_s for step in coverage(measured, whole=True))
    measured_s = min(measured.step_s, covered_s) or measured.step_s  # without outages
    price = Price.of(pool.costs)
    counted = total(route_sums([pool.name], measured, ("requests",), whole=True), "requests")
    ratio = min(1.0, breakdown.requests / counted) if counted else None
    return PoolSavings(
        start,
        end,
        measured_s,
        savings_of(breakdown, measured_s, rate.tokens_per_s, price),
        breakdown,
        [
            (row.group, savings_of(row.breakdown, measured_s, rate.tokens_per_s, price))
            for row in breakdowns_by_group(pool, window)
        ],
        rate,
        price,
        ratio,
        Replica.objects.filter(pool=pool).exclude(state=ReplicaState.DISABLED).exclude(role=ReplicaRole.DECODE).count(),
        _notes(breakdown, ratio, rate, price),
    )


def _notes(breakdown: Breakdown, traffic_ratio: float | None, rate: PrefillRate, price: Price | None) -> list[str]:
    notes = []
    if traffic_ratio is not None and traffic_ratio < ALL_TRAFFIC:
        notes.append(f"Only {100 * traffic_ratio:.0f} % of the requests were replayed; figures are of those.")
    if breakdown.requests < MIN_REQUESTS:
        notes.append(f"Only {breakdown.requests} requests were replayed: too few for a decision.")
    if breakdown.delivered is None:
        notes.append("No response reports cached tokens. Start vLLM with --enable-prompt-tokens-details.")
    elif breakdown.reported_ratio < ALL_TRAFFIC:
        notes.append(
            f"Responses for {100 * breakdown.reported_ratio:.0f} % of the prompt tokens report cached tokens; saved "
            "prefill is extended to all."
        )
    if rate.tokens_per_s is None:
        notes.append(rate.source)
    if price is None:
        notes.append("No price is set in the pool's settings, so no money is shown.")
    return notes


# --- response caches --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ResponseCacheFigures:
    """What response caches answered over a window; None: unknown.

    Hits are no requests of engines: hit rates, TTFT and utilization do not contain them.
    """

    hits: int | None  # requests answered from the cache
    misses: int | None  # cacheable requests that were sent to a replica
    bypassed: int | None  # requests of the same task groups that may not use the cache
    prompt_tokens: int | None  # of the responses from the cache
    generated_tokens: int | None
    # Prefill of those prompt tokens, without what prefix caches would have saved of it: at most this. Generation, which
    # is saved too, has no measured rate.
    prefill: Prefill
    currency: str | None
    notes: tuple[str, ...]

    @property
    def cacheable(self) -> int | None:
        """Requests that the cache might have answered."""
        return None if self.hits is None or self.misses is None else self.hits + self.misses

    @property
    def hit_ratio(self) -> float | None:
        """Share of the cacheable requests that the cache answered."""
        return ratio(self.hits, self.cacheable)


def has_response_cache(pools: Sequence[Pool] | None) -> bool:
    """Whether any task group of these pools (None: all) has a response cache. One query."""
    groups = TaskGroup.objects.filter(response_cache__isnull=False)
    return (groups if pools is None else groups.filter(pool__in=pools)).exists()


def response_cache_figures(
    pools: Sequence[Pool] | None, window: Window, *, group: str | None = None
) -> ResponseCacheFigures:
    """Figures of the response caches of pools (None: all), or of one task group.

    Four queries, and three for each pool with hits. Time and money are unknown if those of one such pool are.
    """
    rows = response_cache_sums(
        None if pools is None else [pool.name for pool in pools], window, group=group, whole=True
    )
    if not rows and not any(step.covered_s for step in coverage(window, whole=True)):
        return ResponseCacheFigures(None, None, None, None, None, Prefill(None, None, None), None, ())
    with_hits = {row.key[0]: row.get("cache_prompt_tokens") for row in rows if row.get("cache_hits")}
    parts: list[Prefill] = []
    currencies: set[str | None] = set()
    notes: list[str] = []
    for pool in Pool.objects.filter(name__in=with_hits).order_by("name") if with_hits else ():
        rate, price = prefill_rate_of(pool), Price.of(pool.costs)
        parts.append(prefill_of(with_hits[pool.name], rate.tokens_per_s, price))
        currencies.add(price.currency if price else None)
        if rate.tokens_per_s is None:
            notes.append(f"{pool.name}: {rate.source}")
    currency = currencies.pop() if len(currencies) == 1 else None
    money = all_known(part.money for part in parts) if currency else None
    hits, misses, bypassed = (total(rows, name) or 0 for name in CACHE_COUNTS[:3])
    prompt, generated = ((total(rows, name) if rows else 0) for name in CACHE_COUNTS[3:])
    prefill = Prefill(prompt, all_known(part.replica_seconds for part in parts), money)
    return ResponseCacheFigures(hits, misses, bypassed, prompt, generated, prefill, currency, tuple(notes))


def all_known(values: Iterable[float | None]) -> float | None:
    """The sum; None if a value is unknown, or without any."""
    known = list(values)
    return None if not known or None in known else sum(value or 0.0 for value in known)


def prefill_rate_of(pool: Pool) -> PrefillRate:
    """The pool's learnt rate. One query."""
    return prefill_rates_of([pool])[pool.pk]


def prefill_rates_of(pools: Sequence[Pool]) -> dict[int, PrefillRate]:
    """The learnt rates of some pools, by id. One query."""
    curves = CapacityCurve.objects.filter(pool__in=list(pools)).only(
        "pool", "prefill_rate", "prefill_deviation", "prefill_fits", "fitted_requests", "at"
    )
    by_pool = {curve.pool_id: curve for curve in curves}
    return {pool.pk: _learnt(by_pool.get(pool.pk)) for pool in pools}


def _learnt(curve: CapacityCurve | None) -> PrefillRate:
    if curve is None or curve.prefill_rate is None:
        count = curve.fitted_requests if curve else 0
        return PrefillRate(
            None,
            f"The prefill rate is unknown: {count} responses with cached tokens in the last hour. Stream responses, "
            "and start vLLM with --enable-prompt-tokens-details.",
        )
    return PrefillRate(
        curve.prefill_rate,
        f"Learnt from {curve.prefill_fits:,} fit{'s' * (curve.prefill_fits != 1)} of an hour each until "
        f"{curve.at:%d %b %H:%M} UTC, the last one of "
        f"{curve.fitted_requests:,} responses; the range is that of the fits.",
        curve.prefill_deviation,
    )


def learnt_rate(pool: Pool, fit: EngineFit, window: Window) -> dict[str, float | int]:
    """The pool's prefill rate as columns of its curve after a fit to a window's responses; {}: nothing was learnt."""
    rate = fit.prefill_rate or engines_prefill_rate(pool, window)
    if rate is None:
        return {}
    row = CapacityCurve.objects.filter(pool=pool, prefill_rate__isnull=False, prefill_fits__gt=0).first()
    earlier = LearntRate(row.prefill_rate or rate, row.prefill_deviation, row.prefill_fits) if row else None
    learnt = LearntRate.after(earlier, rate, fit.rate_error)
    return {
        "prefill_rate": learnt.tokens_per_s,
        "prefill_deviation": learnt.deviation,
        "prefill_fits": learnt.fits,
    }


def engines_prefill_rate(pool: Pool, window: Window) -> float | None:
    """Computed tokens / seconds of prefill, as engines count them; None if no engine reports both.

    Prompts that are computed at the same time count the same seconds, so a busy engine computes more than this.
    """
    serving = Replica.objects.filter(pool=pool).exclude(role=ReplicaRole.DECODE).values_list("pk", flat=True)
    rows = counter_sums_by_replica(list(serving), window, ("computed_prompt_tokens", "prefill_ms"))
    known = [row.totals.values for row in rows if None not in row.totals.values.values()]
    tokens, prefill_ms = (sum(row[name] or 0 for row in known) for name in ("computed_prompt_tokens", "prefill_ms"))
    return ratio(1000 * tokens, prefill_ms)
