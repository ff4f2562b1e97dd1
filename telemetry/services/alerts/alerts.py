"""The alerts that pages and the API list: those that are open, and those that were.

What alerts can be narrowed by, in the same words on pages and over REST.

Taking an alert, and letting it go again: while somebody is at it, it is not told again.
"""

from __future__ import annotations

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone
from django_filters import rest_framework as filters

from controlplane.errors import ConflictError
from controlplane.models import EventKind, Pool
from controlplane.services.checks import lock_row
from controlplane.services.events import record_event
from telemetry.alerts.message import payload_of
from telemetry.alerts.pipeline import note
from telemetry.channels.enqueue import enqueue
from telemetry.models import Alert, AlertState, AlertTransition, NotificationKind, RuleKind, Severity
from telemetry.models.alert import OPEN_STATES


def open_alerts(pool: Pool | None = None) -> QuerySet[Alert]:
    """Pending and firing alerts with their rule and pool, newest first."""
    return alerts(pool).filter(state__in=OPEN_STATES)


def past_alerts(pool: Pool | None = None) -> QuerySet[Alert]:
    """Alerts that fired and have ended, newest first."""
    return alerts(pool).filter(state=AlertState.RESOLVED)


def alerts(pool: Pool | None = None) -> QuerySet[Alert]:
    """Alerts in whatever state, with their rule and pool, newest first."""
    found = Alert.objects.select_related("rule", "rule__group", "pool").order_by("-started_at", "-pk")
    return found if pool is None else found.filter(pool=pool)


class AlertFilter(filters.FilterSet):
    """``?pool=NAME&state=STATE&kind=KIND&severity=SEVERITY``; times are ISO 8601."""

    pool = filters.CharFilter(field_name="pool__name")
    rule = filters.NumberFilter(field_name="rule")
    kind = filters.MultipleChoiceFilter(field_name="rule__kind", choices=RuleKind.choices)
    severity = filters.MultipleChoiceFilter(choices=Severity.choices)
    subject = filters.CharFilter(label="A replica's name.")
    acknowledged = filters.BooleanFilter(field_name="acknowledged_at", lookup_expr="isnull", exclude=True)
    muted = filters.BooleanFilter(field_name="muted", lookup_expr="isnull", exclude=True)
    state = filters.MultipleChoiceFilter(choices=AlertState.choices)
    after = filters.IsoDateTimeFilter(field_name="started_at", lookup_expr="gte")
    before = filters.IsoDateTimeFilter(field_name="started_at", lookup_expr="lt")

    class Meta:
        model = Alert
        fields = (
            "pool",
            "rule",
            "kind",
            "severity",
            "subject",
            "state",
            "acknowledged",
            "muted",
            "after",
            "before",
        )


class AlertOverError(ConflictError):
    """The alert has ended: there is nothing left to take."""

    def __init__(self, alert: Alert) -> None:
        super().__init__(f"Alert {alert.pk} has ended; there is nothing to acknowledge.")


@transaction.atomic
def acknowledge(alert: Alert, *, by: User, why: str = "") -> Alert:
    """Take an alert: it is not told again, and whoever was told of it hears of this. AlertOverError."""
    alert = _locked(alert)
    now = timezone.now()
    alert.acknowledged_at, alert.acknowledged_by, alert.acknowledged_note = now, by.get_username(), why.strip()[:500]
    alert.save(update_fields=["acknowledged_at", "acknowledged_by", "acknowledged_note"])
    times = alert.steps.filter(move=AlertTransition.ACKNOWLEDGED).count()
    note(alert, AlertTransition.ACKNOWLEDGED, now, text=alert.acknowledged_note, by=by)
    summary = f"{by.get_username()} took the alert: {alert.summary}"
    record_event(EventKind.ALERT_ACKNOWLEDGED, summary, pool=alert.pool, by=by, detail={"alert": alert.pk}, reason=why)
    if alert.notification_count:
        kind = NotificationKind.ACKNOWLEDGED
        enqueue({alert.pk: payload_of(alert, kind, now)}, kind, now, sequences={alert.pk: times})
    return alert


@transaction.atomic
def unacknowledge(alert: Alert, *, by: User) -> Alert:
    """Let an alert go: it is told again when that is due. AlertOverError."""
    alert = _locked(alert)
    if alert.acknowledged_at is None:
        return alert
    alert.acknowledged_at, alert.acknowledged_by, alert.acknowledged_note = None, "", ""
    alert.save(update_fields=["acknowledged_at", "acknowledged_by", "acknowledged_note"])
    note(alert, AlertTransition.UNACKNOWLEDGED, timezone.now(), by=by)
    summary = f"{by.get_username()} let the alert go: {alert.summary}"
    record_event(EventKind.ALERT_RELEASED, summary, pool=alert.pool, by=by, detail={"alert": alert.pk})
    return alert


def _locked(alert: Alert) -> Alert:
    rows = Alert.objects.select_for_update(of=("self",)).select_related("rule", "rule__group", "pool")
    found = lock_row(rows, alert.pk)
    if found.state == AlertState.RESOLVED:
        raise AlertOverError(found)
    return found
