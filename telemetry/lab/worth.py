"""Is prefix routing worth it for a pool? Two verdicts from its own traffic, with their reasons. Pure.

Routing. The reachable hit rate limits what any placement can gain: below ``PLAIN_BELOW`` plain balancing is enough,
from ``WORTH_FROM`` on prefix routing is worth it, in between it is borderline. If a replay shows that round robin loses
less than ``MIN_GAIN`` all the same, because every replica caches the same few prefixes, plain balancing is enough too.

Caches. The working set is compared with the cache of one replica and with those of all replicas together.

Too little traffic gives no verdict (None) and names the number of requests that are needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import ceil

from telemetry.lab.breakdown import MAX_REACHABLE_ERROR, MIN_REQUESTS, Sums, reachable_error
from telemetry.lab.cache_grid import MIN_REUSED_REQUESTS, Placements, WorkingSet

PLAIN_BELOW, WORTH_FROM = 0.2, 0.3  # reachable hit rate
MIN_GAIN = 0.02  # of hit rate, that prefix routing must be able to bring
NORMAL_95 = 1.96  # standard errors of half a 95 % interval


class RoutingVerdict(StrEnum):
    """Whether prefix routing is worth it."""

    PLAIN = "plain_balancing"
    BORDERLINE = "borderline"
    WORTH = "worth_it"


class CacheVerdict(StrEnum):
    """How the working set fits the caches."""

    ONE_REPLICA = "fits_one_replica"
    FLEET = "fits_fleet"
    THRASHING = "thrashing"


@dataclass(frozen=True, slots=True)
class Assessment:
    """A verdict with its reason; None: unknown."""

    verdict: str | None  # a RoutingVerdict or a CacheVerdict
    summary: str
    reason: str
    advice: str = ""
    page: str = ""  # where to act: "what-if", "capacity" (the page Capacity and cost), "prompts" or "fleet"
    needed_requests: int | None = None  # for a verdict, if there are too few


@dataclass(frozen=True, slots=True)
class Caches:
    """What a pool's caches are compared by."""

    placements: Placements | None = None
    working_set: WorkingSet | None = None
    replicas: int = 0
    replica_tokens: int | None = None  # cache size of a replica, on average
    reason: str = ""  # why figures are unknown


def assess_routing(sums: Sums | None, caches: Caches) -> Assessment:
    """The verdict on routing; ``sums``: those of the breakdown."""
    error = None if sums is None else reachable_error(sums)
    needed = _needed_requests(sums, error)
    if sums is None or error is None or needed:
        return _unknown_routing(sums, needed)
    reachable, placements = sums.reachable_ratio, caches.placements
    reason = " ".join(_routing_reasons(reachable, error, sums.requests, caches))
    if caches.replicas == 1:
        return Assessment(RoutingVerdict.PLAIN, "One replica gets every request: routing changes nothing.", reason)
    if reachable < PLAIN_BELOW:
        return Assessment(
            RoutingVerdict.PLAIN,
            f"Plain balancing is enough: at most {100 * reachable:.0f} % of the prompt tokens could be reused.",
            reason,
            "Check whether varying text at the beginning of prompts prevents reuse.",
            "prompts",
        )
    if placements and placements.difference + NORMAL_95 * placements.standard_error < MIN_GAIN:
        summary = "Plain balancing is enough: much is reused, and every replica caches it with round robin as well."
        return Assessment(RoutingVerdict.PLAIN, summary, reason, "Compare strategies on this traffic.", "what-if")
    return _worth(RoutingVerdict.WORTH if reachable >= WORTH_FROM else RoutingVerdict.BORDERLINE, placements, reason)


def _worth(verdict: RoutingVerdict, placements: Placements | None, reason: str) -> Assessment:
    is_worth = verdict is RoutingVerdict.WORTH
    beginning = "Prefix routing is worth it" if is_worth else "Borderline"
    if placements is None:
        effect = "what round robin would lose is unknown" if is_worth else "what prefix routing would bring is unknown"
    else:
        points = round(100 * max(placements.difference, 0.0))
        gain = f"{points} point{'' if points == 1 else 's'} of hit rate"
        effect = f"round robin would lose up to {gain}" if is_worth else f"prefix routing would bring up to {gain}"
    advice = "Compare the active policy with others on this traffic, by a what-if, before you publish another one."
    return Assessment(verdict, f"{beginning}: {effect}.", reason, advice, "what-if")


def _needed_requests(sums: Sums | None, error: float | None) -> int | None:
    """Requests needed for a verdict; None if there are enough."""
    if sums is None or error is None or sums.requests < MIN_REQUESTS:
        return MIN_REQUESTS
    return ceil(sums.requests * (error / MAX_REACHABLE_ERROR) ** 2) if error > MAX_REACHABLE_ERROR else None


def _unknown_routing(sums: Sums | None, needed: int | None) -> Assessment:
    count = sums.requests if sums else 0
    return Assessment(
        None,
        f"Unknown: needs {'about ' if needed != MIN_REQUESTS else ''}{needed:,} requests, {count:,} were replayed.",
        f"The reachable hit rate must be known to {100 * MAX_REACHABLE_ERROR:.0f} points (standard error).",
        "Choose a longer time range, or wait.",
        needed_requests=needed,
    )


def _routing_reasons(reachable: float, error: float, requests: int, caches: Caches) -> Iterable[str]:
    margin, placements = NORMAL_95 * error, caches.placements
    crossed = [limit for limit in (PLAIN_BELOW, WORTH_FROM) if abs(reachable - limit) < margin]
    yield (
        f"Reachable hit rate {100 * reachable:.0f} % ± {100 * margin:.1f} points (95 %, {requests:,} requests); "
        f"limits: {100 * PLAIN_BELOW:.0f} % and {100 * WORTH_FROM:.0f} %."
    )
    if crossed:
        yield f"The interval includes {100 * crossed[0]:.0f} %: more requests may change the verdict."
    if placements is not None and caches.replicas > 1:
        yield (
            f"Replayed on {caches.replicas} empty caches, {placements.requests:,} requests of the last hour hit "
            f"{100 * placements.round_robin:.0f} % with round robin and {100 * placements.by_prefix:.0f} % with "
            f"placement by prefix, load aside: a difference of {100 * placements.difference:.0f} "
            f"± {100 * NORMAL_95 * placements.standard_error:.1f} points."
        )
        if placements.difference - placements.newer_difference > MIN_GAIN:
            yield (
                f"It was {100 * placements.newer_difference:.0f} points for the newer half of them: round robin's "
                "caches were still warming up."
            )
    elif placements is None:
        yield f"Placements were not compared: {caches.reason or 'too few requests in the last hour.'}"


def assess_caches(caches: Caches) -> Assessment:
    """The verdict on cache sizes."""
    working_set, replica_tokens = caches.working_set, caches.replica_tokens
    if working_set is None or replica_tokens is None:
        needed = None if caches.reason else MIN_REUSED_REQUESTS
        reason = caches.reason or f"Needs {needed} requests of the last hour that reuse a prefix."
        return Assessment(None, "Working set unknown.", reason, needed_requests=needed)
    fleet_tokens = replica_tokens * caches.replicas
    verdict = _fit(working_set.tokens, replica_tokens, fleet_tokens)
    reason = (
        f"Working set {_rounded(working_set.tokens)} tokens (95 %: {_rounded(working_set.low)} to "
        f"{_rounded(working_set.high)}, from {working_set.requests:,} requests with reuse in the last hour): the "
        "distinct tokens used between two uses of a prefix, for 90 % of the reused tokens. Cache of one replica "
        f"{_rounded(replica_tokens)}, of the fleet {_rounded(fleet_tokens)} tokens."
    )
    if {_fit(limit, replica_tokens, fleet_tokens) for limit in (working_set.low, working_set.high)} != {verdict}:
        reason += " The interval includes a limit: more requests may change the verdict."
    summary = _FITS[verdict][0].format(share=working_set.tokens / fleet_tokens)
    return Assessment(verdict, summary, reason, *_FITS[verdict][1:])


_FITS = {
    CacheVerdict.ONE_REPLICA: (
        "The working set fits in one replica: every replica can cache all of it, and more cache brings nothing.",
        "",
        "",
    ),
    CacheVerdict.FLEET: (
        "The working set (90 % of the reuse) fits the fleet, but not one replica: placement decides what stays cached.",
        "Keep each prefix on one replica; copies on several replicas use up what others need.",
        "what-if",
    ),
    CacheVerdict.THRASHING: (
        "Thrashing: the working set is {share:.1f} times the cache of the whole fleet, so prefixes are evicted before "
        "they are used again.",
        "Add cache or replicas.",
        "capacity",
    ),
}


def _fit(tokens: float, replica_tokens: int, fleet_tokens: int) -> CacheVerdict:
    if tokens <= replica_tokens:
        return CacheVerdict.ONE_REPLICA
    return CacheVerdict.FLEET if tokens <= fleet_tokens else CacheVerdict.THRASHING


def _rounded(tokens: float) -> str:
    """Tokens with three significant digits."""
    return f"{float(f'{tokens:.3g}'):,.0f}"
