"""Items of periodic tasks whose last run failed."""

from django.db import models


class PeriodicTask(models.TextChoices):
    """Work that is repeated for each of many items, and whose items fail apart from one another."""

    LADDERS = "ladders", "hit-rate ladders"  # by pool
    CAPACITY_CURVES = "capacity_curves", "capacity curves"  # by pool
    ALERT_RULES = "alert_rules", "alert rules"  # by rule
    ALERT_CAUSES = "alert_causes", "causes of alerts"  # by alert
    NOTIFICATIONS = "notifications", "notifications"  # by pool: what goes into the outbox
    DELIVERIES = "deliveries", "deliveries"  # by channel
    ALERT_REFRESH = "alert_refresh", "repeated deliveries"  # by channel
    ROLLOUT_GUARDS = "rollout_guards", "rollout guards"  # by rollout
    ROLLOUTS = "rollouts", "rollouts"  # by rollout
    DECISIONS = "decisions", "collected decisions"  # by router
    METRICS_SERVERS = "metrics_servers", "metrics servers"  # by server
    SCRAPES = "scrapes", "stored scrapes"  # by replica or router
    ROLLUPS = "rollups", "rollups"  # by resolution or bin
    PARTITIONS = "partitions", "partitions"  # by table
    CONFIG_PUSHES = "config_pushes", "configuration pushes"  # by router
    REPLICA_SOURCES = "replica_sources", "replica sources"  # by source
    HOUSEKEEPING = "housekeeping", "housekeeping"  # by what is cleaned up


class ItemFailure(models.Model):
    """One item that fails, such as the ladder of one pool; deleted when a later run of the item succeeds."""

    task = models.CharField(max_length=32)  # a PeriodicTask
    item = models.CharField(max_length=200)
    since = models.DateTimeField()
    at = models.DateTimeField()  # of the last failure
    failures = models.PositiveIntegerField(default=1)
    error = models.CharField(max_length=64)  # class of the last exception; its text is only in the worker's log

    class Meta:
        constraints = (models.UniqueConstraint(fields=["task", "item"], name="item_failure_unique"),)

    def __str__(self) -> str:
        return f"{self.task} of {self.item}: {self.error}"
