"""Something that a rule found, from the first suspicion to the end."""

from django.db import models
from django.db.models import Q, TextChoices, UniqueConstraint

from controlplane.models import Pool
from telemetry.models.alert_rule import AlertRule


class AlertState(TextChoices):
    """pending -> firing -> resolved; a pending alert that proves unfounded is deleted."""

    PENDING = "pending", "Pending"  # the rule is broken, not yet for long enough
    FIRING = "firing", "Firing"
    RESOLVED = "resolved", "Resolved"


OPEN_STATES = (AlertState.PENDING, AlertState.FIRING)


class Alert(models.Model):
    """One episode of one rule. At most one is open per rule and pool, which the database itself holds true."""

    rule = models.ForeignKey(AlertRule, models.CASCADE, related_name="alerts")
    pool = models.ForeignKey(Pool, models.CASCADE, related_name="alerts")
    state = models.CharField(max_length=8, choices=AlertState, default=AlertState.PENDING)
    started_at = models.DateTimeField()  # the first evaluation that found the rule broken
    last_breach_at = models.DateTimeField()  # the last one
    fired_at = models.DateTimeField(null=True)
    resolved_at = models.DateTimeField(null=True)
    value_ratio = models.FloatField(null=True)
    baseline_ratio = models.FloatField(null=True)
    ceiling_ratio = models.FloatField(null=True)
    summary = models.CharField(max_length=300, blank=True)  # one sentence
    detail = models.JSONField(default=dict)  # what a message says beyond that

    class Meta:
        ordering = ("-started_at", "-pk")
        constraints = (
            UniqueConstraint(fields=("rule", "pool"), condition=Q(state__in=OPEN_STATES), name="alert_one_open"),
        )
        indexes = (models.Index(fields=["-started_at", "-id"], name="alert_started_at"),)

    def __str__(self) -> str:
        return self.summary or f"{self.rule_id} {self.state}"
