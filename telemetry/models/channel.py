"""Where alerts are sent."""

from django.conf import settings
from django.db import models
from django.db.models.functions import Now


class Channel(models.Model):
    """A destination of alerts. Its config (URL, secret) is encrypted at rest and never leaves by the API (S13).

    ``delivered_at``, ``failed_at`` and ``error`` tell its health: of the last attempts, not of messages.
    """

    name = models.CharField(max_length=100, unique=True)
    kind = models.CharField(max_length=32)  # a name in telemetry.channels.registry
    sealed = models.BinaryField(editable=False)  # services/notifications/channels.py opens it
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
