"""Where alerts are sent."""

from django.db import models
from django.db.models.functions import Now


class Channel(models.Model):
    """A destination of alerts. Its config (URL, secret) is encrypted at rest and never leaves by the API (S13)."""

    name = models.CharField(max_length=100, unique=True)
    kind = models.CharField(max_length=32)  # a name in telemetry.channels.registry
    sealed = models.BinaryField(editable=False)  # services/channels.py opens it
    enabled = models.BooleanField(default=True)
    disabled_reason = models.CharField(max_length=200, blank=True)  # why we disabled it, such as a receiver's 410
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        ordering = ("name",)

    def __str__(self) -> str:
        return self.name
