"""The outbox: what is to be delivered, and each attempt at it."""

import uuid

from django.db import models
from django.db.models import TextChoices, UniqueConstraint

from telemetry.models.alert import Alert
from telemetry.models.channel import Channel


class NotificationKind(TextChoices):
    """What a notification tells of."""

    FIRING = "firing", "Firing"
    RESOLVED = "resolved", "Resolved"
    TEST = "test", "Test"


class NotificationState(TextChoices):
    """A row is worked on while it is ``pending`` and due; a lease says that somebody is at it."""

    PENDING = "pending", "Pending"
    DELIVERED = "delivered", "Delivered"
    FAILED = "failed", "Failed"  # given up


class Notification(models.Model):
    """One message to one channel. Written in the transaction of the change it tells of, delivered at least once.

    ``id`` is the receiver's means to drop a duplicate: it stays the same over all attempts.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    alert = models.ForeignKey(Alert, models.CASCADE, null=True, related_name="notifications")  # None: a test
    channel = models.ForeignKey(Channel, models.CASCADE, related_name="notifications")
    kind = models.CharField(max_length=8, choices=NotificationKind)
    payload = models.JSONField()  # the message, fixed when it was written
    state = models.CharField(max_length=9, choices=NotificationState, default=NotificationState.PENDING)
    attempts = models.PositiveIntegerField(default=0)  # begun
    next_at = models.DateTimeField()  # not tried before
    leased_until = models.DateTimeField(null=True)  # a worker is at it; past: that worker died
    created_at = models.DateTimeField()
    finished_at = models.DateTimeField(null=True)  # delivered or given up

    class Meta:
        ordering = ("-created_at", "-id")
        constraints = (UniqueConstraint(fields=("alert", "channel", "kind"), name="notification_once"),)
        indexes = (
            models.Index(fields=["next_at"], condition=models.Q(state="pending"), name="notification_due"),
            models.Index(fields=["-created_at", "-id"], name="notification_created_at"),
        )

    def __str__(self) -> str:
        return f"{self.kind} {self.id}"


class DeliveryAttempt(models.Model):
    """One try. Written before the request goes out, so that a worker that dies leaves a trace without an end."""

    notification = models.ForeignKey(Notification, models.CASCADE, related_name="log")
    number = models.PositiveIntegerField()  # 1, 2, 3 ...
    started_at = models.DateTimeField()
    duration_s = models.FloatField(null=True)  # None: unfinished, or its worker was lost
    status = models.PositiveSmallIntegerField(null=True)  # HTTP status; None where there was no answer
    error = models.CharField(max_length=200, blank=True)  # "" for a success; never holds the URL

    class Meta:
        ordering = ("-started_at", "-pk")
        constraints = (UniqueConstraint(fields=("notification", "number"), name="attempt_number_unique"),)

    def __str__(self) -> str:
        return f"attempt {self.number} of {self.notification_id}"
