"""Alert rules, alerts with their timelines, and silences."""

from __future__ import annotations

from datetime import datetime

from django.conf import settings
from django.db import models
from django.db.models import CheckConstraint, F, Q, TextChoices, UniqueConstraint, Value
from django.utils import timezone

from controlplane.models import Pool, Project, TaskGroup, VersionedModel


class RuleKind(TextChoices):
    """Kinds of alert rules, which ``telemetry.alerts.kinds`` evaluates; pages and lists have them in this order."""

    HIT_RATE_DROP = "hit_rate_drop", "Hit rate drop"
    HIT_RATE_FLOOR = "hit_rate_floor", "Hit rate floor"
    PREDICTION_GAP = "prediction_gap", "Prediction gap"
    TTFT_OBJECTIVE = "ttft_objective", "TTFT objective"
    ERROR_RATIO = "error_ratio", "Error ratio"
    STREAM_FAILURES = "stream_failures", "Stream failures"
    TRAFFIC_VANISHED = "traffic_vanished", "Traffic vanished"
    REPLICA_DOWN = "replica_down", "Replica down"
    METRICS_UNREADABLE = "metrics_unreadable", "Metrics unreadable"
    REPLICA_EJECTED = "replica_ejected", "Replica ejected"
    KV_PRESSURE = "kv_pressure", "KV pressure"
    LOAD_SKEW = "load_skew", "Load skew"
    CACHE_STORE_DOWN = "cache_store_down", "Response cache store down"
    CACHE_SHARE_DROP = "cache_share_drop", "Response cache hit share drop"
    SEMANTIC_CACHE_PRECISION = "semantic_cache_precision", "Semantic cache precision"
    ROUTER_LOST = "router_lost", "Router lost"
    ROUTERS_APART = "routers_apart", "Routers apart"
    ROLLOUT_STUCK = "rollout_stuck", "Configuration not converged"
    EVALUATOR_LAG = "evaluator_lag", "Telemetry behind"
    NO_DATA = "no_data", "No data"


def rule_kinds() -> list[tuple[str, str]]:
    """The choices of ``AlertRule.kind``, called so that another kind needs no migration."""
    return RuleKind.choices


class Severity(TextChoices):
    """How urgent an alert is."""

    INFO = "info", "Info"
    WARNING = "warning", "Warning"
    CRITICAL = "critical", "Critical"


REPEAT_S = 14_400  # interval of repeated notifications until an alert is acknowledged


class AlertRule(VersionedModel):
    """A rule of one pool or one of its task groups, with the stored verdict of an evaluation (``pipeline.py``)."""

    pool = models.ForeignKey(Pool, models.CASCADE, related_name="alert_rules")
    group = models.ForeignKey(TaskGroup, models.CASCADE, null=True, related_name="alert_rules")  # None: the whole pool
    name = models.CharField(max_length=100)
    kind = models.CharField(max_length=32, choices=rule_kinds, default=RuleKind.HIT_RATE_DROP)
    severity = models.CharField(max_length=8, choices=Severity, default=Severity.WARNING, db_default=Severity.WARNING)
    settings = models.JSONField(default=dict)  # validated by the kind; settings that are missing have their defaults
    repeat_s = models.PositiveIntegerField(default=REPEAT_S, db_default=REPEAT_S)  # 0: no repeated notifications
    runbook_url = models.URLField(max_length=500, blank=True, default="", db_default="")  # of the operators
    enabled = models.BooleanField(default=True)
    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True)
    # The stored verdict's evaluation. Later ones had the same result and reason; ``EvaluationState`` has the last.
    evaluated_at = models.DateTimeField(null=True, editable=False)
    verdict = models.JSONField(default=dict, editable=False)  # {"result", "reason", figures ...} of that evaluation

    class Meta:
        ordering = ("pool__name", "name")
        constraints = (UniqueConstraint(fields=("pool", "name"), name="alert_rule_name_unique"),)

    def __str__(self) -> str:
        return self.name

    @property
    def last_evaluated_at(self) -> datetime | None:
        """When the rule was last evaluated: every run evaluates all enabled rules. ``rules()`` annotates that time."""
        last_run_at: datetime | None = getattr(self, "last_run_at", None)
        return last_run_at if self.enabled and self.evaluated_at and last_run_at else self.evaluated_at


class EvaluationState(models.Model):
    """One row: when all enabled rules were last evaluated. No row: never."""

    at = models.DateTimeField()

    def __str__(self) -> str:
        return f"evaluated at {self.at:%F %T}"


class AlertState(TextChoices):
    """pending -> firing -> resolved; a pending alert that does not fire is deleted."""

    PENDING = "pending", "Pending"  # beyond the limit, not yet for long enough
    FIRING = "firing", "Firing"
    RESOLVED = "resolved", "Resolved"


OPEN_STATES = (AlertState.PENDING, AlertState.FIRING)
EMPTY_OBJECT = Value({}, models.JSONField())
EMPTY_LIST = Value([], models.JSONField())


class Alert(models.Model):
    """One alert of one rule. A constraint allows one open alert per rule, pool and subject."""

    rule = models.ForeignKey(AlertRule, models.CASCADE, related_name="alerts")
    pool = models.ForeignKey(Pool, models.CASCADE, related_name="alerts")
    subject = models.CharField(max_length=64, default="", db_default="")  # a replica's name; "": the pool or the group
    state = models.CharField(max_length=8, choices=AlertState, default=AlertState.PENDING)
    severity = models.CharField(max_length=8, choices=Severity, default=Severity.WARNING, db_default=Severity.WARNING)
    labels = models.JSONField(default=dict, db_default=EMPTY_OBJECT)  # silences match these: telemetry.alerts.message
    # 1; 2: it follows an alert that was resolved because the hit rate recovered and fell again at once
    episode = models.PositiveSmallIntegerField(default=1, db_default=1)
    started_at = models.DateTimeField()  # the first evaluation with a breach
    last_breach_at = models.DateTimeField()  # the last evaluation with a breach
    fired_at = models.DateTimeField(null=True)
    resolved_at = models.DateTimeField(null=True)
    value = models.FloatField(null=True)  # in ``unit``, as are the next two
    limit = models.FloatField(null=True)
    baseline = models.FloatField(null=True)
    unit = models.CharField(max_length=8, default="ratio", db_default="ratio")  # "ratio", "seconds" or "count"
    value_ratio = models.FloatField(null=True)  # the value where it is a ratio
    baseline_ratio = models.FloatField(null=True)
    summary = models.CharField(max_length=300, blank=True)  # one sentence
    detail = models.JSONField(default=dict)  # further facts for messages and pages
    causes = models.JSONField(default=list, db_default=EMPTY_LIST)  # of a drop, most likely first
    notified_causes = models.JSONField(null=True)  # {key, summary} of each cause in the last message; None: unknown
    explained_at = models.DateTimeField(null=True)  # last search for causes
    acknowledged_at = models.DateTimeField(null=True)  # repeated notifications stop
    acknowledged_by = models.CharField(max_length=150, default="", db_default="")
    acknowledged_note = models.CharField(max_length=500, default="", db_default="")
    suppression = models.JSONField(
        null=True
    )  # a Suppression of telemetry.alerts.notifications; None: notified as usual
    notified_at = models.DateTimeField(null=True)  # time of the last notification that it fires
    notification_count = models.PositiveIntegerField(
        default=0, db_default=0
    )  # notifications that it fires, repeats included
    resolution_notified_at = models.DateTimeField(null=True)

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
        """The pool's reachable share when the alert fired, 0 to 1; ``detail["reachable"]`` has its uncertainty."""
        reachable: dict[str, float] | None = self.detail.get("reachable")
        return reachable["ratio"] if reachable else None


class AlertTransition(TextChoices):
    """One entry of an alert's timeline."""

    PENDING = "pending", "Pending"
    FIRED = "fired", "Firing"
    EXPLAINED = "explained", "Causes found"
    NOTIFIED = "notified", "Notified"
    REPEATED = "repeated", "Notified again"
    SUPPRESSED = "suppressed", "Notifications suppressed"
    UNSUPPRESSED = "unsuppressed", "Notifications no longer suppressed"
    ACKNOWLEDGED = "acknowledged", "Acknowledged"
    UNACKNOWLEDGED = "unacknowledged", "Unacknowledged"
    RESOLVED = "resolved", "Resolved"
    RESOLUTION_NOTIFIED = "resolution_notified", "Resolution notified"


class SuppressionReason(TextChoices):
    """Why a firing alert sends no notifications."""

    SILENCE = "silence", "Silence"
    INHIBITED = "inhibited", "Inhibited by another alert"
    RESTART = "restart", "Expected after a restart"


class AlertHistoryEntry(models.Model):
    """One entry of an alert's timeline. Written in the transaction of the transition, never changed."""

    alert = models.ForeignKey(Alert, models.CASCADE, related_name="history")
    at = models.DateTimeField(default=timezone.now)
    transition = models.CharField(max_length=20, choices=AlertTransition)
    # None: the evaluator
    by = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, null=True, related_name="+")
    note = models.CharField(max_length=500, default="", blank=True)

    class Meta:
        ordering = ("pk",)

    def __str__(self) -> str:
        return f"{self.alert_id}: {self.transition}"


class Silence(VersionedModel):
    """Suppresses notifications of matching alerts of its project, or of all projects, for a time.

    The alerts still fire and resolve.
    """

    project = models.ForeignKey(Project, models.CASCADE, null=True, related_name="silences")
    matchers = models.JSONField()  # all of which must match: telemetry.matchers
    starts_at = models.DateTimeField()
    ends_at = models.DateTimeField()
    comment = models.CharField(max_length=500)
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, null=True, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("-ends_at", "-pk")
        constraints = (CheckConstraint(condition=Q(ends_at__gte=F("starts_at")), name="silence_ends_after_it_starts"),)
        indexes = (models.Index(fields=["ends_at"], name="silence_ends_at"),)

    def __str__(self) -> str:
        return self.comment
