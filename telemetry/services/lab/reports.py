"""A pool before and after a time: hit rate, TTFT, prefill, money and load in two windows, with the changes between.

Around a rollout, each window has one revision of its policy, so they may be short. Traffic differs between them too, so
the reachable hit rate of each is shown: a hit rate that follows it was changed by the prompts, not by the fleet.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated

from django.db.models import QuerySet
from msgspec import Meta

from controlplane.errors import InvalidError
from controlplane.models import Event, Pool, Rollout
from telemetry.lab.costs import DAY_S, PrefillRate, Price, prefill_of
from telemetry.metrics.histograms import Merged
from telemetry.metrics.rates import ratio, sum_known
from telemetry.metrics.windows import ReachableShare, Window
from telemetry.services.figures.overview import quantile_s
from telemetry.services.figures.series import fit_window
from telemetry.services.lab.costs import basis_notes, prefill_rate_of
from telemetry.storage import sums
from telemetry.storage.dimension_sums import route_sums
from telemetry.storage.reachable import reachable_by_group, reachable_share

DEFAULT_SPAN = timedelta(hours=24)
MIN_SPAN, MAX_SPAN = timedelta(minutes=5), timedelta(days=30)
SHORTEST = timedelta(seconds=1)  # window, where another change came at once
FEW_REQUESTS = 100  # too few for a conclusion
MAX_EVENTS = 50


@dataclass(frozen=True, slots=True)
class ReportSide:
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
class WindowComparison:
    """A pool or task group before, after, and after minus before; None: either is unknown."""

    group: str  # "" for requests without one, and for the pool
    before: ReportSide
    after: ReportSide
    difference: dict[str, float | None]


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


def compared(group: str, before: ReportSide, after: ReportSide) -> WindowComparison:
    """Both sides with their differences."""
    pairs = {name: (getattr(before, name), getattr(after, name)) for name in COMPARED}
    differences = {name: None if None in pair else pair[1] - pair[0] for name, pair in pairs.items()}
    return WindowComparison(group, before, after, differences)


@dataclass(frozen=True, slots=True)
class ReportWindow:
    """The time that one side covers."""

    start: datetime
    end: datetime


@dataclass(frozen=True, slots=True)
class ReportWindows:
    """The windows that are compared."""

    before: ReportWindow
    after: ReportWindow


@dataclass(frozen=True, slots=True)
class Report:
    """The comparison of two windows of a pool."""

    pool: str
    windows: ReportWindows
    currency: str | None
    figures: WindowComparison
    groups: list[WindowComparison]
    limits: Annotated[tuple[str, ...], Meta(description="why a window is shorter than requested")]
    no_verdict: Annotated[tuple[str, ...], Meta(description="why the windows allow no conclusion")]
    notes: list[str]


@dataclass(frozen=True, slots=True)
class Windows:
    """The two windows of a report, and why they are shorter than requested."""

    before: Window
    after: Window
    limits: tuple[str, ...] = ()  # sentences


def report_windows(
    now: datetime,
    pool: Pool,
    *,
    at: datetime | None = None,
    rollout: Rollout | None = None,
    span: timedelta = DEFAULT_SPAN,
) -> Windows:
    """Windows of at most ``span`` before and after a time or a rollout; InvalidError. At most two queries.

    Around a rollout, each has one revision only: they end at the next change of its policy, and begin after the
    previous one. None begins before the pool existed. Without time and rollout, the time is one ``span`` ago.
    """
    ends_before = starts_after = at or now - span
    if not MIN_SPAN <= span <= MAX_SPAN:
        raise InvalidError("$.span", "expected a length of 5m to 30d")
    earliest, latest, limits = pool.created_at, now, []
    reason = f"The pool was created at {_time(earliest)}"
    if rollout is not None:
        ends_before, starts_after = rollout.started_at, rollout.finished_at or rollout.started_at
        of_policy = Rollout.objects.filter(revision__policy=rollout.revision.policy).select_related("revision")
        following = of_policy.filter(started_at__gt=rollout.started_at).order_by("started_at").first()
        if following is not None and following.started_at < starts_after + span:
            latest = following.started_at
            limits.append(
                f"Revision {following.revision.number} of the policy followed at {_time(latest)}, where the second "
                "window ends."
            )
        previous = of_policy.filter(started_at__lt=rollout.started_at).order_by("-started_at").first()
        if previous is not None:
            earliest = min(previous.finished_at or previous.started_at, ends_before)
            reason = f"Revision {previous.revision.number} of the policy was published at {_time(earliest)}"
    if now - starts_after < MIN_SPAN:
        raise InvalidError("$.at", "expected a time at least five minutes ago, so that there is data after it")
    if earliest > ends_before - SHORTEST:
        raise InvalidError("$.at", f"expected a time with traffic before it to compare with. {reason}")
    if earliest > ends_before - span:
        limits.insert(0, f"{reason}, where the first window begins.")
    before = _window(max(ends_before - span, earliest), ends_before)
    after = _window(starts_after, max(min(starts_after + span, latest), starts_after + SHORTEST))
    return Windows(before, after, tuple(limits))


def _window(start: datetime, end: datetime) -> Window:
    return fit_window(Window(start, end, (end - start).total_seconds()))


def _time(at: datetime) -> str:
    return f"{at:%d %b %H:%M:%S} UTC"


def events_between(pool: Pool, windows: Windows, visible: QuerySet[Event]) -> tuple[list[Event], bool]:
    """(events from the first window's start to the second one's end, newest first; whether there are more)."""
    within = visible.filter(pool=pool, at__gte=windows.before.start, at__lte=windows.after.end)
    events = list(within.order_by("-at", "-pk")[: MAX_EVENTS + 1])
    return events[:MAX_EVENTS], len(events) > MAX_EVENTS


def report_of(pool: Pool, windows: Windows) -> Report:
    """The report of a pool. A fixed number of queries."""
    rate, price = prefill_rate_of(pool), Price.of(pool.costs)
    before, after = (_sides(pool, window, rate, price) for window in (windows.before, windows.after))
    names = sorted({name for name in before.keys() | after.keys() if name is not None})
    figures = compared("", before[None], after[None])
    return Report(
        pool.name,
        ReportWindows(
            ReportWindow(windows.before.start, windows.before.end), ReportWindow(windows.after.start, windows.after.end)
        ),
        price.currency if price else None,
        figures,
        [compared(name, before.get(name, NOTHING), after.get(name, NOTHING)) for name in names],
        windows.limits,
        _no_verdict(figures, windows),
        _notes(figures, rate, price),
    )


NOTHING = ReportSide(None, None, None, None, None, None, 0, None, None, None, None)


def _sides(pool: Pool, window: Window, rate: PrefillRate, price: Price | None) -> dict[str | None, ReportSide]:
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
    ) -> ReportSide:
        return _side(rows, ttft, share, skew, covered_s=covered_s, rate=rate, price=price)

    groups: dict[str | None, ReportSide] = {
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
) -> ReportSide:
    total = {name: sum_known(getattr(row, name) for row in rows) for name in _TOTALS}
    prompt, cached = total["prompt_tokens"], total["cached_tokens"]
    reported = ratio(total["usage_reported"], total["ok_requests"])
    computed = None
    if prompt is not None and cached is not None and covered_s and reported:
        computed = (prompt - cached) / reported * DAY_S / covered_s
    prefill = prefill_of(computed, rate.tokens_per_s, price)
    return ReportSide(
        total["requests"],
        ratio(cached, prompt),
        reported,
        reachable.ratio if reachable else None,
        quantile_s(ttft, 0.5),
        quantile_s(ttft, 0.95),
        ttft.buckets.total if ttft else 0,
        ratio(total["failed"], total["requests"]),
        prefill.replica_seconds,
        prefill.money,
        skew,
    )


_TOTALS = ("requests", "failed", "prompt_tokens", "cached_tokens", "usage_reported", "ok_requests")


def _load_skew(pool: Pool, window: Window) -> float | None:
    """Requests of the busiest replica / mean of all that got any."""
    rows = route_sums([pool.name], window, ("requests",), by=("replica",), whole=True)
    loads = [requests for row in rows if row.key[0] and (requests := row.get("requests"))]
    return max(loads) * len(loads) / sum(loads) if loads else None


def _no_verdict(row: WindowComparison, windows: Windows) -> tuple[str, ...]:
    """Why the two windows allow no conclusion."""
    reasons = []
    for label, window, side in (("before", windows.before, row.before), ("after", windows.after, row.after)):
        if window.length_s < MIN_SPAN.total_seconds():
            reasons.append(f"No verdict: only {window.length_s / 60:.1f} minutes {label}.")
        elif side.has_few_requests:
            reasons.append(f"No verdict: only {side.requests or 0} requests {label}.")
    return tuple(reasons)


def _notes(row: WindowComparison, rate: PrefillRate, price: Price | None) -> list[str]:
    notes = []
    for label, side in (("before", row.before), ("after", row.after)):
        if side.reported_ratio is not None and side.reported_ratio < 0.95:
            notes.append(f"The hit rate {label} is based on {100 * side.reported_ratio:.0f} % of the responses.")
    if rate.tokens_per_s is not None and row.before.prefill_s_per_day is not None:
        notes.append(f"Prefill time is computed with one rate for both windows. {rate.source}")
    return notes + basis_notes(rate, price)
