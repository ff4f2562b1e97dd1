"""The outbox: what is to be delivered, and each attempt at it."""

import uuid

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import TextChoices, UniqueConstraint

from telemetry.models.alert import Alert
from telemetry.models.channel import Channel


class NotificationKind(TextChoices):
    """What a notification tells of."""

    FIRING = "firing", "Firing"
    REPEATED = "repeated", "Still firing"
    ACKNOWLEDGED = "acknowledged", "Acknowledged"
    RESOLVED = "resolved", "Resolved"
    TEST = "test", "Test"
    NOTICE = "notice", "Notice"  # of Warmpath itself, such as a channel that was given up


class NotificationState(TextChoices):
    """A row is worked on while it is ``pending`` and due; a lease says that somebody is at it."""

    PENDING = "pending", "Pending"
    DELIVERED = "delivered", "Delivered"
    FAILED = "failed", "Failed"  # given up


class NextNumber(models.Func):
    """The next number of the outbox, whichever worker asks: clocks may disagree about what came first."""

    template = "nextval('telemetry_notification_number')"
    output_field = models.BigIntegerField()


class Notification(models.Model):
    """One message to one channel. Written in the transaction of the change it tells of, delivered at least once.

    ``id`` is the receiver's means to drop a duplicate: it stays the same over all attempts. Of the messages of one
    channel about one alert, the one with the lower ``number`` goes first.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    number = models.BigIntegerField(db_default=NextNumber(), editable=False)
    # The first alert that it tells of. None: of none, or of one that was removed since, whose end is still to be told.
    alert = models.ForeignKey(Alert, models.SET_NULL, null=True, related_name="notifications")
    alert_ids = ArrayField(
        models.BigIntegerField(), default=list, db_default=models.Value([])
    )  # every alert that it tells of
    channel = models.ForeignKey(Channel, models.CASCADE, related_name="notifications")
    kind = models.CharField(max_length=12, choices=NotificationKind)
    sequence = models.PositiveIntegerField(default=0, db_default=0)  # tells repetitions of one kind apart: 0, 1, 2 ...
    payload = models.JSONField()  # the message, fixed when it was written
    state = models.CharField(max_length=9, choices=NotificationState, default=NotificationState.PENDING)
    attempts = models.PositiveIntegerField(default=0)  # begun
    tried_before = models.PositiveIntegerField(
        default=0, db_default=0
    )  # of these, before it was sent anew: schedules begin there
    next_at = models.DateTimeField()  # not tried before
    leased_until = models.DateTimeField(null=True)  # a worker is at it; past: that worker died
    created_at = models.DateTimeField()
    finished_at = models.DateTimeField(null=True)  # delivered or given up

    class Meta:
        ordering = ("-created_at", "-id")
        constraints = (UniqueConstraint(fields=("alert", "channel", "kind", "sequence"), name="notification_once"),)
        indexes = (
            models.Index(fields=["next_at"], condition=models.Q(state="pending"), name="notification_due"),
            models.Index(
                fields=["channel", "number"], condition=models.Q(state="pending"), name="notification_pending"
            ),
            models.Index(fields=["-number"], name="notification_number"),
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
    status = models.PositiveSmallIntegerField(null=True)  # of HTTP or SMTP; None where there was no answer
    answer = models.CharField(
        max_length=200, blank=True, db_default=""
    )  # how the receiver's text began, without our secrets
    error = models.CharField(max_length=200, blank=True)  # "" for a success; never holds the URL

    class Meta:
        ordering = ("-started_at", "-pk")
        constraints = (UniqueConstraint(fields=("notification", "number"), name="attempt_number_unique"),)

    def __str__(self) -> str:
        return f"attempt {self.number} of {self.notification_id}"
