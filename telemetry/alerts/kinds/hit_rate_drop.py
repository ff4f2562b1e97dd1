"""The hit rate fell below its own baseline.

Theory of operation. The newest window's hit rate is compared with what is usual at this hour: the median over the days
before of this hour's hit rate, each the sum of its hits over the sum of its queries. Where fewer than ``MIN_DAYS`` of
them have enough traffic, because the fleet is young or idle at this hour, the baseline is the median of the windows of
the last ``baseline_s`` seconds, of which ``MIN_WINDOWS`` are enough. A window counts only with enough traffic, here and
there, since a rate of few tokens says nothing. While an alert is open the windows of the baseline stay those of the
time before it began, or a long drop would become its own standard; after ``baseline_s`` it does, and the alert ends.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Annotated

from msgspec import Meta

from telemetry.alerts.kinds.base import (
    Asked,
    Fault,
    ForS,
    KeepFiringS,
    Kind,
    MinRequests,
    MinTokens,
    WarmUpS,
    Where,
    WindowS,
    WindowSettings,
    length,
    percent,
)
from telemetry.alerts.kinds.cold import unless_cold
from telemetry.alerts.kinds.traffic import basis_of, has_traffic, silence_of, traffic_of
from telemetry.alerts.past import Seen, Source, WindowSum
from telemetry.alerts.verdict import POOL, Answer, Reason, Verdict, Verdicts, no_data

MIN_WINDOWS = 3  # with enough traffic, for a baseline of windows
MIN_DAYS = 3  # and of days
POINT = 0.01


class HitRateDropSettings(WindowSettings, frozen=True):
    """Settings of ``hit_rate_drop``."""

    window_s: WindowS = 60.0
    days: Annotated[
        int,
        Meta(
            ge=0,
            le=28,
            description="Days back whose same hour the baseline is the median of, once three of them have traffic; 0: "
            "recent windows alone.",
            extra={"unit": "days"},
        ),
    ] = 7
    baseline_s: Annotated[
        float,
        Meta(
            ge=60,
            le=86_400,
            description="Recent history whose median is the baseline where days are too few.",
            extra={"unit": "seconds"},
        ),
    ] = 3600.0
    drop_points: Annotated[
        float,
        Meta(ge=1, le=100, description="That far below the baseline is too far.", extra={"unit": "points of 100"}),
    ] = 15.0
    min_requests: MinRequests = 50.0
    min_tokens: MinTokens = 20_000.0
    warm_up_s: WarmUpS = 300.0
    for_s: ForS = 10.0
    keep_firing_s: KeepFiringS = 120.0

    @property
    def reach_s(self) -> float:
        """The baseline's windows and the newest one."""
        return self.baseline_s + 2 * self.window_s

    @property
    def open_reach_s(self) -> float:
        """The same before an alert that is as old as it may be."""
        return 2 * self.baseline_s + 2 * self.window_s

    @property
    def days_back(self) -> int:
        """Whose same hour is looked at."""
        return self.days

    @property
    def warm_up_reach_s(self) -> float:
        """The warm-up."""
        return self.warm_up_s

    def fault(self) -> Fault | None:
        """A baseline needs its windows."""
        if self.baseline_s < self.window_s * MIN_WINDOWS:
            return "baseline_s", f"expected at least {MIN_WINDOWS} times window_s"
        return None


def judge(settings: HitRateDropSettings, seen: Seen, asked: Asked) -> Verdicts:
    """Compare the newest window with what is usual."""
    windows = seen.windows(asked.group, settings.open_reach_s)
    days = seen.same_hour(asked.group, settings.days) if settings.days else []
    past = history(settings, windows, seen.now, (asked.opened or {}).get(POOL))
    verdict = compare(settings, windows[-1], past, days)
    if not asked.group:
        verdict = unless_cold(verdict, seen, settings.warm_up_s, partial(compare, settings, past=past, days=days))
    return {POOL: verdict}


def compare(
    settings: HitRateDropSettings, newest: WindowSum, past: Sequence[WindowSum], days: Sequence[WindowSum] = ()
) -> Verdict:
    """Judge a window by this hour of other days, or by the windows before it."""
    figures: dict[str, object] = dict(traffic_of(newest))
    silent = silence_of(newest, settings)
    if silent or newest.ratio is None:
        return no_data(silent or Reason.LITTLE_TRAFFIC, **figures)
    rates, usual = _rates(settings, days), "days"
    if len(rates) < MIN_DAYS:
        rates, usual = _rates(settings, past), "windows"
    figures |= {"baseline_of": usual, "windows": len(rates)}
    if usual == "windows" and len(rates) < MIN_WINDOWS:
        return Verdict(Answer.NO_DATA, Reason.LITTLE_HISTORY, value=newest.ratio, figures=figures)
    baseline = statistics.median(rates)
    limit = baseline - settings.drop_points * POINT
    is_below = newest.ratio <= limit + 1e-9
    answer, reason = (Answer.BREACH, Reason.BELOW) if is_below else (Answer.OK, Reason.WITHIN)
    return Verdict(answer, reason, newest.ratio, limit, baseline, figures=figures)


def history(
    settings: HitRateDropSettings, windows: Sequence[WindowSum], now: datetime, opened_at: datetime | None
) -> list[WindowSum]:
    """The windows of the baseline: up to the newest one, or up to where an open alert began."""
    start, end = baseline_span(settings, now, opened_at)
    length_s = timedelta(seconds=settings.window_s)
    return [window for window in windows if window.start >= start and window.start + length_s <= end]


def baseline_span(
    settings: HitRateDropSettings, now: datetime, opened_at: datetime | None
) -> tuple[datetime, datetime]:
    """From when to when the baseline's history reaches."""
    window, reach = timedelta(seconds=settings.window_s), timedelta(seconds=settings.baseline_s)
    is_its_own_standard = opened_at is None or now - opened_at > reach
    end = (now if opened_at is None or is_its_own_standard else opened_at) - window
    return end - reach, end


def _rates(settings: HitRateDropSettings, windows: Sequence[WindowSum]) -> list[float]:
    return [rate for window in windows if has_traffic(window, settings) and (rate := window.ratio) is not None]


def sentence(where: Where, settings: HitRateDropSettings, verdict: Verdict) -> str:  # noqa: ARG001 - every kind's is called so
    """What is wrong."""
    if verdict.value is None or verdict.baseline is None:
        return f"Hit rate of {where.words} dropped."
    points = (verdict.baseline - verdict.value) * 100
    return (
        f"Hit rate of {where.words} is {percent(verdict.value)}, {points:.1f} points below its baseline "
        f"of {percent(verdict.baseline)}.{basis_of(verdict)}"
    )


def finds(settings: HitRateDropSettings) -> str:
    """What it looks for."""
    usual = f"this hour's median of the last {settings.days} days" if settings.days else "the median"
    return (
        f"a hit rate {settings.drop_points:g} points below {usual} (else of the last {length(settings.baseline_s)}), "
        f"for {length(settings.for_s)}"
    )


KIND = Kind(
    name="hit_rate_drop",
    label="Hit rate drop",
    about="Compares the hit rate with what is usual at this hour of the day, or in the last hour while the fleet has "
    "not seen three days yet. Stays silent where too little traffic would make that a guess.",
    settings=HitRateDropSettings,
    sources=frozenset({Source.ENGINES, Source.ENGINE_HOURS}),
    group_sources=frozenset({Source.GROUPS, Source.GROUP_HOURS}),
    unit="ratio",
    judge=judge,
    sentence=sentence,
    finds=finds,
    is_drop=True,
    figure="Hit rate",
)
