"""What became of an alert, move by move."""

from django.conf import settings
from django.db import models
from django.db.models import TextChoices
from django.utils import timezone

from telemetry.models.alert import Alert


class AlertMove(TextChoices):
    """What happened to it."""

    OPENED = "opened", "Suspected"
    FIRED = "fired", "Firing"
    EXPLAINED = "explained", "Causes found"
    TOLD = "told", "Told"
    REPEATED = "repeated", "Told again"
    MUTED = "muted", "Muted"
    UNMUTED = "unmuted", "No longer muted"
    ACKNOWLEDGED = "acknowledged", "Acknowledged"
    RELEASED = "released", "Acknowledgement taken back"
    RESOLVED = "resolved", "Resolved"
    END_TOLD = "end_told", "End told"


class AlertStep(models.Model):
    """One move of an alert: what, when, by whom, why. Written in the transaction of the move, never changed."""

    alert = models.ForeignKey(Alert, models.CASCADE, related_name="steps")
    at = models.DateTimeField(default=timezone.now)
    move = models.CharField(max_length=12, choices=AlertMove)
    by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.PROTECT, null=True, related_name="+"
    )  # None: the evaluator itself
    note = models.CharField(max_length=500, default="", blank=True)

    class Meta:
        ordering = ("pk",)

    def __str__(self) -> str:
        return f"{self.alert_id}: {self.move}"
