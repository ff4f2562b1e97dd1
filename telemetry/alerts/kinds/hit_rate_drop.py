"""The hit rate fell below its level since the last change.

Theory of operation. The newest bins are compared with what the same task groups reached since the last change, which is
an improvement that the detector found itself, or a revision, a scale or a restart. The detector is
``telemetry.alerts.detection``; here are its settings, its words, and what an alert keeps of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any

from django.conf import settings as django_settings
from msgspec import Meta

from telemetry.alerts.detection import Detection, GroupShortfall, Sensitivity, State
from telemetry.alerts.detection.detector import TELLING
from telemetry.alerts.detection.level import Decline, Hour, find_decline
from telemetry.alerts.history_window import Seen, Source, WindowSum
from telemetry.alerts.kinds.base import (
    Asked,
    Fault,
    ForS,
    KeepFiringS,
    Kind,
    MinRequests,
    MinTokens,
    RuleSettings,
    WarmUpS,
    Where,
    has_traffic,
    length,
    percent,
)
from telemetry.alerts.series import bin_length_s
from telemetry.alerts.verdict import POOL, Reason, Result, Verdict, Verdicts, no_data

POINT = 0.01
TOP = 3  # task groups that a sentence names
SHARE = 0.02  # of the shortfall: a task group with less is not named


class HitRateDropSettings(RuleSettings, frozen=True):
    """Settings of ``hit_rate_drop``."""

    bin_s: Annotated[
        float,
        Meta(
            ge=5,
            le=60,
            description="Length of a bin, rounded up to whole scrape intervals. Longer bins find a drop later.",
            extra={"unit": "seconds"},
        ),
    ] = 10.0
    drop_points: Annotated[
        float,
        Meta(ge=1, le=100, description="The drop worth knowing. A smaller one becomes the new level.",
             extra={"unit": "points of 100"}),
    ] = 10.0  # fmt: skip
    quiet_days: Annotated[
        float,
        Meta(
            ge=0.1,
            le=3650,
            description="Wanted mean time between two false alarms; a longer one finds drops later.",
            extra={"unit": "days"},
        ),
    ] = 70.0
    baseline_s: Annotated[
        float,
        Meta(
            ge=300,
            le=14_400,
            description="The level is that of so long, or of the time since the last change if that is shorter.",
            extra={"unit": "seconds"},
        ),
    ] = 3600.0
    accept_s: Annotated[
        float,
        Meta(
            ge=300,
            le=14_400,
            description="A drop that lasts longer becomes the new level, and its alert ends.",
            extra={"unit": "seconds"},
        ),
    ] = 3600.0
    days: Annotated[
        int,
        Meta(
            ge=0,
            le=28,
            description="A slow decline is looked for against the same hours of so many days before, of which three "
            "are needed; 0: it is not.",
            extra={"unit": "days"},
        ),
    ] = 7
    min_requests: MinRequests = 50.0
    min_tokens: MinTokens = 20_000.0
    warm_up_s: WarmUpS = 300.0
    for_s: ForS = 0.0
    keep_firing_s: KeepFiringS = 120.0

    @property
    def step_s(self) -> float:
        """A bin."""
        return bin_length_s(self.bin_s, django_settings.SCRAPE_INTERVAL_S)

    @property
    def days_back(self) -> int:
        """Whose hours are looked at."""
        return self.days

    @property
    def series_reach_s(self) -> float:
        """The level's time, and that of a drop that is as old as it may be."""
        return self.baseline_s + self.accept_s

    @property
    def warm_up_reach_s(self) -> float:
        """The warm-up."""
        return self.warm_up_s

    @property
    def sensitivity(self) -> Sensitivity:
        """What the detector is told."""
        return Sensitivity(
            self.drop_points * POINT,
            self.step_s,
            self.quiet_days,
            self.baseline_s,
            self.accept_s,
            self.min_requests,
            self.min_tokens,
        )

    def fault(self) -> Fault | None:
        """A level needs its bins."""
        if self.baseline_s < 20 * self.bin_s:
            return "baseline_s", "expected at least 20 times bin_s"
        return None


def judge(settings: HitRateDropSettings, seen: Seen, asked: Asked) -> Verdicts:
    """What the detector says at the newest bin."""
    series = seen.past.series
    if series is None:
        return {POOL: no_data(Reason.NO_READINGS)}
    verdict = verdict_of(settings, series.detect(settings.sensitivity, asked.group, seen.now), seen.now)
    if verdict.result is Result.OK and settings.days:
        verdict = slow_verdict(settings, seen, asked.group) or verdict
    return {POOL: verdict}


def slow_verdict(settings: HitRateDropSettings, seen: Seen, group: str) -> Verdict | None:
    """A decline over hours as a rule's answer; None where there is none."""
    series, hour = seen.past.series, seen.now.replace(minute=0, second=0, microsecond=0)
    if series is None:
        return None
    found = series.decline((settings, group, hour), lambda: _decline(settings, seen, group))
    if found is None:
        return None
    figures = {
        "requests": found.requests,
        "tokens": found.tokens,
        "onset": _moment(found.onset),
        "drop_points": round((found.level - found.ratio) / POINT, 2),
        "days": found.days,
    }
    limit = found.level - settings.drop_points * POINT
    return Verdict(Result.BREACH, Reason.BELOW, found.ratio, limit, found.level, figures=figures)


def _decline(settings: HitRateDropSettings, seen: Seen, group: str) -> Decline | None:
    hours = {
        at: Hour(hour.ratio, hour.queries, hour.requests or 0.0)
        for at, hour in seen.past.hours.get(group, {}).items()
        if has_traffic(hour, settings) and hour.ratio is not None and hour.queries
    }
    return find_decline(
        hours, seen.now, drop=settings.drop_points * POINT, days=settings.days, quiet_days=settings.quiet_days
    )


def verdict_of(settings: HitRateDropSettings, found: Detection | None, now: datetime) -> Verdict:
    """A detection as a rule's answer."""
    if found is None or (now - found.at).total_seconds() > 2 * settings.step_s:
        return no_data(Reason.NO_READINGS)
    figures = _figures(found)
    if found.level is None or found.ratio is None:
        return Verdict(Result.NO_DATA, Reason.LITTLE_HISTORY, figures=figures)
    is_down = found.state is State.DOWN
    if found.requests < settings.min_requests or found.prompt < settings.min_tokens:
        return no_data(Reason.LITTLE_TRAFFIC, **figures)
    limit = found.level - settings.drop_points * POINT
    answer, reason = (Result.BREACH, Reason.BELOW) if is_down else (Result.OK, Reason.WITHIN)
    return Verdict(answer, reason, found.ratio, limit, found.level, figures=figures)


def _figures(found: Detection) -> dict[str, Any]:
    fallen = [one for one in found.groups if one.points > SHARE * max(found.shortfall, 0.0)]
    return {
        "requests": found.requests,
        "tokens": found.prompt,
        "onset": _moment(found.onset),
        "level_since": _moment(found.since),
        "drop_points": round(found.shortfall / POINT, 2),
        "share_ratio": round(min(sum(one.share for one in fallen), 1.0), 4) if found.groups else None,
        "groups": [_group(one) for one in fallen],
        "score": round(found.score, 3),
        "noise_points": None if found.noise is None else round(found.noise / POINT, 2),
        "mix_points": round(found.mix / POINT, 2),
        "mix_since": _moment(found.mix_since),
        "mix_groups": [
            {"name": one.group, "usual_ratio": round(one.usual, 4), "share_ratio": round(one.now, 4)}
            for one in found.shares[:TOP]
        ],
    }


def _group(one: GroupShortfall) -> dict[str, Any]:
    return {
        "name": one.group,
        "share_ratio": round(one.share, 4),
        "baseline_ratio": round(one.level, 4),
        "value_ratio": round(one.ratio, 4),
        "drop_points": round(one.points / POINT, 2),
    }


def _moment(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat(timespec="seconds")


def window_of(verdict: Verdict, now: datetime) -> WindowSum:
    """The time since the onset as one window, at the mix of before."""
    tokens, onset = verdict.figures.get("tokens"), verdict.figures.get("onset")
    hits = None if verdict.value is None or tokens is None else verdict.value * tokens
    return WindowSum(datetime.fromisoformat(onset) if onset else now, tokens, hits, verdict.figures.get("requests"))


def judge_window(settings: HitRateDropSettings, verdict: Verdict, window: WindowSum) -> Verdict:
    """What is said of the same drop with another hit rate since its onset."""
    if verdict.baseline is None or window.ratio is None:
        return verdict
    is_drop = verdict.baseline - window.ratio >= TELLING * settings.drop_points * POINT
    answer, reason = (Result.BREACH, Reason.BELOW) if is_drop else (Result.OK, Reason.WITHIN)
    return Verdict(answer, reason, window.ratio, verdict.limit, verdict.baseline, figures=verdict.figures)


def sentence(where: Where, settings: HitRateDropSettings, verdict: Verdict) -> str:  # noqa: ARG001 - every kind's is called so
    """What is wrong."""
    if verdict.value is None or verdict.baseline is None:
        return f"Hit rate of {where.words} dropped."
    points = (verdict.baseline - verdict.value) * 100
    return (
        f"Hit rate of {where.words} is {percent(verdict.value)}, {points:.1f} points below its baseline "
        f"of {percent(verdict.baseline)}{_since(verdict.figures)}."
    )


def _since(figures: Mapping[str, Any]) -> str:
    """When it began, and whose traffic it is."""
    onset = figures.get("onset")
    began = f"; it began at {datetime.fromisoformat(onset):%H:%M:%S} UTC" if onset else ""
    named = [one["name"] or "no task group" for one in (figures.get("groups") or ())[:TOP]]
    if len(figures.get("groups") or ()) < 1 or named == ["no task group"]:
        return began
    share = figures.get("share_ratio")
    return f"{began}, in {', '.join(named)} ({percent(share)} of the tokens)"


def finds(settings: HitRateDropSettings) -> str:
    """What it looks for."""
    return (
        f"a hit rate {settings.drop_points:g} points below the level since the last change "
        f"(of the last {length(settings.baseline_s)} at most)"
    )


KIND = Kind(
    name="hit_rate_drop",
    label="Hit rate drop",
    about="Compares the newest bins with what the same task groups reached since the last change: an improvement, a "
    "revision, a scale or a restart. A change of the mix of task groups is reported as an event and is no drop. Stays "
    "silent where too little traffic would make that a guess.",
    settings=HitRateDropSettings,
    sources=frozenset({Source.BINS, Source.ENGINE_HOURS}),
    group_sources=frozenset({Source.BINS, Source.GROUP_HOURS}),
    unit="ratio",
    judge=judge,
    sentence=sentence,
    finds=finds,
    is_drop=True,
    figure="Hit rate",
    window_of=window_of,
    judge_window=judge_window,
)
