"""What should raise an alert."""

from django.db import models
from django.db.models import TextChoices, UniqueConstraint

from controlplane.models import Pool


class RuleKind(TextChoices):
    """What a rule looks at; telemetry.alerts.kinds holds one entry for each."""

    HIT_RATE_DROP = "hit_rate_drop", "Hit rate drop"


class AlertRule(models.Model):
    """A rule of one pool, and what its last evaluation said."""

    pool = models.ForeignKey(Pool, models.CASCADE, related_name="alert_rules")
    name = models.CharField(max_length=100)
    kind = models.CharField(max_length=32, choices=RuleKind, default=RuleKind.HIT_RATE_DROP)
    settings = models.JSONField(default=dict)  # of its kind, checked by the kind; what is missing takes the default
    enabled = models.BooleanField(default=True)
    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True)
    evaluated_at = models.DateTimeField(null=True, editable=False)
    verdict = models.JSONField(default=dict, editable=False)  # {"answer", "reason", figures ...} of that evaluation

    class Meta:
        ordering = ("pool__name", "name")
        constraints = (UniqueConstraint(fields=("pool", "name"), name="alert_rule_name_unique"),)

    def __str__(self) -> str:
        return self.name
