"""Rule ``hit_rate_drop``: the hit rate fell below its level since the last change.

The newest bins are compared with what the same task groups reached since the last change, which is an improvement that
the detector found, or a revision, a scale-out or a restart. ``telemetry.alerts.detection`` has the detector. This
module has its settings, and turns a detection into the figures and the summary of an alert.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any

from django.conf import settings as django_settings

from telemetry.alerts.detection import Detection, GroupShortfall, Sensitivity, State
from telemetry.alerts.detection.detector import ALARM_SHARE
from telemetry.alerts.detection.level import Decline, Hour, find_decline
from telemetry.alerts.history_window import HistoryView, Source, WindowSum
from telemetry.alerts.hit_rate_series import bin_length_s
from telemetry.alerts.kinds.base import (
    ForS,
    KeepFiringS,
    Kind,
    MinRequests,
    MinTokens,
    Problem,
    RuleSettings,
    Scope,
    WarmUpS,
    duration,
    has_traffic,
    percent,
    setting,
)
from telemetry.alerts.verdict import POOL, Reason, Verdict, Verdicts, below_limit, no_data

POINT = 0.01
NAMED_GROUPS = 3  # task groups that a summary names
MIN_PART = 0.02  # of the shortfall: a task group with a smaller part is not listed


class HitRateDropSettings(RuleSettings, frozen=True):
    """Settings of ``hit_rate_drop``."""

    bin_s: Annotated[
        float,
        setting(
            "seconds",
            "Length of a bin, rounded up to whole scrape intervals. Longer bins find a drop later.",
            ge=5,
            le=60,
        ),
    ] = 10.0
    drop_points: Annotated[
        float, setting("points of 100", "Size of a drop to report. A smaller one becomes the new level.", ge=1, le=100)
    ] = 10.0
    quiet_days: Annotated[
        float,
        setting("days", "Target mean time between two false alarms; a longer one finds drops later.", ge=0.1, le=3650),
    ] = 70.0
    baseline_s: Annotated[
        float,
        setting(
            "seconds", "Period of the level, or the time since the last change if that is shorter.", ge=300, le=14_400
        ),
    ] = 3600.0
    accept_s: Annotated[
        float, setting("seconds", "A drop that lasts longer becomes the new level and resolves.", ge=300, le=14_400)
    ] = 3600.0
    days: Annotated[
        int,
        setting(
            "days",
            "Days before whose same hours reveal a slow decline; three of them are needed. 0: not looked for.",
            ge=0,
            le=28,
        ),
    ] = 7
    min_requests: MinRequests = 50.0
    min_tokens: MinTokens = 20_000.0
    warm_up_s: WarmUpS = 300.0
    for_s: ForS = 0.0
    keep_firing_s: KeepFiringS = 120.0

    @property
    def step_s(self) -> float:
        return bin_length_s(self.bin_s, django_settings.SCRAPE_INTERVAL_S)

    @property
    def days_back(self) -> int:
        return self.days

    @property
    def series_lookback_s(self) -> float:
        """The period of the level before the oldest drop that can still be firing."""
        return self.baseline_s + self.accept_s

    @property
    def warm_up_lookback_s(self) -> float:
        return self.warm_up_s

    @property
    def sensitivity(self) -> Sensitivity:
        return Sensitivity(
            self.drop_points * POINT,
            self.step_s,
            self.quiet_days,
            self.baseline_s,
            self.accept_s,
            self.min_requests,
            self.min_tokens,
        )

    def problem(self) -> Problem | None:
        """A level needs enough bins."""
        if self.baseline_s < 20 * self.bin_s:
            return "baseline_s", "expected at least 20 times bin_s"
        return None


def _evaluate(settings: HitRateDropSettings, view: HistoryView, group: str) -> Verdicts:
    """The detector's result at the newest bin, or a slow decline."""
    series = view.history.series
    if series is None:
        return {POOL: no_data(Reason.NO_READINGS)}
    verdict = verdict_of(settings, series.detect(settings.sensitivity, group, view.now), view.now)
    if verdict.reason is Reason.WITHIN and settings.days:
        hour = view.now.replace(minute=0, second=0, microsecond=0)
        decline = series.decline((settings, group, hour), lambda: _find_decline(settings, view, group))
        if decline is not None:
            return {POOL: _decline_verdict(settings, decline)}
    return {POOL: verdict}


def _decline_verdict(settings: HitRateDropSettings, decline: Decline) -> Verdict:
    figures = {
        "requests": decline.requests,
        "tokens": decline.tokens,
        "onset": _iso(decline.change_point),
        "drop_points": round((decline.level - decline.ratio) / POINT, 2),
        "days": decline.days,
    }
    limit = decline.level - settings.drop_points * POINT
    return below_limit(decline.ratio, limit, is_breach=True, baseline=decline.level, figures=figures)


def _find_decline(settings: HitRateDropSettings, view: HistoryView, group: str) -> Decline | None:
    hours = {
        at: Hour(hour.ratio, hour.queries, hour.requests or 0.0)
        for at, hour in view.history.hours.get(group, {}).items()
        if has_traffic(hour, settings) and hour.ratio is not None and hour.queries
    }
    drop = settings.drop_points * POINT
    return find_decline(hours, view.now, drop=drop, days=settings.days, quiet_days=settings.quiet_days)


def verdict_of(settings: HitRateDropSettings, detection: Detection | None, now: datetime) -> Verdict:
    """A detection as the verdict of a rule."""
    if detection is None or (now - detection.at).total_seconds() > 2 * settings.step_s:
        return no_data(Reason.NO_READINGS)
    figures = _figures(detection)
    if detection.level is None:
        return no_data(Reason.LITTLE_HISTORY, **figures)
    is_little = detection.requests < settings.min_requests or detection.prompt < settings.min_tokens
    if detection.ratio is None or is_little:
        return no_data(Reason.LITTLE_TRAFFIC, **figures)
    limit = detection.level - settings.drop_points * POINT
    is_breach = detection.state is State.DOWN
    return below_limit(detection.ratio, limit, is_breach=is_breach, baseline=detection.level, figures=figures)


def _figures(detection: Detection) -> dict[str, Any]:
    groups = [group for group in detection.groups if group.contribution > MIN_PART * max(detection.shortfall, 0.0)]
    return {
        "requests": detection.requests,
        "tokens": detection.prompt,
        "onset": _iso(detection.change_point),
        "level_since": _iso(detection.since),
        "steady_until": _iso(detection.steady_until),
        "comparable_since": _iso(detection.comparable_since),
        "worsened": detection.worsened,
        "drop_points": round(detection.shortfall / POINT, 2),
        "share_ratio": round(min(sum(group.share_now for group in groups), 1.0), 4) if detection.groups else None,
        "groups": [_group_figures(group) for group in groups],
        "score": round(detection.score, 3),
        "noise_points": None if detection.noise is None else round(detection.noise / POINT, 2),
        "mix_points": round(detection.mix / POINT, 2),
        "mix_since": _iso(detection.mix_since),
        "mix_groups": [
            {"name": share.group, "baseline_ratio": round(share.usual, 4), "share_ratio": round(share.current, 4)}
            for share in detection.shares[:NAMED_GROUPS]
        ],
    }


def _group_figures(group: GroupShortfall) -> dict[str, Any]:
    return {
        "name": group.group,
        "share_ratio": round(group.share_now, 4),
        "baseline_ratio": round(group.level, 4),
        "value_ratio": round(group.ratio, 4),
        "drop_points": round((group.level - group.ratio) / POINT, 2),
    }


def _iso(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat(timespec="seconds")


def _window_of(verdict: Verdict, now: datetime) -> WindowSum:
    """The time since the change point as one window, at the traffic mix before it."""
    tokens, change_point = verdict.figures.get("tokens"), verdict.figures.get("onset")
    hits = None if verdict.value is None or tokens is None else verdict.value * tokens
    start = datetime.fromisoformat(change_point) if change_point else now
    return WindowSum(start, tokens, hits, verdict.figures.get("requests"))


def _evaluate_window(settings: HitRateDropSettings, verdict: Verdict, window: WindowSum) -> Verdict:
    """The verdict on the same drop with another hit rate since its change point."""
    if verdict.baseline is None or window.ratio is None or verdict.limit is None:
        return verdict
    is_breach = verdict.baseline - window.ratio >= ALARM_SHARE * settings.drop_points * POINT
    return below_limit(
        window.ratio, verdict.limit, is_breach=is_breach, baseline=verdict.baseline, figures=verdict.figures
    )


def _summarize(scope: Scope, _: HitRateDropSettings, verdict: Verdict) -> str:
    if verdict.value is None or verdict.baseline is None:
        return f"Hit rate of {scope} dropped."
    points = (verdict.baseline - verdict.value) * 100
    return (
        f"Hit rate of {scope} is {percent(verdict.value)}, {points:.1f} points below its baseline "
        f"of {percent(verdict.baseline)}{_since(verdict.figures)}."
    )


def _since(figures: Mapping[str, Any]) -> str:
    """When the drop began, and in which task groups."""
    change_point = figures.get("onset")
    word = "after a second fall at" if figures.get("worsened") else "since"
    since = f" {word} {datetime.fromisoformat(change_point):%H:%M:%S} UTC" if change_point else ""
    names = [group["name"] or "no task group" for group in figures.get("groups") or ()]
    if names in ([], ["no task group"]):
        return since
    more = f" and {len(names) - NAMED_GROUPS} more" if len(names) > NAMED_GROUPS else ""
    return f"{since}, in {', '.join(names[:NAMED_GROUPS])}{more} ({percent(figures.get('share_ratio'))} of the tokens)"


HIT_RATE_DROP = Kind(
    name="hit_rate_drop",
    label="Hit rate drop",
    about="Compares the newest bins with what the same task groups reached since the last change: an improvement, a "
    "revision, a scale-out or a restart. A change of the traffic mix between task groups is reported as an event and "
    "is no drop. Gives no result where too little traffic would make it a guess.",
    settings=HitRateDropSettings,
    sources=frozenset({Source.BINS, Source.ENGINE_HOURS}),
    group_sources=frozenset({Source.BINS, Source.GROUP_HOURS}),
    unit="ratio",
    evaluate=_evaluate,
    summarize=_summarize,
    condition=lambda settings: (
        f"hit rate {settings.drop_points:g} points below its level since the last change "
        f"(of the last {duration(settings.baseline_s)} at most)"
    ),
    is_drop=True,
    figure="Hit rate",
    window_of=_window_of,
    evaluate_window=_evaluate_window,
)
