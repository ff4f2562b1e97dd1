"""Our proxy process, as it last reported itself.

What routers told, by the names that they gave it.

When a worker last ran scheduled work.

Items of periodic tasks whose last run failed.
"""

from __future__ import annotations

from datetime import datetime

from django.db import models
from django.db.models import UniqueConstraint

from controlplane.models.fleet import LONG_NAME, long_name, well_formed


class Router(models.Model):
    """A router that announced itself. What it should run is the newest ConfigSnapshot; what it runs stands here."""

    name = long_name(unique=True)
    admin_url = models.CharField(max_length=2048)  # where configuration is pushed to
    data_url = models.CharField(max_length=2048, blank=True)  # where clients reach it
    boot = models.CharField(max_length=64)  # changes with each start of the process
    version = models.CharField(max_length=64, blank=True)
    first_seen_at = models.DateTimeField(auto_now_add=True)
    last_seen_at = models.DateTimeField()  # it announced itself, or answered us
    lost_at = models.DateTimeField(null=True, blank=True)  # when its silence was noticed; None while it is present

    warming = models.JSONField(default=dict, blank=True)  # by replica that it warms up: prefixes and tokens, and done

    running_number = models.PositiveBigIntegerField(null=True, blank=True)  # a ConfigSnapshot's; None: nothing yet
    running_sha256 = models.CharField(max_length=64, blank=True)
    # What it says of the signature of what it runs: "verified", "expired", "unsigned" or "unchecked"; "": nothing yet.
    signature_state = models.CharField(max_length=20, blank=True, default="", db_default="")
    signature_key = models.CharField(max_length=16, blank=True, default="", db_default="")  # id of the public key
    signature_expires_at = models.DateTimeField(null=True, blank=True)
    last_ack_at = models.DateTimeField(null=True, blank=True)
    last_nack = models.JSONField(null=True, blank=True)  # {"revision", "path", "reason", "at"} until the next ACK
    last_error = models.CharField(max_length=500, blank=True)  # why the last push did not arrive; "" when it did

    pushed_number = models.PositiveBigIntegerField(null=True, blank=True)  # what was last sent, or is on its way
    push_after = models.DateTimeField(null=True, blank=True)  # that number is not sent again before this moment
    push_failures = models.PositiveIntegerField(default=0)  # in a row

    class Meta:
        ordering = ("name",)
        constraints = (well_formed("router_name_form", LONG_NAME),)

    def __str__(self) -> str:
        return self.name

    def runs(self, number: int, sha256: str) -> bool:
        """Whether it runs exactly this configuration, as far as it told us."""
        return self.running_number == number and self.running_sha256 == sha256

    def silent_for_s(self, now: datetime) -> float:
        """Seconds since it was last heard of."""
        return (now - self.last_seen_at).total_seconds()


class RouterReport(models.Model):
    """One event of a router that was taken into the timeline. A router tells again what it does not know to be taken;
    the constraint makes that once.
    """

    router = models.ForeignKey(Router, models.CASCADE, related_name="reports")
    boot = models.CharField(max_length=64)  # the router's life
    seq = models.PositiveBigIntegerField()  # 1, 2, 3 ... within it
    taken_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("pk",)
        constraints = (UniqueConstraint(fields=("router", "boot", "seq"), name="router_report_once"),)

    def __str__(self) -> str:
        return f"{self.router_id} {self.boot} {self.seq}"


class WorkerLiveness(models.Model):
    """One row: the last run of a scheduled task, which takes a beat, the broker and a worker. No row: none ever ran."""

    seen_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"worker last seen {self.seen_at:%Y-%m-%d %H:%M:%S}"


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
