"""A pool before and after a time: hit rate, TTFT, prefill, money and load in two windows, with the changes between.

Both windows have the same length. Traffic differs between them too, so the reachable hit rate of each is shown: a hit
rate that follows it was changed by the prompts, not by the fleet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import QuerySet

from controlplane.errors import InvalidError
from controlplane.models import Event, Pool, Rollout
from telemetry.lab.costs import DAY_S, PrefillRate, Price, prefill_of
from telemetry.metrics.histograms import Merged
from telemetry.metrics.rates import ratio, sum_known
from telemetry.metrics.windows import ReachableShare, Window
from telemetry.services.figures.overview import quantile_s
from telemetry.services.figures.series import fit_window
from telemetry.services.lab.costs import prefill_rate_of
from telemetry.storage import sums
from telemetry.storage.dimension_sums import route_sums
from telemetry.storage.reachable import reachable_by_group, reachable_share

DEFAULT_SPAN = timedelta(hours=24)
MIN_SPAN, MAX_SPAN = timedelta(minutes=5), timedelta(days=30)
FEW_REQUESTS = 100  # too few for a conclusion
MAX_EVENTS = 50


@dataclass(frozen=True, slots=True)
class Side:
    """Figures of one window; None: unknown. Hit rate and TTFT are those of the routers."""

    requests: int | None
    hit_rate: float | None
    reported_ratio: float | None  # share of successful responses that report cached tokens
    reachable: float | None
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    timed_requests: int  # requests with a TTFT
    failed_ratio: float | None
    prefill_s_per_day: float | None  # of replicas
    money_per_day: float | None  # of that prefill
    load_max_over_mean: float | None  # requests of replicas; None: of a task group, or no longer stored

    @property
    def has_few_requests(self) -> bool:
        """Whether there are too few requests for a conclusion."""
        return (self.requests or 0) < FEW_REQUESTS


@dataclass(frozen=True, slots=True)
class Comparison:
    """A pool or task group before and after."""

    name: str  # of the task group; "" for requests without one, and for the pool
    before: Side
    after: Side

    def difference(self, name: str) -> float | None:
        """After minus before; None if either is unknown."""
        before, after = getattr(self.before, name), getattr(self.after, name)
        return None if before is None or after is None else after - before

    def as_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "before": asdict(self.before),
            "after": asdict(self.after),
            "difference": {name: self.difference(name) for name in COMPARED},
        }


COMPARED = (
    "requests",
    "hit_rate",
    "reachable",
    "ttft_p50_s",
    "ttft_p95_s",
    "failed_ratio",
    "prefill_s_per_day",
    "money_per_day",
    "load_max_over_mean",
)


@dataclass(frozen=True, slots=True)
class Report:
    """The comparison of two windows of a pool."""

    before: Window
    after: Window
    pool: Comparison
    groups: list[Comparison]
    events: list[Event]  # from the first window's start to the second one's end, newest first
    more_events: bool
    rate: PrefillRate
    price: Price | None
    notes: list[str]


def report_windows(
    now: datetime, *, at: datetime | None = None, rollout: Rollout | None = None, span: timedelta = DEFAULT_SPAN
) -> tuple[Window, Window]:
    """Two windows of equal length, before and after a time or a rollout; InvalidError.

    They are shorter than ``span`` if less time has passed since. Without time and rollout, the time is one ``span``
    ago.
    """
    before = after = at or now - span
    if rollout is not None:
        before, after = rollout.started_at, rollout.finished_at or rollout.started_at
    if not MIN_SPAN <= span <= MAX_SPAN:
        raise InvalidError("$.span", "expected a length of 5m to 30d")
    span = min(span, now - after)
    if span < MIN_SPAN:
        raise InvalidError("$.at", "expected a time at least five minutes ago, so that there is data after it")
    step_s = span.total_seconds()
    return fit_window(Window(before - span, before, step_s)), fit_window(Window(after, after + span, step_s))


def report_of(pool: Pool, before: Window, after: Window, visible_events: QuerySet[Event]) -> Report:
    """The report of a pool. A fixed number of queries."""
    rate, price = prefill_rate_of(pool, after.end), Price.of(pool.costs)
    sides = [_sides(pool, window, rate, price) for window in (before, after)]
    names = sorted({name for groups in sides for name in groups if name is not None})
    events = list(
        visible_events.filter(pool=pool, at__gte=before.start, at__lte=after.end).order_by("-at", "-pk")[
            : MAX_EVENTS + 1
        ]
    )
    pool_row = Comparison("", sides[0][None], sides[1][None])
    return Report(
        before,
        after,
        pool_row,
        [Comparison(name, *(groups.get(name, NOTHING) for groups in sides)) for name in names],
        events[:MAX_EVENTS],
        len(events) > MAX_EVENTS,
        rate,
        price,
        _notes(pool_row, rate, price),
    )


NOTHING = Side(None, None, None, None, None, None, 0, None, None, None, None)


def _sides(pool: Pool, window: Window, rate: PrefillRate, price: Price | None) -> dict[str | None, Side]:
    """The figures of each task group; None: of the pool."""
    rows, coverage = sums.router_sums([pool.name], window, whole=True)
    covered_s = sum(step.covered_s for step in coverage)
    ttft = sums.router_ttft([pool.name], window, whole=True)
    by_group = {
        key[1]: merged for (key, _), merged in sums.router_ttft([pool.name], window, by="group", whole=True).items()
    }
    reachable = reachable_by_group([pool.name], window)

    def side(
        rows: list[sums.RouterSums], ttft: Merged | None, share: ReachableShare | None, skew: float | None
    ) -> Side:
        return _side(rows, ttft, share, skew, covered_s=covered_s, rate=rate, price=price)

    groups: dict[str | None, Side] = {
        row.group: side([row], by_group.get(row.group), reachable.get((pool.name, row.group)), None) for row in rows
    }
    whole = sums.merge_histograms(ttft.values())
    groups[None] = side(rows, whole, reachable_share([pool.name], window), _load_skew(pool, window))
    return groups


def _side(
    rows: list[sums.RouterSums],
    ttft: Merged | None,
    reachable: ReachableShare | None,
    skew: float | None,
    *,
    covered_s: float,
    rate: PrefillRate,
    price: Price | None,
) -> Side:
    total = {name: sum_known(getattr(row, name) for row in rows) for name in _TOTALS}
    prompt, cached = total["prompt_tokens"], total["cached_tokens"]
    reported = ratio(total["usage_reported"], total["completed"])
    computed = None
    if prompt is not None and cached is not None and covered_s and reported:
        computed = (prompt - cached) / reported * DAY_S / covered_s
    prefill = prefill_of(computed, rate.tokens_per_s, price)
    return Side(
        total["requests"],
        ratio(cached, prompt),
        reported,
        reachable.ratio if reachable else None,
        quantile_s(ttft, 0.5),
        quantile_s(ttft, 0.95),
        ttft.buckets.total if ttft else 0,
        ratio(total["failed"], total["requests"]),
        prefill.seconds,
        prefill.money,
        skew,
    )


_TOTALS = ("requests", "failed", "prompt_tokens", "cached_tokens", "usage_reported", "completed")


def _load_skew(pool: Pool, window: Window) -> float | None:
    """Requests of the busiest replica / mean of all that got any."""
    rows = route_sums([pool.name], window, ("requests",), by=("replica",), whole=True)
    loads = [requests for row in rows if row.key[0] and (requests := row.get("requests"))]
    return max(loads) * len(loads) / sum(loads) if loads else None


def _notes(row: Comparison, rate: PrefillRate, price: Price | None) -> list[str]:
    notes = [
        f"Only {side.requests or 0} requests {label}: too few for a conclusion."
        for label, side in (("before", row.before), ("after", row.after))
        if side.has_few_requests
    ]
    for label, side in (("before", row.before), ("after", row.after)):
        if side.reported_ratio is not None and side.reported_ratio < 0.95:
            notes.append(f"The hit rate {label} is based on {100 * side.reported_ratio:.0f} % of the responses.")
    if rate.tokens_per_s is None:
        notes.append(rate.source)
    elif row.before.prefill_s_per_day is not None:
        notes.append(f"Prefill time is computed with one rate for both windows. {rate.source}")
    if price is None:
        notes.append("No price is set in the pool's settings, so no money is shown.")
    return notes


def report_as_json(report: Report) -> Mapping[str, Any]:
    """As JSON values."""
    return {
        "windows": {
            name: {"start": window.start, "end": window.end}
            for name, window in (("before", report.before), ("after", report.after))
        },
        "currency": report.price.currency if report.price else None,
        "figures": report.pool.as_json(),
        "groups": [{"group": row.name, **row.as_json()} for row in report.groups],
        "events": [{"at": event.at, "kind": event.kind, "summary": event.summary} for event in report.events],
        "more_events": report.more_events,
        "notes": report.notes,
    }
