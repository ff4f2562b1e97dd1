"""Lists and filters alerts for pages and REST; acknowledges and unacknowledges an alert."""

from __future__ import annotations

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone
from django_filters import rest_framework as filters

from controlplane.api.filters import InstantFilter
from controlplane.errors import ConflictError
from controlplane.models import EventKind, Pool
from controlplane.services.checks import lock_row
from controlplane.services.events import record_event
from telemetry.alerts.message import alert_payload
from telemetry.alerts.pipeline import record_transition
from telemetry.channels.enqueue import enqueue
from telemetry.models import Alert, AlertState, AlertTransition, NotificationKind, RuleKind, Severity
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
