"""Where alerts are sent.

The outbox: what is to be delivered, and each attempt at it.

The sign of life that we give to others.

Short addresses of views.
"""

from __future__ import annotations

import uuid

from django.conf import settings
from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import CheckConstraint, Q, TextChoices, UniqueConstraint
from django.db.models.functions import Now

from telemetry.models.alert import Alert


class Channel(models.Model):
    """A destination of alerts. Its config (URL, secret) is encrypted at rest and never leaves by the API (S13).

    ``delivered_at``, ``failed_at`` and ``error`` tell its health: of the last attempts, not of messages.
    """

    name = models.CharField(max_length=100, unique=True)
    kind = models.CharField(max_length=32)  # a name in telemetry.channels.registry
    encrypted = models.BinaryField(editable=False)  # services/notifications/channels.py opens it
    matchers = models.JSONField(default=list, db_default=[])  # telemetry.matchers; []: every alert
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+")  # who made it
    enabled = models.BooleanField(default=True)
    disabled_reason = models.CharField(max_length=200, blank=True)  # why we disabled it, such as a receiver's 410
    delivered_at = models.DateTimeField(null=True, editable=False)  # of the last success
    failed_at = models.DateTimeField(null=True, editable=False)  # of the last failure
    error = models.CharField(max_length=200, blank=True, db_default="", editable=False)  # of that one
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        ordering = ("name",)

    def __str__(self) -> str:
        return self.name


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


class Heartbeat(models.Model):
    """Somebody outside who is told every while that all is well, and who calls when that stops. One row at most."""

    encrypted = models.BinaryField(editable=False)  # the URL, encrypted: it is a secret as a whole (S13)
    every_s = models.PositiveIntegerField(default=60)
    due_at = models.DateTimeField()  # the next one
    sent_at = models.DateTimeField(null=True, editable=False)  # the last that arrived
    failed_at = models.DateTimeField(null=True, editable=False)  # the last that did not
    error = models.CharField(max_length=200, blank=True, editable=False)  # of that one
    withheld = models.CharField(max_length=300, blank=True, editable=False)  # why the last one was not sent; "": it was

    class Meta:
        constraints = (models.CheckConstraint(condition=models.Q(pk=1), name="heartbeat_one_row"),)

    def __str__(self) -> str:
        return f"every {self.every_s} s"


LONGEST = 2000  # characters of a view's address; PostgreSQL's index takes 2,700 bytes


class ShortLink(models.Model):
    """A page of ours with all of its state, and the code that leads there. The same view has one code."""

    code = models.CharField(max_length=16, unique=True)
    view = models.CharField(max_length=LONGEST, unique=True)  # path and query, of printable ASCII
    made_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+")
    made_at = models.DateTimeField()
    used_at = models.DateTimeField(db_index=True)  # or made; to the day

    class Meta:
        constraints = (CheckConstraint(condition=Q(view__startswith="/"), name="short_link_stays_here"),)

    def __str__(self) -> str:
        return self.code
