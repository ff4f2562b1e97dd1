"""The delivery log: every message with each attempt at it, and sending one again."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.models import F, QuerySet

from controlplane.celery import wake
from controlplane.errors import ConflictError
from telemetry.channels.enqueue import DELIVER
from telemetry.models import Notification, NotificationState


def deliveries() -> QuerySet[Notification]:
    """Messages with their attempts and channel, the newest first. Two queries."""
    return Notification.objects.select_related("channel").prefetch_related("log").order_by("-number")


def narrowed(
    found: QuerySet[Notification],
    *,
    channel: str = "",
    state: str = "",
    kind: str = "",
    alert: int | None = None,
    before: int | None = None,
) -> QuerySet[Notification]:
    """Those of a channel of this name, in this state, of this kind, about this alert, before this number."""
    asked: dict[str, Any] = {"channel__name": channel, "state": state, "kind": kind, "number__lt": before}
    if alert is not None:
        asked["alert_ids__contains"] = [alert]
    return found.filter(**{name: value for name, value in asked.items() if value})


@transaction.atomic
def replay(notification: Notification, now: datetime) -> Notification:
    """Send a message again that was given up or delivered: at once, under the same id, as on its first day."""
    ended = Notification.objects.filter(pk=notification.pk).exclude(state=NotificationState.PENDING)
    if not ended.update(
        state=NotificationState.PENDING, next_at=now, leased_until=None, finished_at=None, tried_before=F("attempts")
    ):
        raise ConflictError("The message is still being delivered.")
    wake(DELIVER)
    notification.refresh_from_db()
    return notification
