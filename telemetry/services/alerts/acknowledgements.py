"""Taking an alert, and letting it go again: while somebody is at it, it is not told again."""

from __future__ import annotations

from django.contrib.auth.models import User
from django.db import transaction
from django.utils import timezone

from controlplane.errors import ConflictError
from controlplane.models import EventKind
from controlplane.services.events import record_event
from controlplane.services.holding import hold
from telemetry.alerts.message import payload_of
from telemetry.alerts.pipeline import note
from telemetry.channels.enqueue import enqueue
from telemetry.models import Alert, AlertMove, AlertState, NotificationKind


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
    times = alert.steps.filter(move=AlertMove.ACKNOWLEDGED).count()
    note(alert, AlertMove.ACKNOWLEDGED, now, text=alert.acknowledged_note, by=by)
    summary = f"{by.get_username()} took the alert: {alert.summary}"
    record_event(EventKind.ALERT_ACKNOWLEDGED, summary, pool=alert.pool, by=by, detail={"alert": alert.pk}, reason=why)
    if alert.tellings:
        kind = NotificationKind.ACKNOWLEDGED
        enqueue({alert.pk: payload_of(alert, kind, now)}, kind, now, sequences={alert.pk: times})
    return alert


@transaction.atomic
def release(alert: Alert, *, by: User) -> Alert:
    """Let an alert go: it is told again when that is due. AlertOverError."""
    alert = _locked(alert)
    if alert.acknowledged_at is None:
        return alert
    alert.acknowledged_at, alert.acknowledged_by, alert.acknowledged_note = None, "", ""
    alert.save(update_fields=["acknowledged_at", "acknowledged_by", "acknowledged_note"])
    note(alert, AlertMove.RELEASED, timezone.now(), by=by)
    summary = f"{by.get_username()} let the alert go: {alert.summary}"
    record_event(EventKind.ALERT_RELEASED, summary, pool=alert.pool, by=by, detail={"alert": alert.pk})
    return alert


def _locked(alert: Alert) -> Alert:
    rows = Alert.objects.select_for_update(of=("self",)).select_related("rule", "rule__group", "pool")
    found = hold(rows, alert.pk)
    if found.state == AlertState.RESOLVED:
        raise AlertOverError(found)
    return found
