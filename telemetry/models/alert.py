"""Something that a rule found, from the first suspicion to the end."""

from django.db import models
from django.db.models import Q, TextChoices, UniqueConstraint, Value

from controlplane.models import Pool
from telemetry.models.alert_rule import AlertRule, Severity


class AlertState(TextChoices):
    """pending -> firing -> resolved; a pending alert that proves unfounded is deleted."""

    PENDING = "pending", "Pending"  # the rule is broken, not yet for long enough
    FIRING = "firing", "Firing"
    RESOLVED = "resolved", "Resolved"


OPEN_STATES = (AlertState.PENDING, AlertState.FIRING)
NOTHING_YET = Value({}, models.JSONField())
NONE_YET = Value([], models.JSONField())


class Alert(models.Model):
    """One episode of one rule. At most one is open per rule, pool and subject, which the database itself holds true."""

    rule = models.ForeignKey(AlertRule, models.CASCADE, related_name="alerts")
    pool = models.ForeignKey(Pool, models.CASCADE, related_name="alerts")
    subject = models.CharField(max_length=64, default="", db_default="")  # a replica's name; "": the pool or the group
    state = models.CharField(max_length=8, choices=AlertState, default=AlertState.PENDING)
    severity = models.CharField(max_length=8, choices=Severity, default=Severity.WARNING, db_default=Severity.WARNING)
    labels = models.JSONField(default=dict, db_default=NOTHING_YET)  # what silences match: telemetry.alerts.labels
    started_at = models.DateTimeField()  # the first evaluation that found the rule broken
    last_breach_at = models.DateTimeField()  # the last one
    fired_at = models.DateTimeField(null=True)
    resolved_at = models.DateTimeField(null=True)
    value = models.FloatField(null=True)  # in ``unit``, as are the next two
    limit = models.FloatField(null=True)
    baseline = models.FloatField(null=True)
    unit = models.CharField(max_length=8, default="ratio", db_default="ratio")  # "ratio", "seconds" or "count"
    value_ratio = models.FloatField(null=True)  # the value where it is a ratio
    baseline_ratio = models.FloatField(null=True)
    ceiling_ratio = models.FloatField(null=True)  # no longer written; removed by a later release
    summary = models.CharField(max_length=300, blank=True)  # one sentence
    detail = models.JSONField(default=dict)  # what a message says beyond that
    causes = models.JSONField(default=list, db_default=NONE_YET)  # of a drop, the likeliest first
    explained_at = models.DateTimeField(null=True)  # when the causes were last looked for
    acknowledged_at = models.DateTimeField(null=True)  # somebody is at it: it is not told again
    acknowledged_by = models.CharField(max_length=150, default="", db_default="")
    acknowledged_note = models.CharField(max_length=500, default="", db_default="")
    muted = models.JSONField(null=True)  # why it is not told now: telemetry.alerts.muting; None: nothing mutes it
    told_at = models.DateTimeField(null=True)  # the last message that it fires
    tellings = models.PositiveIntegerField(default=0, db_default=0)  # messages that it fires, repeats included
    end_told_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ("-started_at", "-pk")
        constraints = (
            UniqueConstraint(
                fields=("rule", "pool", "subject"), condition=Q(state__in=OPEN_STATES), name="alert_one_open_subject"
            ),
        )
        indexes = (models.Index(fields=["-started_at", "-id"], name="alert_started_at"),)

    def __str__(self) -> str:
        return self.summary or f"{self.rule_id} {self.state}"

    @property
    def reachable_ratio(self) -> float | None:
        """The pool's reachable share when the alert fired, 0 to 1; ``detail["reachable"]`` says what it rests on."""
        known: dict[str, float] | None = self.detail.get("reachable")
        return known["ratio"] if known else None
