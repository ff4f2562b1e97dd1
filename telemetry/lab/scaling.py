"""How many replicas a pool needs, from its own traffic: for its peak load, and for the prefixes that it keeps cached.

Theory of operation. A replica more or fewer changes two things: the load of each replica, and the cache of the pool.
The load is the pool's peak saturation times the number of replicas, divided by the new number; with fewer caches more
tokens must be computed, so a sweep's prefill time by number of replicas scales it. Replicas take minutes to start,
so the peak minute of the last hour counts, or the present if that is higher.

Scaling out needs the load to exceed ``TARGET``. Scaling in needs the load of the smaller pool to be at most
``SCALE_IN_TARGET``, a complete hour of measurements, and the hit rate to stay: of a calibrated sweep, at most
``MAX_HIT_RATE_LOSS`` less; else the caches that remain have the working set. The gap between both targets and the hour
are the hysteresis: a number that was recommended is not taken back by the next quiet minute. One recommendation at most
halves or doubles the pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil

TARGET = 0.7  # saturation; queueing delay grows as 1 / (1 - saturation), and a peak within a minute is higher
SCALE_IN_TARGET = 0.6  # lower than ``TARGET``, so that the next peak does not scale out again
MAX_HIT_RATE_LOSS = 0.02  # points / 100; the error of a calibrated replay is up to 0.03
MIN_KNOWN_MINUTES = 50  # of the last hour, before replicas are removed
MAX_FACTOR = 2  # of the number of replicas, in one step


class Limit(StrEnum):
    """What decides the recommended number."""

    PREFILL = "prefill"  # prompt tokens to compute
    KV_CACHE = "kv_cache"  # KV blocks of running requests
    PREFIX_CACHE = "prefix_cache"  # fewer caches would lose hits
    HYSTERESIS = "hysteresis"  # the load is between both targets, or measurements are too short


@dataclass(frozen=True, slots=True)
class Demand:
    """Load of a pool; None: unknown. Peaks are of one minute of the last hour, or of the present."""

    replicas: int  # that serve
    prefill_ratio: float | None  # peak share of their prefill rate, above 1 if they fell behind
    kv_usage_ratio: float | None  # peak, 0 to 1
    known_minutes: int  # of the last hour


@dataclass(frozen=True, slots=True)
class SizeFigures:
    """What a sweep predicts for a number of replicas."""

    hit_rate: float
    prefill_s: float
    is_overloaded: bool = False  # the queue of some replicas grows until the end


@dataclass(frozen=True, slots=True)
class Caching:
    """What is known about hits with fewer replicas; None: unknown."""

    sizes: Mapping[int, SizeFigures]  # by number of replicas, of a calibrated sweep; {}: none
    working_set_tokens: float | None
    replica_tokens: float | None  # cache of each replica
    hit_rate: float | None  # of the last hour


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A number of replicas, what decides it, and a sentence for operators."""

    replicas: int
    limit: Limit
    reason: str


def recommend(demand: Demand, caching: Caching) -> Recommendation | None:
    """The number of replicas that a pool needs; None if its load is unknown or no replica serves."""
    present = demand.replicas
    load, limit = _peak(demand)
    if load is None or not present:
        return None
    for_peak = _smallest(demand, caching, TARGET)
    if for_peak > present:
        reason = f"{_load_text(load, present)}; the target is {TARGET:.0%}."
        return Recommendation(min(for_peak, MAX_FACTOR * present), limit, reason)
    with_margin = max(min(_smallest(demand, caching, SCALE_IN_TARGET), present), ceil(present / MAX_FACTOR))
    if with_margin == present:
        return Recommendation(present, *_reason_to_stay(load, limit, for_peak, present))
    if demand.known_minutes < MIN_KNOWN_MINUTES:
        reason = f"Only {demand.known_minutes} minutes of the last hour were measured; scaling in needs an hour."
        return Recommendation(present, Limit.HYSTERESIS, reason)
    for_hits, why = fewest_for_hits(caching, present)
    if for_hits > with_margin:
        return Recommendation(for_hits, Limit.PREFIX_CACHE, why)
    reason = f"{_load_text(load, present)}, and fewer caches keep the hits."
    return Recommendation(with_margin, limit, reason)


def fewest_for_hits(caching: Caching, present: int) -> tuple[int, str]:
    """The fewest replicas, at most ``present``, that keep the hit rate, and why not fewer."""
    if present in caching.sizes:
        return _fewest_of_sweep(caching.sizes, present)
    if caching.working_set_tokens is not None and caching.replica_tokens:
        count = ceil(caching.working_set_tokens / caching.replica_tokens)
        reason = f"The working set of the last hour needs the caches of {_replicas(count)}; fewer would evict it."
        return min(max(count, 1), present), reason
    if caching.hit_rate is not None and caching.hit_rate <= MAX_HIT_RATE_LOSS:
        return 1, ""  # there are no hits to lose
    return present, "What fewer caches would cost is unknown: run a capacity sweep before you remove a replica."


def _fewest_of_sweep(sizes: Mapping[int, SizeFigures], present: int) -> tuple[int, str]:
    """A number between two sizes of the sweep has at least the hit rate of the smaller one."""
    kept, floor = present, sizes[present].hit_rate - MAX_HIT_RATE_LOSS
    for count in sorted((count for count in sizes if count < present), reverse=True):
        if sizes[count].is_overloaded:
            return kept, f"With {_replicas(count)} the queues would grow until the end."
        if sizes[count].hit_rate < floor:
            lost = sizes[present].hit_rate - sizes[count].hit_rate
            return kept, f"With {_replicas(count)} the hit rate would be {100 * lost:.0f} points lower."
        kept = count
    return kept, f"The capacity sweep has no figures for fewer than {_replicas(kept)}."


def _peak(demand: Demand) -> tuple[float | None, Limit]:
    """The higher of both loads; unknown without the prefill load, which every pool has."""
    if demand.prefill_ratio is None:
        return None, Limit.PREFILL
    if demand.kv_usage_ratio is not None and demand.kv_usage_ratio > demand.prefill_ratio:
        return demand.kv_usage_ratio, Limit.KV_CACHE
    return demand.prefill_ratio, Limit.PREFILL


def _smallest(demand: Demand, caching: Caching, target: float) -> int:
    """The fewest replicas with a load of at most ``target`` each; not more than ``MAX_FACTOR`` times the present."""
    counts = range(1, MAX_FACTOR * demand.replicas + 1)
    fitting = (count for count in counts if _load_with(count, demand, caching.sizes) <= target)
    return next(fitting, MAX_FACTOR * demand.replicas)


def _load_with(count: int, demand: Demand, sizes: Mapping[int, SizeFigures]) -> float:
    share = demand.replicas / count
    prefill = (demand.prefill_ratio or 0.0) * share * _work_ratio(count, demand.replicas, sizes)
    return max(prefill, (demand.kv_usage_ratio or 0.0) * share)


def _work_ratio(count: int, present: int, sizes: Mapping[int, SizeFigures]) -> float:
    """Prefill time with another number of replicas / with the present one; 1 if no sweep tells."""
    if present not in sizes or sizes[present].prefill_s <= 0:
        return 1.0
    smaller: Sequence[int] = [size for size in sizes if size <= count] or [min(sizes)]
    return sizes[max(smaller)].prefill_s / sizes[present].prefill_s


def _load_text(load: float, present: int) -> str:
    return f"The highest load, now or in a minute of the last hour, is {load:.0%} of {_replicas(present)}"


def _reason_to_stay(load: float, limit: Limit, for_peak: int, present: int) -> tuple[Limit, str]:
    text = _load_text(load, present)
    if for_peak < present:
        return Limit.HYSTERESIS, f"{text}; with one fewer it would be above {SCALE_IN_TARGET:.0%}."
    return limit, f"{text}; the target is {TARGET:.0%}."


def _replicas(count: int) -> str:
    return "1 replica" if count == 1 else f"{count} replicas"
