"""Deletes resolved alerts with their timelines, messages with their attempts, and silences.

All of them are kept for ``ALERTS_RETENTION_DAYS``. Each run deletes a bounded number, so that it holds locks briefly.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from django.conf import settings
from django.db import transaction

from telemetry.models import (
    Alert,
    AlertHistoryEntry,
    AlertState,
    DeliveryAttempt,
    Notification,
    NotificationState,
    Silence,
)

MAX_DELETED = 5_000  # alerts and messages in one run


def delete_expired(now: datetime) -> int:
    """Delete what is older than its retention; the number of alerts, messages and silences."""
    before = now - timedelta(days=settings.ALERTS_RETENTION_DAYS)
    silences = Silence.objects.filter(ends_at__lt=before).delete()[0]  # users enter them: a run is small
    return _delete_messages(before) + _delete_alerts(before) + silences


@transaction.atomic
def _delete_messages(before: datetime) -> int:
    """Not those about an alert that is open: they say which channels are to hear of its end."""
    expired = Notification.objects.filter(created_at__lt=before).exclude(state=NotificationState.PENDING)
    expired = expired.exclude(alert__in=Alert.objects.exclude(state=AlertState.RESOLVED))
    keys = list(expired.order_by("created_at").values_list("pk", flat=True)[:MAX_DELETED])
    DeliveryAttempt.objects.filter(notification__in=keys).delete()
    return Notification.objects.filter(pk__in=keys).delete()[0]


@transaction.atomic
def _delete_alerts(before: datetime) -> int:
    expired = Alert.objects.filter(started_at__lt=before, resolved_at__lt=before, state=AlertState.RESOLVED)
    keys = list(expired.order_by("started_at").values_list("pk", flat=True)[:MAX_DELETED])
    AlertHistoryEntry.objects.filter(alert__in=keys).delete()
    return Alert.objects.filter(pk__in=keys).delete()[0]
