"""Channels, the outbox with its delivery attempts, the heartbeat, and short links."""

from __future__ import annotations

import uuid

from django.conf import settings
from django.contrib.postgres.fields import ArrayField
from django.contrib.postgres.indexes import GinIndex
from django.db import models
from django.db.models import CheckConstraint, Q, TextChoices, UniqueConstraint
from django.db.models.functions import Now

from controlplane.models import VersionedModel
from telemetry.models.alert import Alert


class Topic(TextChoices):
    """What a channel may ask for besides alerts."""

    WEEKLY_SUMMARY = "weekly_summary", "Weekly summary"
    ROLLOUTS = "rollouts", "Rollouts"


class Channel(VersionedModel):
    """A destination of alerts. Its config (URL, secrets) is encrypted at rest and never in a response.

    ``delivered_at``, ``failed_at`` and ``error`` are those of the last attempts.
    """

    name = models.CharField(max_length=100, unique=True)
    kind = models.CharField(max_length=32)  # a name in telemetry.channels
    encrypted = models.BinaryField(editable=False)  # decrypted by services/notifications/channels.py
    matchers = models.JSONField(default=list, db_default=[])  # telemetry.matchers; []: every alert
    # What it gets besides alerts: values of Topic.
    topics = ArrayField(models.CharField(max_length=20), default=list, db_default=models.Value([]))
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+")  # who created it
    enabled = models.BooleanField(default=True)
    # Whether it is to get the alerts that fire already: it was added or enabled, or matches others now.
    catches_up = models.BooleanField(default=True, db_default=False, editable=False)
    disabled_reason = models.CharField(max_length=200, blank=True)  # why it was disabled, such as a receiver's 410
    delivered_at = models.DateTimeField(null=True, editable=False)  # of the last success
    failed_at = models.DateTimeField(null=True, editable=False)  # of the last failure
    error = models.CharField(max_length=200, blank=True, db_default="", editable=False)  # of the last failure
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        ordering = ("name",)

    def __str__(self) -> str:
        return self.name

    def get_topics(self) -> list[str]:
        """The names of its topics; one that a newer release had is shown as it is stored."""
        return [dict(Topic.choices).get(topic, topic) for topic in self.topics]


class NotificationKind(TextChoices):
    """Reason of a notification."""

    FIRING = "firing", "Firing"
    REPEATED = "repeated", "Still firing"
    ACKNOWLEDGED = "acknowledged", "Acknowledged"
    RESOLVED = "resolved", "Resolved"
    TEST = "test", "Test"
    SUMMARY = "summary", "Summary"
    ROLLOUT = "rollout", "Rollout"  # one step of one
    NOTICE = "notice", "Notice"  # about Warmpath itself, such as a disabled channel


class NotificationState(TextChoices):
    """State of a delivery. A pending message is sent when it is due; a lease marks one that is being sent."""

    PENDING = "pending", "Pending"
    DELIVERED = "delivered", "Delivered"
    FAILED = "failed", "Failed"  # no more attempts


class NextNumber(models.Func):
    """The next number of a database sequence: workers' clocks may differ."""

    template = "nextval('telemetry_notification_number')"
    output_field = models.BigIntegerField()


class Notification(models.Model):
    """One message to one channel. Written in the transaction of the notified change, delivered at least once.

    ``id`` is the same at all attempts, so that a receiver can drop a duplicate. Messages of one channel about one alert
    are delivered in the order of ``number``.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    number = models.BigIntegerField(db_default=NextNumber(), editable=False)
    # The first of its alerts. None: it has none, or this one was removed and its resolution is still to be delivered.
    alert = models.ForeignKey(Alert, models.SET_NULL, null=True, related_name="notifications")
    alert_ids = ArrayField(models.BigIntegerField(), default=list, db_default=models.Value([]))  # all alerts
    channel = models.ForeignKey(Channel, models.CASCADE, related_name="notifications")
    kind = models.CharField(max_length=12, choices=NotificationKind)
    sequence = models.PositiveIntegerField(default=0, db_default=0)  # number of the repetition: 0, 1, 2 ...
    payload = models.JSONField()  # the message, which does not change
    state = models.CharField(max_length=9, choices=NotificationState, default=NotificationState.PENDING)
    attempts = models.PositiveIntegerField(default=0)  # started
    tried_before = models.PositiveIntegerField(default=0, db_default=0)  # attempts before the current retry schedule
    next_at = models.DateTimeField()  # earliest time of the next attempt
    leased_until = models.DateTimeField(null=True)  # until then one worker sends it; in the past: that worker died
    created_at = models.DateTimeField()
    finished_at = models.DateTimeField(null=True)  # delivered or failed for good

    class Meta:
        ordering = ("-created_at", "-id")
        constraints = (UniqueConstraint(fields=("alert", "channel", "kind", "sequence"), name="notification_once"),)
        indexes = (
            models.Index(fields=["next_at"], condition=models.Q(state="pending"), name="notification_due"),
            models.Index(
                fields=["channel", "number"], condition=models.Q(state="pending"), name="notification_pending"
            ),
            GinIndex(fields=["alert_ids"], name="notification_alerts", fastupdate=False),
            models.Index(fields=["-number"], name="notification_number"),
            models.Index(fields=["-created_at", "-id"], name="notification_created_at"),
        )

    def __str__(self) -> str:
        return f"{self.kind} {self.id}"

    @property
    def can_be_sent_now(self) -> bool:
        """Whether it is finished, or waits for its next attempt."""
        return self.state != NotificationState.PENDING or (self.attempts > 0 and self.leased_until is None)

    @property
    def is_overdue(self) -> bool:
        """Whether it was not delivered yet and an attempt failed, or will never be."""
        is_waiting = self.state == NotificationState.PENDING and self.can_be_sent_now
        return is_waiting or self.state == NotificationState.FAILED


class OutboxState(models.Model):
    """One row: what a delivery run found when it last read the outbox, for pages. No row: none ever ran."""

    read_at = models.DateTimeField()
    due_since = models.DateTimeField(null=True)  # of the message that was due longest; None: none was due

    def __str__(self) -> str:
        return f"read at {self.read_at:%F %T}"


class DeliveryAttempt(models.Model):
    """One attempt. Written before the request is sent, so that a worker that dies leaves an unfinished one."""

    notification = models.ForeignKey(Notification, models.CASCADE, related_name="log")
    number = models.PositiveIntegerField()  # 1, 2, 3 ...
    started_at = models.DateTimeField()
    duration_s = models.FloatField(null=True)  # None: unfinished, or its worker died
    status = models.PositiveSmallIntegerField(null=True)  # of HTTP or SMTP; None without a response
    response = models.CharField(max_length=200, blank=True, db_default="")  # its beginning, without secrets
    error = models.CharField(max_length=200, blank=True)  # "" for a success; never has the URL

    class Meta:
        ordering = ("-started_at", "-pk")
        constraints = (UniqueConstraint(fields=("notification", "number"), name="attempt_number_unique"),)

    def __str__(self) -> str:
        return f"attempt {self.number} of {self.notification_id}"


class Heartbeat(VersionedModel):
    """An external monitor that gets regular requests and raises an alarm when they stop. One row at most."""

    encrypted = models.BinaryField(editable=False)  # the URL, which is a secret as a whole
    every_s = models.PositiveIntegerField(default=60)
    due_at = models.DateTimeField()  # time of the next one
    sent_at = models.DateTimeField(null=True, editable=False)  # the last success
    failed_at = models.DateTimeField(null=True, editable=False)  # the last failure
    error = models.CharField(max_length=200, blank=True, editable=False)  # of the last failure
    withheld = models.CharField(
        max_length=300, blank=True, editable=False
    )  # why the last one was not sent; "" if it was

    class Meta:
        constraints = (models.CheckConstraint(condition=models.Q(pk=1), name="heartbeat_one_row"),)

    def __str__(self) -> str:
        return f"every {self.every_s} s"


MAX_VIEW_CHARS = 2000  # path and query of a view; PostgreSQL's index accepts 2,700 bytes


class ShortLink(models.Model):
    """A short code for a page with its state. The same view has one code."""

    code = models.CharField(max_length=16, unique=True)
    view = models.CharField(max_length=MAX_VIEW_CHARS, unique=True)  # path and query, of printable ASCII
    made_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+")
    made_at = models.DateTimeField()
    used_at = models.DateTimeField(db_index=True)  # last use or creation, to the day

    class Meta:
        constraints = (CheckConstraint(condition=Q(view__startswith="/"), name="short_link_stays_here"),)

    def __str__(self) -> str:
        return self.code


class SavedView(models.Model):
    """A short link that a user finds again by a name."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE, related_name="saved_views")
    link = models.ForeignKey(ShortLink, models.CASCADE, related_name="saved")
    name = models.CharField(max_length=60)

    class Meta:
        ordering = ("name",)
        constraints = (
            UniqueConstraint(fields=["user", "name"], name="saved_view_name_once"),
            UniqueConstraint(fields=["user", "link"], name="saved_view_link_once"),
        )

    def __str__(self) -> str:
        return self.name


class SharedLink(models.Model):
    """A link that shows the wall of one pool to everybody, until it expires. A revoked one has no row."""

    pool = models.ForeignKey("controlplane.Pool", models.CASCADE, related_name="+")
    digest = models.CharField(max_length=64, unique=True, editable=False)  # SHA-256 of the token, hex
    query = models.CharField(max_length=100)  # the time range, as in URLs
    made_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE, related_name="+")
    made_at = models.DateTimeField()
    expires_at = models.DateTimeField(db_index=True)
    opened_at = models.DateTimeField(null=True, editable=False)  # the last time, to the minute

    def __str__(self) -> str:
        return f"{self.pk} to pool {self.pool.name}"
