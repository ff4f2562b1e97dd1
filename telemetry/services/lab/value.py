"""What prefix caches saved by week or day, what better placement could have saved, and the changes between.

Saved tokens are those that engines reported to routers, from rollups, so a year is read cheaply. What placement could
have saved is the part of the prompts that the breakdown's replay lost to spreading and placement; its bins are kept for
``ROLLUP_5M_RETENTION_DAYS``. Each pool's present prefill rate makes hours of both, one rate for all steps, so that
steps compare; its price makes money of hours. Nothing is extrapolated to time without measurements.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

from django.db.models import OuterRef, QuerySet, Subquery, Sum
from django.db.models.functions import TruncDay, TruncWeek
from msgspec import Meta

from controlplane.models import PolicyRevision, Pool, ReplicaRole, ReplicaState, RevisionState, Rollout
from telemetry.lab.breakdown import MIN_REQUESTS, bin_start
from telemetry.lab.costs import PrefillRate, Price, prefill_of
from telemetry.metrics.rates import ratio, sum_known
from telemetry.metrics.windows import Window
from telemetry.models import BreakdownBin, Channel, NotificationKind, Topic
from telemetry.services.figures.overview import Fleet
from telemetry.services.lab.costs import ALL_TRAFFIC, all_known, prefill_rates_of
from telemetry.services.notifications.channels import notify_topic
from telemetry.storage.dimension_sums import coverage, route_sums

By = Literal["week", "day"]
STEPS: Mapping[By, tuple[timedelta, int]] = {"week": (timedelta(weeks=1), 52), "day": (timedelta(days=1), 14)}
YOUNG = timedelta(days=14)  # a younger installation is shown by day
MAX_CHANGES = 20
SHORT_H = 0.1  # fewer hours are shown as minutes
_COUNTS = ("requests", "ok_requests", "usage_reported", "prompt_tokens", "cached_tokens")
_Key = tuple[datetime, str, str]  # start of the step, pool, task group
_Lost = tuple[int, float, float]  # replayed requests, their prompt tokens, those lost to spreading and placement


@dataclass(frozen=True, slots=True)
class Amount:
    """Prefill in tokens, time and money; None: unknown."""

    tokens: float | None = None
    replica_hours: float | None = None
    gpu_hours: float | None = None  # known with a price, which has the GPUs of a replica
    money: float | None = None

    @property
    def hours(self) -> float | None:
        """GPU-hours, or replica-hours where the GPUs are unknown."""
        return self.replica_hours if self.gpu_hours is None else self.gpu_hours

    @property
    def unit(self) -> str:
        """The unit of ``hours``."""
        return "replica-hours" if self.gpu_hours is None else "GPU-hours"


@dataclass(frozen=True, slots=True)
class Value:
    """Figures of some requests; None: unknown."""

    requests: int | None
    prompt_tokens: Annotated[
        float | None, Meta(description="of all successful requests, if those without reported usage are like the rest")
    ]
    saved: Annotated[Amount, Meta(description="delivered from prefix caches")]
    placement: Annotated[Amount, Meta(description="lost to spreading and placement, which a policy could save")]
    saved_ratio: Annotated[float | None, Meta(description="saved / prompt tokens")]
    reported_ratio: Annotated[float | None, Meta(description="responses that report cached tokens / all")]
    replayed_ratio: Annotated[float | None, Meta(description="requests that ``placement`` rests on / all")]


@dataclass(frozen=True, slots=True)
class PoolValue(Value):
    """A pool."""

    pool: str


@dataclass(frozen=True, slots=True)
class GroupValue(PoolValue):
    """A task group; "": requests without one."""

    group: str


@dataclass(frozen=True, slots=True)
class Period(Value):
    """One week or day of all pools."""

    start: datetime
    end: Annotated[datetime, Meta(description="of the last one: now")]
    measured_hours: Annotated[float, Meta(description="for which routers were scraped")]
    pools: list[PoolValue]
    groups: list[GroupValue]

    @property
    def measured_s(self) -> float:
        return 3600 * self.measured_hours

    @property
    def missing(self) -> list[str]:
        """Pools with requests of which no hours are known, and so are not in those of all."""
        return [row.pool for row in self.pools if row.requests and row.saved.replica_hours is None]


@dataclass(frozen=True, slots=True)
class Change:
    """A published revision with the hit rate under the revision before and under itself; None: unknown."""

    rollout: Rollout
    previous: int | None  # number of the revision before
    before: float | None
    after: float | None

    @property
    def difference(self) -> float | None:
        return None if self.before is None or self.after is None else self.after - self.before


@dataclass(frozen=True, slots=True)
class ValueReport:
    """The value of caches for some pools. ``periods`` ascend and were measured, at least in part."""

    by: By
    periods: list[Period]
    chosen: Period | None  # None: nothing was measured
    rates: dict[str, PrefillRate]
    prices: dict[str, Price | None]

    @property
    def currency(self) -> str:
        """The one currency of all pools; "" if they have several, or none."""
        return _currency(self.prices.values())

    @property
    def hours_range(self) -> tuple[float, float] | None:
        """The saved hours of the chosen period at the ends of the prefill rates' ranges."""
        if self.chosen is None or self.chosen.saved.hours is None:
            return None
        figure = "replica_hours" if self.chosen.saved.gpu_hours is None else "gpu_hours"
        known = [
            (getattr(row.saved, figure), rate)
            for row in self.chosen.pools
            if row.saved.replica_hours is not None and (rate := self.rates[row.pool]).tokens_per_s
        ]
        return (
            sum(hours * rate.tokens_per_s / rate.high for hours, rate in known),
            sum(hours * rate.tokens_per_s / rate.low for hours, rate in known),
        )

    @property
    def sentence(self) -> str:
        """What caches saved in the chosen period, for people."""
        return "No traffic was measured yet." if self.chosen is None else _sentence(self.chosen, self.by, self.currency)

    @property
    def notes(self) -> list[str]:
        """What the figures of the chosen period rest on, and what is missing."""
        return [] if self.chosen is None else list(_notes(self, self.chosen))


def value_of(
    pools: Sequence[Pool], now: datetime, *, by: By | None = None, at: datetime | None = None, steps: int | None = None
) -> ValueReport:
    """The value of ``pools`` by week or day, with the period that contains ``at`` chosen, else the newest one.

    Six queries.
    """
    if by is None:
        is_young = now - min((pool.created_at for pool in pools), default=now) < YOUNG
        by = "day" if is_young else "week"
    step, default_steps = STEPS[by]
    first = _floor(now, by) - step * ((steps or default_steps) - 1)
    window = Window(first, now, step.total_seconds())
    names = [pool.name for pool in pools]
    learnt = prefill_rates_of(pools)
    rates, prices = {p.name: learnt[p.pk] for p in pools}, {p.name: Price.of(p.costs) for p in pools}
    counts: dict[_Key, dict[str, int | None]] = {
        (row.start, row.key[0], row.key[1]): row.counts
        for row in route_sums(names, window, _COUNTS, by=("pool", "group"))
    }
    lost = _lost_by_step(pools, window, by)
    covered = {row.start: row.covered_s for row in coverage(window) if row.covered_s}
    periods = []
    for start in window.starts():
        if start in covered:
            of_step = {key[1:]: row for key, row in counts.items() if key[0] == start}
            lost_of_step = {key[1:]: row for key, row in lost.items() if key[0] == start}
            periods.append(_period(start, min(start + step, now), covered[start], of_step, lost_of_step, rates, prices))
    chosen = next((period for period in periods if at is not None and period.start <= at < period.end), None)
    return ValueReport(by, periods, chosen or (periods[-1] if periods else None), rates, prices)


@dataclass(frozen=True, slots=True)
class Saved:
    """What caches saved in a time range, of the time that the replicas had."""

    amount: Amount
    whole_hours: float  # of the replicas of pools whose time is known, in the unit of ``amount``
    currency: str
    missing: list[Pool]  # pools with requests of which no time is known
    reason: str  # why, of the first of them
    unpriced: Pool | None  # a pool of known time without a price


def saved_in(fleet: Fleet, pools: Sequence[Pool], window: Window, now: datetime) -> Saved | None:
    """What the caches of some pools saved in a window until now; None without requests. At most three queries."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in fleet.router_sums(window)[0]:
        counts[row.pool].update({name: getattr(row, name) or 0 for name in _COUNTS})
    measured = [pool for pool in pools if counts[pool.name]["requests"]]
    if not measured:
        return None
    rates, prices = prefill_rates_of(measured), {pool.pk: Price.of(pool.costs) for pool in measured}
    values = [
        Value(**_figures(counts[pool.name], (), rates[pool.pk].tokens_per_s, prices[pool.pk])) for pool in measured
    ]
    missing = [pool for pool, value in zip(measured, values, strict=True) if value.saved.replica_hours is None]
    timed = [pool for pool in measured if pool not in missing]
    currency = _currency(prices[pool.pk] for pool in timed)
    amount = _total(values, currency)["saved"]
    replicas = Counter(
        row.pool_id for row in fleet.replicas if row.state != ReplicaState.DISABLED and row.role != ReplicaRole.DECODE
    )
    whole_s = 0.0
    for pool in timed:
        price = prices[pool.pk] if amount.gpu_hours is not None else None
        gpus = price.gpus_per_replica if price else 1.0
        seconds = (min(window.end, now) - max(window.start, pool.created_at)).total_seconds()
        whole_s += gpus * replicas[pool.pk] * max(0.0, seconds)  # an earlier pool of this name may have served
    reason = rates[missing[0].pk].source if missing else ""
    unpriced = next((pool for pool in timed if prices[pool.pk] is None), None)
    return Saved(amount, whole_s / 3600, currency, missing, reason, unpriced)


def _floor(at: datetime, by: By) -> datetime:
    """Midnight UTC before a time, of Monday for weeks."""
    day = at.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return day - timedelta(days=day.weekday()) if by == "week" else day


def _lost_by_step(pools: Sequence[Pool], window: Window, by: By) -> dict[_Key, _Lost]:
    """Sums of the bins with known cache sizes, which the terms need. One query."""
    truncate = TruncWeek if by == "week" else TruncDay
    bins = BreakdownBin.objects.filter(pool__in=pools, at__gte=bin_start(window.start), at__lt=window.end, reason="")
    sums = {f"sum_{name}": Sum(name) for name in ("requests", "prompt_tokens", "split", "predicted")}
    rows = bins.values("pool__name", "group", step=truncate("at", tzinfo=UTC)).annotate(**sums)
    return {
        (row["step"], row["pool__name"], row["group"]): (
            row["sum_requests"],
            row["sum_prompt_tokens"],
            max(0.0, row["sum_split"] - row["sum_predicted"]),
        )
        for row in rows
    }


def _period(
    start: datetime,
    end: datetime,
    covered_s: float,
    counts: Mapping[tuple[str, str], Mapping[str, int | None]],
    lost: Mapping[tuple[str, str], _Lost],
    rates: Mapping[str, PrefillRate],
    prices: Mapping[str, Price | None],
) -> Period:
    by_pool: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for key in counts:
        by_pool[key[0]].append(key)

    def figures(pool: str, keys: Sequence[tuple[str, str]]) -> dict[str, Any]:
        total = {name: sum_known(counts[key][name] for key in keys) for name in _COUNTS}
        replayed = [lost[key] for key in keys if key in lost]
        return _figures(total, replayed, rates[pool].tokens_per_s, prices[pool])

    pools = [PoolValue(**figures(pool, keys), pool=pool) for pool, keys in sorted(by_pool.items())]
    groups = [GroupValue(**figures(key[0], [key]), pool=key[0], group=key[1]) for key in sorted(counts)]
    whole = _total(pools, _currency(prices.values()))
    return Period(**whole, start=start, end=end, measured_hours=covered_s / 3600, pools=pools, groups=groups)


def _figures(
    total: Mapping[str, int | None], lost: Sequence[_Lost], rate: float | None, price: Price | None
) -> dict[str, Any]:
    """The fields of a ``Value``."""
    reported = ratio(total["usage_reported"], total["ok_requests"])
    prompt, cached = total["prompt_tokens"], total["cached_tokens"]
    found = {"requests": total["requests"], "reported_ratio": reported}
    if not reported or prompt is None or cached is None:
        unknown: dict[str, Any] = dict.fromkeys(("prompt_tokens", "saved_ratio", "replayed_ratio"))
        return {**found, **unknown, "saved": Amount(), "placement": Amount()}
    prompt_tokens = prompt / reported
    replayed, replayed_tokens, lost_tokens = map(sum, zip(*lost, strict=True)) if lost else (0, 0.0, 0.0)
    is_known = replayed >= MIN_REQUESTS and replayed_tokens
    return {
        **found,
        "prompt_tokens": prompt_tokens,
        "saved": _amount(cached / reported, rate, price),
        "placement": _amount(prompt_tokens * lost_tokens / replayed_tokens if is_known else None, rate, price),
        "saved_ratio": ratio(cached, prompt),
        "replayed_ratio": min(1.0, replayed / total["requests"]) if total["requests"] else None,
    }


def _amount(tokens: float | None, rate: float | None, price: Price | None) -> Amount:
    prefill = prefill_of(tokens, rate, price)
    hours = None if prefill.replica_seconds is None else prefill.replica_seconds / 3600
    return Amount(tokens, hours, hours * price.gpus_per_replica if hours is not None and price else None, prefill.money)


def _currency(prices: Iterable[Price | None]) -> str:
    """The one currency of some prices; "" if they have several, or none."""
    currencies = {price.currency for price in prices if price}
    return currencies.pop() if len(currencies) == 1 else ""


def _total(values: Sequence[Value], currency: str) -> dict[str, Any]:
    """The fields of all pools together.

    Time is of the pools of which it is known; money only if it is known of all those in one currency.
    """
    prompt_tokens, saved = _known(value.prompt_tokens for value in values), _add([it.saved for it in values], currency)
    return {
        "requests": sum_known(value.requests for value in values),
        "prompt_tokens": prompt_tokens,
        "saved": saved,
        "placement": _add([value.placement for value in values], currency),
        "saved_ratio": ratio(saved.tokens, prompt_tokens),
        "reported_ratio": None,
        "replayed_ratio": None,
    }


def _add(amounts: Sequence[Amount], currency: str) -> Amount:
    timed = [amount for amount in amounts if amount.replica_hours is not None]
    return Amount(
        _known(amount.tokens for amount in amounts),
        _known(amount.replica_hours for amount in timed),
        all_known(amount.gpu_hours for amount in timed),
        all_known(amount.money for amount in timed) if currency else None,
    )


def _known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


# --- words ------------------------------------------------------------------------------------------------


def period_name(period: Period, by: By) -> str:
    """A week or day for people."""
    if by == "day":
        return f"{period.start:%a %d %b %Y}"
    return f"the week of {period.start:%a %d %b %Y}"


def _sentence(period: Period, by: By, currency: str) -> str:
    name = period_name(period, by)
    when = f"In {name}" if by == "week" else f"On {name}"
    if period.saved.tokens is None:
        return f"{when}, what prefix caches saved is unknown: no response reports its cached tokens."
    share = f"{100 * (period.saved_ratio or 0.0):.0f} % of prefill"
    if period.missing and period.saved.hours is not None:
        share = f"without pool {', '.join(period.missing)}, and {share} of all pools"
    text = f"{when}, prefix caches saved {amount_text(period.saved, currency)}, {share}"
    if period.placement.tokens is None:
        return f"{text}. What better placement could have saved is unknown."
    return f"{text}; better placement could have saved another {amount_text(period.placement, currency)}."


def amount_text(amount: Amount, currency: str) -> str:
    """Hours, or minutes of little, and money; tokens where the hours are unknown."""
    if amount.hours is None:
        return f"{amount.tokens or 0.0:,.0f} tokens"
    money = "" if amount.money is None else f" ({amount.money:,.2f} {currency}".rstrip() + ")"
    if amount.hours < SHORT_H:
        return f"{60 * amount.hours:.1f} {amount.unit.replace('hours', 'minutes')}{money}"
    return f"{hours_text(amount.hours)} {amount.unit}{money}"


def hours_text(hours: float) -> str:
    """Three digits at least, so that the figures of a column have as many."""
    if 0 < hours < 0.0005:
        return "< 0.001"
    return f"{hours:,.{3 if hours < 1 else 2 if hours < 10 else 1 if hours < 100 else 0}f}"


def _length(seconds: float) -> str:
    return f"{seconds / 60:,.0f} minutes" if seconds < 2 * 3600 else f"{seconds / 3600:,.1f} hours"


def _notes(report: ValueReport, period: Period) -> Iterator[str]:
    whole_s = (period.end - period.start).total_seconds()
    yield (
        f"Counted from {period.requests or 0:,} requests in {_length(period.measured_s)} of {_length(whole_s)}; "
        "time that was not measured is not in any figure."
    )
    if bounds := report.hours_range:
        is_gpu = period.saved.gpu_hours is not None
        low, high = (amount_text(Amount(None, bound, bound if is_gpu else None), "") for bound in bounds)
        yield (
            f"By the range of the prefill rate, {low} to {high} were saved. One rate is used for all dates, so that "
            "they compare."
        )
    for value in period.pools:
        if not value.requests:
            continue
        name = value.pool
        rate = report.rates[name]
        if rate.tokens_per_s:
            yield f"Pool {name}: {rate.tokens_per_s:,.0f} prompt tokens/s of a replica. {rate.source}"
        else:
            yield f"Pool {name}: {rate.source}"
        if value.reported_ratio is not None and value.reported_ratio < ALL_TRAFFIC:
            yield (
                f"Pool {name}: {100 * value.reported_ratio:.0f} % of the responses report cached tokens; the others "
                "count with their mean."
            )
        if (
            value.placement.tokens is not None
            and value.replayed_ratio is not None
            and value.replayed_ratio < ALL_TRAFFIC
        ):
            yield (
                f"Pool {name}: what placement could have saved is extended from {100 * value.replayed_ratio:.0f} % of "
                "the requests, which were replayed."
            )
    if missing := period.missing:
        yield f"Hours and money do not include {', '.join(missing)}, of which they are unknown."
    yield "Saved time lowers the bill only if fewer replicas are run; until then it is room for more traffic."


# --- changes ----------------------------------------------------------------------------------------------


def changes_of(pools: Sequence[Pool], rollouts: QuerySet[Rollout], report: ValueReport) -> list[Change]:
    """The newest published revisions since the first period, newest first. Three queries."""
    if not report.periods:
        return []
    window = Window(report.periods[0].start, report.periods[-1].end, 1.0)
    earlier = PolicyRevision.objects.filter(
        policy=OuterRef("revision__policy"),
        number__lt=OuterRef("revision__number"),
        state__in=(RevisionState.LIVE, RevisionState.RETIRED),
    )
    rows = (
        rollouts.filter(revision__policy__pool__in=pools, started_at__gte=window.start)
        .select_related("revision__policy", "started_by")
        .annotate(previous=Subquery(earlier.order_by("-number").values("number")[:1]))
        .order_by("-started_at", "-pk")[:MAX_CHANGES]
    )
    sums = route_sums(
        [pool.name for pool in pools], window, ("prompt_tokens", "cached_tokens"), by=("revision",), whole=True
    )
    rates = {row.key[0]: ratio(row.get("cached_tokens"), row.get("prompt_tokens")) for row in sums}

    def rate(rollout: Any, number: int | None) -> float | None:
        return rates.get(f"{rollout.revision.policy.name} r{number}")

    return [Change(row, row.previous, rate(row, row.previous), rate(row, row.revision.number)) for row in rows]


# --- weekly summary ---------------------------------------------------------------------------------------

SUMMARY_AFTER = timedelta(hours=6)  # of Monday, UTC: the week is rolled up, and few people sleep everywhere


def notify_weekly_summary(now: datetime) -> bool:
    """Queue the summary of the last whole week for the channels that ask for it and have not got it; whether it is due.

    After an outage it is late and names its week.
    """
    step = STEPS["week"][0]
    start = _floor(now - SUMMARY_AFTER, "week") - step
    subscribed = Channel.objects.filter(enabled=True, topics__contains=[Topic.WEEKLY_SUMMARY]).exists()
    pools = list(Pool.objects.filter(created_at__lt=start + step).order_by("name")) if subscribed else []
    if not pools:
        return False
    key = f"week {start:%F}"
    notify_topic(Topic.WEEKLY_SUMMARY, NotificationKind.SUMMARY, "summary.weekly", _summary(pools, start), now, key=key)
    return True


def _summary(pools: Sequence[Pool], start: datetime) -> dict[str, Any]:
    """The data of the message."""
    step = STEPS["week"][0]
    report = value_of(pools, start + step - timedelta(microseconds=1), by="week", steps=2)
    weeks = {period.start: period for period in report.periods}
    period, before = weeks.get(start), weeks.get(start - step)
    sentence = f"In the week of {start:%a %d %b %Y}, no traffic was measured."
    facts: list[tuple[str, str]] = []
    if period is not None:
        sentence = _sentence(period, "week", report.currency)
        facts += [(f"Pool {row.pool}", _short(row, report.prices[row.pool])) for row in period.pools]
        facts += [("The week before", _short(before, None, report.currency))] if before else []
        facts += [("Basis", note) for note in list(_notes(report, period))[:1]]
    return {
        "state": "summary",
        "summary": sentence,
        "week": start.isoformat(),
        "facts": facts,
        "path": f"/value/?by=week&at={start:%F}",
    }


def _short(value: Value, price: Price | None, currency: str = "") -> str:
    if value.saved.tokens is None:
        return "unknown"
    text = f"{amount_text(value.saved, price.currency if price else currency)} saved"
    return f"{text}, {100 * (value.saved_ratio or 0.0):.0f} % of prefill"
