"""What a pool computes a day, from the breakdown, and what response caches save over a window, from routers' counts.

Both are converted to prefill time and money by the pool's measured prefill rate and its price.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated

from django.db.models import Max, Min
from django.utils import timezone
from msgspec import Meta

from controlplane.models import Pool, Replica, ReplicaRole, ReplicaState, TaskGroup
from telemetry.lab.breakdown import BIN, MIN_REQUESTS, Breakdown, bin_start
from telemetry.lab.captured import EngineFit
from telemetry.lab.costs import DAY_S, LearntRate, Prefill, PrefillRate, Price, prefill_of
from telemetry.metrics.rates import ratio
from telemetry.metrics.windows import Window
from telemetry.models import BreakdownBin, CapacityCurve
from telemetry.storage.dimension_sums import (
    CACHE_COUNTS,
    coverage,
    engine_counter_sums,
    response_cache_sums,
    route_sums,
    total,
)

MIN_EXTRAPOLATED_H = 20  # hours of traffic; figures a day from less are an extrapolation
ALL_TRAFFIC = 0.95  # of the requests


@dataclass(frozen=True, slots=True)
class PoolPrefill:
    """What a pool computes a day; ``start`` to ``end`` is the traffic that it rests on."""

    requests: int  # number of requests that were measured
    prompt_tokens_per_day: float
    computed_per_day: Annotated[Prefill, Meta(description="all that was computed")]
    start: datetime
    end: datetime
    measured_hours: Annotated[
        float, Meta(description="of traffic without outages, from which figures a day are extrapolated")
    ]
    replica_hours_per_day: Annotated[float, Meta(description="of all replicas that serve now")]
    traffic_ratio: Annotated[float | None, Meta(description="replayed requests / all requests")]
    currency: str | None
    replica_day_price: float | None
    notes: list[str]

    @property
    def measured_s(self) -> float:
        return 3600 * self.measured_hours

    @property
    def is_extrapolated(self) -> bool:
        """Whether the figures are of much less than a day."""
        return self.measured_hours < MIN_EXTRAPOLATED_H


def prefill_in(pool: Pool, window: Window, breakdown: Breakdown | None, rate: PrefillRate) -> PoolPrefill | None:
    """Prefill a day, from a window with its breakdown; None without replayed requests. Six queries."""
    bins = BreakdownBin.objects.filter(pool=pool, at__gte=bin_start(window.start), at__lt=window.end)
    span = bins.aggregate(first=Min("at"), last=Max("at"))
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
    serving = Replica.objects.filter(pool=pool).exclude(state=ReplicaState.DISABLED).exclude(role=ReplicaRole.DECODE)
    per_day = DAY_S / measured_s
    computed = None if breakdown.delivered is None else max(0.0, breakdown.prompt_tokens - breakdown.delivered)
    return PoolPrefill(
        breakdown.requests,
        breakdown.prompt_tokens * per_day,
        prefill_of(None if computed is None else computed * per_day, rate.tokens_per_s, price),
        start=start,
        end=end,
        measured_hours=measured_s / 3600,
        replica_hours_per_day=serving.count() * DAY_S / 3600,
        traffic_ratio=ratio,
        currency=price.currency if price else None,
        replica_day_price=price.replica_day if price else None,
        notes=_notes(breakdown, ratio, rate, price),
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
            f"Responses for {100 * breakdown.reported_ratio:.0f} % of the prompt tokens report cached tokens; "
            "computed tokens are extended to all."
        )
    return notes + basis_notes(rate, price)


def basis_notes(rate: PrefillRate, price: Price | None) -> list[str]:
    """Why times and money are unknown."""
    notes = [rate.source] if rate.tokens_per_s is None else []
    return notes if price else [*notes, "No price is set in the pool's settings, so no money is shown."]


# --- response caches --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ResponseCacheFigures:
    """What response caches answered over a window; None: unknown.

    Hits are no requests of engines: hit rates, TTFT and utilization do not contain them.
    """

    hits: Annotated[int | None, Meta(description="requests answered without a replica")]
    misses: Annotated[int | None, Meta(description="cacheable requests that a replica answered")]
    bypassed: Annotated[int | None, Meta(description="requests of the same task groups that are not cacheable")]
    prompt_tokens: Annotated[int | None, Meta(description="of the hits")]
    generated_tokens: Annotated[int | None, Meta(description="of the hits")]
    # Without what prefix caches would have saved of it. Generation, which is saved too, has no measured rate.
    prefill: Annotated[Prefill, Meta(description="of those prompt tokens: at most this was saved in the window")]
    currency: str | None
    notes: tuple[str, ...]
    hit_ratio: Annotated[float | None, Meta(description="hits / (hits + misses)")] = None

    @property
    def cacheable(self) -> int | None:
        """Requests that the cache might have answered."""
        return None if self.hits is None or self.misses is None else self.hits + self.misses


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
    share = ratio(hits, hits + misses)
    return ResponseCacheFigures(hits, misses, bypassed, prompt, generated, prefill, currency, tuple(notes), share)


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
        found = f"{curve.fitted_requests} responses with cached tokens at the last fit" if curve else "not fitted yet"
        return PrefillRate(
            None,
            f"The prefill rate is unknown: {found}. It is fitted every ten minutes. If it stays unknown, stream "
            "responses, and start vLLM with --enable-prompt-tokens-details.",
        )
    return PrefillRate.of_fits(
        curve.prefill_rate,
        f"Learnt from {curve.prefill_fits:,} fit{'s' * (curve.prefill_fits != 1)}, each of up to an hour, until "
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
    rows = engine_counter_sums(list(serving), window, ("computed_prompt_tokens", "prefill_ms"), by="replica")
    known = [row.counts for row in rows if None not in row.counts.values()]
    tokens, prefill_ms = (sum(row[name] or 0 for row in known) for name in ("computed_prompt_tokens", "prefill_ms"))
    return ratio(1000 * tokens, prefill_ms)
