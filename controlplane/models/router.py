"""Routers and their events, worker liveness, and failing items of periodic tasks."""

from __future__ import annotations

from datetime import datetime

from django.db import models
from django.db.models import UniqueConstraint

from controlplane.models.fleet import LONG_NAME, long_name, well_formed


class Router(models.Model):
    """A router and the configuration that it runs; it should run the newest ConfigSnapshot."""

    name = long_name(unique=True)
    admin_url = models.CharField(max_length=2048)  # where configuration is pushed to
    data_url = models.CharField(max_length=2048, blank=True)  # where clients reach it
    boot = models.CharField(max_length=64)  # id of the process, new at each start
    version = models.CharField(max_length=64, blank=True)
    first_seen_at = models.DateTimeField(auto_now_add=True)
    last_seen_at = models.DateTimeField()  # last heartbeat or response
    lost_at = models.DateTimeField(null=True, blank=True)  # None: connected

    warming = models.JSONField(default=dict, blank=True)  # by replica in warm-up: prefixes and tokens, total and done

    running_number = models.PositiveBigIntegerField(null=True, blank=True)  # of a ConfigSnapshot; None: nothing yet
    running_sha256 = models.CharField(max_length=64, blank=True)
    # Signature of what it runs, as it reports: "verified", "expired", "unsigned" or "unchecked"; "": nothing yet.
    signature_state = models.CharField(max_length=20, blank=True, default="", db_default="")
    signature_key = models.CharField(max_length=16, blank=True, default="", db_default="")  # id of the public key
    signature_expires_at = models.DateTimeField(null=True, blank=True)
    last_ack_at = models.DateTimeField(null=True, blank=True)
    last_nack = models.JSONField(null=True, blank=True)  # {"revision", "path", "reason", "at"} until the next ACK
    last_error = models.CharField(max_length=500, blank=True)  # of the last push; "": it arrived

    pushed_number = models.PositiveBigIntegerField(null=True, blank=True)  # last sent, or being sent
    push_after = models.DateTimeField(null=True, blank=True)  # not before this time the same number again
    push_failures = models.PositiveIntegerField(default=0)  # in a row

    class Meta:
        ordering = ("name",)
        constraints = (well_formed("router_name_form", LONG_NAME),)

    def __str__(self) -> str:
        return self.name

    def runs(self, number: int, sha256: str) -> bool:
        return self.running_number == number and self.running_sha256 == sha256

    def silent_for_s(self, now: datetime) -> float:
        return (now - self.last_seen_at).total_seconds()


class RouterReport(models.Model):
    """One event of a router that was recorded. Routers resend events without acknowledgement; the constraint
    deduplicates them.
    """

    router = models.ForeignKey(Router, models.CASCADE, related_name="reports")
    boot = models.CharField(max_length=64)
    seq = models.PositiveBigIntegerField()  # 1, 2, 3 ... within the boot
    taken_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("pk",)
        constraints = (UniqueConstraint(fields=("router", "boot", "seq"), name="router_report_once"),)

    def __str__(self) -> str:
        return f"{self.router_id} {self.boot} {self.seq}"


class WorkerLiveness(models.Model):
    """One row: the last run of a scheduled task, which needs beat, broker and worker. No row: none ever ran."""

    seen_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"worker last seen {self.seen_at:%Y-%m-%d %H:%M:%S}"


class PeriodicTask(models.TextChoices):
    """Tasks that process many items, whose failures are isolated from each other."""

    BREAKDOWNS = "breakdowns", "hit-rate breakdowns"  # by pool
    CAPACITY_CURVES = "capacity_curves", "capacity curves"  # by pool
    ALERT_RULES = "alert_rules", "alert rules"  # by rule
    ALERT_CAUSES = "alert_causes", "causes of alerts"  # by alert
    NOTIFICATIONS = "notifications", "notifications"  # by pool: filling the outbox
    DELIVERIES = "deliveries", "deliveries"  # by channel
    ALERT_REFRESH = "alert_refresh", "repeated deliveries"  # by channel
    ROLLOUT_GUARDS = "rollout_guards", "rollout guards"  # by rollout
    ROLLOUTS = "rollouts", "rollouts"  # by rollout
    DECISIONS = "decisions", "collected decisions"  # by router
    METRICS_SERVERS = "metrics_servers", "Prometheus servers"  # by server
    SCRAPES = "scrapes", "stored scrapes"  # by replica or router
    ROLLUPS = "rollups", "rollups"  # by resolution or bin
    PARTITIONS = "partitions", "partitions"  # by table
    CONFIG_PUSHES = "config_pushes", "configuration pushes"  # by router
    REPLICA_SOURCES = "replica_sources", "replica sources"  # by source
    HOUSEKEEPING = "housekeeping", "housekeeping"  # by kind of data


class ItemFailure(models.Model):
    """One item that fails, such as the breakdown of one pool; deleted when a later run of the item succeeds."""

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
