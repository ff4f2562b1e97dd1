"""Rule ``hit_rate_drop``: the hit rate fell below its level since the last change.

The newest bins are compared with what the same task groups reached since the last change, which is an improvement that
the detector found, or a revision, a scale-out or a restart. ``telemetry.alerts.detection`` has the detector. This
module has its settings, and turns a detection into the evidence and the summary of an alert.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any

import msgspec
from django.conf import settings as django_settings

from telemetry.alerts.detection import Detection, Sensitivity, State
from telemetry.alerts.detection.level import Decline, Hour, find_decline
from telemetry.alerts.findings import POOL, Evidence, Finding, Findings, Reason, TrafficEvidence, below_limit, no_data
from telemetry.alerts.history_window import HistoryView, Source
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
    with_restarts,
)
from telemetry.models import RuleKind

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


def _evaluate(settings: HitRateDropSettings, view: HistoryView, group: str) -> Findings:
    """The detector's result at the newest bin, or a slow decline."""
    series = view.history.series
    if series is None:
        return {POOL: no_data(Reason.NO_READINGS)}
    finding = finding_of(settings, series.detect(settings.sensitivity, group, view.now), view.now)
    if finding.reason is Reason.WITHIN and settings.days:
        hour = view.now.replace(minute=0, second=0, microsecond=0)
        decline = series.decline((settings, group, hour), lambda: _find_decline(settings, view, group))
        if decline is not None:
            finding = _decline_finding(settings, decline)
    return {POOL: with_restarts(finding, view, settings.warm_up_s)}


class GroupLoss(Evidence, frozen=True):
    """The part of one task group in a drop."""

    name: str
    share_ratio: float | None = None  # of the tokens since the drop
    baseline_ratio: float | None = None
    value_ratio: float | None = None
    drop_points: float | None = None


class MixShare(Evidence, frozen=True):
    """The share of one task group in the tokens, usually and now."""

    name: str
    baseline_ratio: float
    share_ratio: float


class DropEvidence(TrafficEvidence, frozen=True):
    """A drop: its times in whole seconds, its task groups, and whether the traffic mix changed."""

    onset: datetime | None = None
    level_since: datetime | None = None
    steady_until: datetime | None = None
    comparable_since: datetime | None = None
    worsened: bool = False  # by a second fall
    drop_points: float | None = None
    days: int | None = None  # of a slow decline
    share_ratio: float | None = None  # of the tokens in ``groups``
    groups: tuple[GroupLoss, ...] = ()
    score: float | None = None
    noise_points: float | None = None
    mix_points: float | None = None
    mix_since: datetime | None = None
    mix_groups: tuple[MixShare, ...] = ()

    @classmethod
    def read(cls, figures: Mapping[str, Any]) -> DropEvidence:
        """The evidence in stored figures; those of other kinds, and of releases with another form, have none of it."""
        try:
            return msgspec.convert({name: figures[name] for name in cls.__struct_fields__ if name in figures}, cls)
        except msgspec.ValidationError:
            return cls()


def _decline_finding(settings: HitRateDropSettings, decline: Decline) -> Finding[DropEvidence]:
    evidence = DropEvidence(
        requests=decline.requests,
        tokens=decline.tokens,
        onset=_whole_second(decline.change_point),
        drop_points=round((decline.level - decline.ratio) / POINT, 2),
        days=decline.days,
    )
    limit = decline.level - settings.drop_points * POINT
    return below_limit(decline.ratio, limit, evidence, is_breach=True, baseline=decline.level)


def _find_decline(settings: HitRateDropSettings, view: HistoryView, group: str) -> Decline | None:
    hours = {
        at: Hour(hour.ratio, hour.queries, hour.requests or 0.0)
        for at, hour in view.history.hours.get(group, {}).items()
        if has_traffic(hour, settings) and hour.ratio is not None and hour.queries
    }
    drop = settings.drop_points * POINT
    return find_decline(hours, view.now, drop=drop, days=settings.days, quiet_days=settings.quiet_days)


def finding_of(settings: HitRateDropSettings, detection: Detection | None, now: datetime) -> Finding[DropEvidence]:
    """A detection as the finding of a rule."""
    if detection is None or (now - detection.at).total_seconds() > 2 * settings.step_s:
        return no_data(Reason.NO_READINGS)
    evidence = _evidence(detection)
    if detection.level is None:
        return no_data(Reason.LITTLE_HISTORY, evidence)
    is_little = detection.requests < settings.min_requests or detection.prompt < settings.min_tokens
    if detection.ratio is None or is_little:
        return no_data(Reason.LITTLE_TRAFFIC, evidence)
    limit = detection.level - settings.drop_points * POINT
    is_breach = detection.state is State.DOWN
    return below_limit(detection.ratio, limit, evidence, is_breach=is_breach, baseline=detection.level)


def _evidence(detection: Detection) -> DropEvidence:
    groups = [group for group in detection.groups if group.contribution > MIN_PART * max(detection.shortfall, 0.0)]
    return DropEvidence(
        requests=detection.requests,
        tokens=detection.prompt,
        onset=_whole_second(detection.change_point),
        level_since=_whole_second(detection.since),
        steady_until=_whole_second(detection.steady_until),
        comparable_since=_whole_second(detection.comparable_since),
        worsened=detection.worsened,
        drop_points=round(detection.shortfall / POINT, 2),
        share_ratio=round(min(sum(group.share_now for group in groups), 1.0), 4) if detection.groups else None,
        groups=tuple(
            GroupLoss(
                group.group,
                round(group.share_now, 4),
                round(group.level, 4),
                round(group.ratio, 4),
                round((group.level - group.ratio) / POINT, 2),
            )
            for group in groups
        ),
        score=round(detection.score, 3),
        noise_points=None if detection.noise is None else round(detection.noise / POINT, 2),
        mix_points=round(detection.mix / POINT, 2),
        mix_since=_whole_second(detection.mix_since),
        mix_groups=tuple(
            MixShare(share.group, round(share.usual, 4), round(share.current, 4))
            for share in detection.shares[:NAMED_GROUPS]
        ),
    )


def _whole_second(at: datetime | None) -> datetime | None:
    return None if at is None else at.replace(microsecond=0)


def _summarize(scope: Scope, _: HitRateDropSettings, finding: Finding[DropEvidence]) -> str:
    if finding.value is None or finding.baseline is None:
        return f"Hit rate of {scope} dropped."
    points = (finding.baseline - finding.value) * 100
    return (
        f"Hit rate of {scope} is {percent(finding.value)}, {points:.1f} points below its baseline "
        f"of {percent(finding.baseline)}{_since(finding.evidence)}."
    )


def _since(evidence: DropEvidence) -> str:
    """When the drop began, and in which task groups."""
    word = "after a second fall at" if evidence.worsened else "since"
    since = f" {word} {evidence.onset:%H:%M:%S} UTC" if evidence.onset else ""
    names = [group.name or "no task group" for group in evidence.groups]
    if names in ([], ["no task group"]):
        return since
    more = f" and {len(names) - NAMED_GROUPS} more" if len(names) > NAMED_GROUPS else ""
    return f"{since}, in {', '.join(names[:NAMED_GROUPS])}{more} ({percent(evidence.share_ratio)} of the tokens)"


HIT_RATE_DROP = Kind(
    name="hit_rate_drop",
    inhibited_by=(RuleKind.EVALUATOR_LAG, RuleKind.NO_DATA, RuleKind.REPLICA_DOWN),
    about="Compares the newest bins with what the same task groups reached since the last change: an improvement, a "
    "revision, a scale-out or a restart. A change of the traffic mix between task groups is reported as an event and "
    "is no drop. Gives no result where too little traffic would make it a guess.",
    settings=HitRateDropSettings,
    sources=frozenset({Source.BINS, Source.ENGINE_HOURS}),
    group_sources=frozenset({Source.BINS, Source.GROUP_HOURS}),
    evaluate=_evaluate,
    summarize=_summarize,
    condition=lambda settings: (
        f"hit rate {settings.drop_points:g} points below its level since the last change "
        f"(of the last {duration(settings.baseline_s)} at most)"
    ),
    is_drop=True,
    figure="Hit rate",
)
