"""Lists, filters and acknowledges alerts, for pages and REST; creates, changes and ends silences.

A silence suppresses the notifications of matching alerts for a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone
from django_filters import rest_framework as filters

from controlplane.api.filters import InstantFilter
from controlplane.errors import ConflictError, InvalidError
from controlplane.models import EventKind, Pool, Project
from controlplane.services.checks import checked_text, lock_row
from controlplane.services.events import record_event
from telemetry.alerts.message import alert_payload
from telemetry.alerts.notifications import silence_applies
from telemetry.alerts.pipeline import record_transition
from telemetry.channels.enqueue import enqueue
from telemetry.matchers import MatcherInput, parse_stored, read_matchers
from telemetry.models import Alert, AlertState, AlertTransition, NotificationKind, RuleKind, Severity, Silence
from telemetry.models.alert import OPEN_STATES


def open_alerts(pool: Pool | None = None) -> QuerySet[Alert]:
    """Pending and firing alerts with their rule and pool, newest first."""
    return alerts(pool).filter(state__in=OPEN_STATES)


def resolved_alerts(pool: Pool | None = None) -> QuerySet[Alert]:
    """Resolved alerts, newest first."""
    return alerts(pool).filter(state=AlertState.RESOLVED)


def alerts(pool: Pool | None = None) -> QuerySet[Alert]:
    """Alerts in any state with their rule and pool, newest first."""
    rows = Alert.objects.select_related("rule", "rule__group", "pool").order_by("-started_at", "-pk")
    return rows if pool is None else rows.filter(pool=pool)


class AlertFilter(filters.FilterSet):
    """``?pool=NAME&state=STATE&kind=KIND&severity=SEVERITY``; times are ISO 8601."""

    pool = filters.CharFilter(field_name="pool__name")
    rule = filters.NumberFilter(field_name="rule")
    kind = filters.MultipleChoiceFilter(field_name="rule__kind", choices=RuleKind.choices)
    severity = filters.MultipleChoiceFilter(choices=Severity.choices)
    subject = filters.CharFilter(label="A replica's name.")
    acknowledged = filters.BooleanFilter(field_name="acknowledged_at", lookup_expr="isnull", exclude=True)
    suppressed = filters.BooleanFilter(field_name="suppression", lookup_expr="isnull", exclude=True)
    state = filters.MultipleChoiceFilter(choices=AlertState.choices)
    after = InstantFilter(field_name="started_at", lookup_expr="gte")
    before = InstantFilter(field_name="started_at", lookup_expr="lt")


@transaction.atomic
def acknowledge(alert: Alert, *, by: User, note: str = "") -> Alert:
    """Stop repeated notifications of an alert, and notify its channels of that. ConflictError for a resolved alert.

    Once more by the same user, without another note, it changes nothing.
    """
    alert = _lock_unresolved(alert)
    if alert.acknowledged_by == by.get_username() and note.strip()[:500] in {"", alert.acknowledged_note}:
        return alert
    now = timezone.now()
    alert.acknowledged_at, alert.acknowledged_by, alert.acknowledged_note = now, by.get_username(), note.strip()[:500]
    alert.save(update_fields=["acknowledged_at", "acknowledged_by", "acknowledged_note"])
    count = alert.history.filter(transition=AlertTransition.ACKNOWLEDGED).count()
    record_transition(alert, AlertTransition.ACKNOWLEDGED, now, text=alert.acknowledged_note, by=by)
    summary = f"{by.get_username()} acknowledged the alert: {alert.summary}"
    record_event(EventKind.ALERT_ACKNOWLEDGED, summary, pool=alert.pool, by=by, detail={"alert": alert.pk}, reason=note)
    if alert.notification_count:
        kind = NotificationKind.ACKNOWLEDGED
        enqueue({alert.pk: alert_payload(alert, kind, now)}, kind, now, sequences={alert.pk: count})
    return alert


@transaction.atomic
def unacknowledge(alert: Alert, *, by: User) -> Alert:
    """Resume repeated notifications of an alert. ConflictError for a resolved alert."""
    alert = _lock_unresolved(alert)
    if alert.acknowledged_at is None:
        return alert
    alert.acknowledged_at, alert.acknowledged_by, alert.acknowledged_note = None, "", ""
    alert.save(update_fields=["acknowledged_at", "acknowledged_by", "acknowledged_note"])
    record_transition(alert, AlertTransition.UNACKNOWLEDGED, timezone.now(), by=by)
    summary = f"{by.get_username()} unacknowledged the alert: {alert.summary}"
    record_event(EventKind.ALERT_UNACKNOWLEDGED, summary, pool=alert.pool, by=by, detail={"alert": alert.pk})
    return alert


def _lock_unresolved(alert: Alert) -> Alert:
    rows = Alert.objects.select_for_update(of=("self",)).select_related("rule", "rule__group", "pool")
    locked = lock_row(rows, alert.pk)
    if locked.state == AlertState.RESOLVED:
        raise ConflictError(f"Alert {alert.pk} is resolved: it cannot be acknowledged or unacknowledged.")
    return locked


MAX_DURATION = timedelta(days=90)


def silences(*, ended: bool = False) -> QuerySet[Silence]:
    """Active and future silences, the first to end first; or ended ones, the latest first."""
    rows = Silence.objects.select_related("project", "created_by")
    now = timezone.now()
    return rows.filter(ends_at__lte=now) if ended else rows.filter(ends_at__gt=now).order_by("ends_at", "pk")


def matching_alerts(
    matchers: Sequence[MatcherInput], *, project: Project | None, candidates: QuerySet[Alert]
) -> list[Alert]:
    """The pending and firing candidates that a silence would match; InvalidError. One query."""
    parsed = read_matchers(matchers, may_match_all=False)
    silence = Silence(project=project)
    unresolved = candidates.exclude(state=AlertState.RESOLVED)
    return [alert for alert in unresolved if silence_applies(silence, parsed, alert)]


@transaction.atomic
def create_silence(
    *,
    matchers: Sequence[MatcherInput],
    ends_at: datetime,
    comment: str,
    starts_at: datetime | None = None,
    project: Project | None = None,
    by: User | None = None,
) -> Silence:
    """Silence alerts with matching labels, of a project or of all; InvalidError."""
    now = timezone.now()
    starts_at = starts_at or now
    _check_times(starts_at, ends_at, now)
    parsed = read_matchers(matchers, may_match_all=False)
    silence = Silence.objects.create(
        project=project,
        matchers=[str(matcher) for matcher in parsed],
        starts_at=starts_at,
        ends_at=ends_at,
        comment=checked_text("$.comment", comment, "a reason of ", at_most=500),
        created_by=by,
    )
    _record(EventKind.SILENCE_CREATED, silence, "was created", by, {"after": _event_detail(silence)})
    return silence


@transaction.atomic
def update_silence(
    silence: Silence, *, ends_at: datetime | None = None, comment: str | None = None, by: User | None = None
) -> Silence:
    """Change the end or the comment of a silence; its matchers cannot change. InvalidError."""
    silence = lock_row(Silence.objects.select_for_update(of=("self",)).select_related("project"), silence.pk)
    before, now = _event_detail(silence), timezone.now()
    if silence.ends_at <= now:
        raise InvalidError("$.ends_at", "this silence has ended; create another one")
    if ends_at is not None:
        _check_times(silence.starts_at, ends_at, now)
        silence.ends_at = ends_at
    if comment is not None:
        silence.comment = checked_text("$.comment", comment, "a reason of ", at_most=500)
    silence.save()
    if (after := _event_detail(silence)) != before:
        _record(EventKind.SILENCE_CHANGED, silence, "was changed", by, {"before": before, "after": after})
    return silence


@transaction.atomic
def end_silence(silence: Silence, *, by: User | None = None) -> Silence:
    """End a silence now; an ended one stays as it is."""
    silence = lock_row(Silence.objects.select_for_update(of=("self",)).select_related("project"), silence.pk)
    now = timezone.now()
    if silence.ends_at <= now:
        return silence
    before = _event_detail(silence)
    silence.starts_at, silence.ends_at = min(silence.starts_at, now), now
    silence.save()
    _record(EventKind.SILENCE_ENDED, silence, "was ended", by, {"before": before, "after": _event_detail(silence)})
    return silence


def conditions(silence: Silence) -> list[str]:
    """A silence's matchers in written form."""
    return [str(matcher) for matcher in parse_stored(silence.matchers)]


def _event_detail(silence: Silence) -> dict[str, Any]:
    """The values that an event records of a silence."""
    return {
        "matchers": conditions(silence),
        "project": silence.project.name if silence.project else None,
        "starts_at": silence.starts_at.isoformat(),
        "ends_at": silence.ends_at.isoformat(),
        "comment": silence.comment,
    }


def _check_times(starts_at: datetime, ends_at: datetime, now: datetime) -> None:
    if ends_at <= max(starts_at, now):
        raise InvalidError("$.ends_at", "expected a time after the start, and in the future")
    if ends_at - max(starts_at, now) > MAX_DURATION:
        raise InvalidError("$.ends_at", f"expected at most {MAX_DURATION.days} days: disable the rule instead")


def _record(kind: EventKind, silence: Silence, verb: str, by: User | None, detail: dict[str, Any]) -> None:
    summary = f"A silence of {' and '.join(conditions(silence))} {verb}."
    record_event(kind, summary, project=silence.project, by=by, detail=detail)
