"""What should raise an alert."""

from django.db import models
from django.db.models import TextChoices, UniqueConstraint

from controlplane.models import Pool, TaskGroup


class RuleKind(TextChoices):
    """What a rule looks at; ``telemetry.alerts.kinds`` holds a file for each."""

    HIT_RATE_DROP = "hit_rate_drop", "Hit rate drop"
    HIT_RATE_FLOOR = "hit_rate_floor", "Hit rate floor"
    PREDICTION_GAP = "prediction_gap", "Prediction gap"
    TTFT_OBJECTIVE = "ttft_objective", "TTFT objective"
    ERROR_RATIO = "error_ratio", "Error ratio"
    REPLICA_DOWN = "replica_down", "Replica down"
    REPLICA_EJECTED = "replica_ejected", "Replica ejected"
    KV_PRESSURE = "kv_pressure", "KV pressure"
    LOAD_SKEW = "load_skew", "Load skew"
    ROLLOUT_STUCK = "rollout_stuck", "Configuration not converged"
    EVALUATOR_LAG = "evaluator_lag", "Telemetry behind"
    NO_DATA = "no_data", "No data"


class Severity(TextChoices):
    """How soon somebody should look."""

    INFO = "info", "Info"
    WARNING = "warning", "Warning"
    CRITICAL = "critical", "Critical"


REPEAT_S = 14_400  # how often an alert that nobody took is told again


class AlertRule(models.Model):
    """A rule of one pool, or of one of its task groups, and what its last evaluation said."""

    pool = models.ForeignKey(Pool, models.CASCADE, related_name="alert_rules")
    group = models.ForeignKey(TaskGroup, models.CASCADE, null=True, related_name="alert_rules")  # None: the whole pool
    name = models.CharField(max_length=100)
    kind = models.CharField(max_length=32, choices=RuleKind, default=RuleKind.HIT_RATE_DROP)
    severity = models.CharField(max_length=8, choices=Severity, default=Severity.WARNING, db_default=Severity.WARNING)
    settings = models.JSONField(default=dict)  # of its kind, checked by the kind; what is missing takes the default
    repeat_s = models.PositiveIntegerField(default=REPEAT_S, db_default=REPEAT_S)  # 0: an alert is told once
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
