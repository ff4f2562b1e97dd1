"""Servers that scrape replicas already, and the pools whose figures are read there instead of from the replicas."""

from django.db import models
from django.db.models.functions import Now

from controlplane.models import Pool


class MetricsServer(models.Model):
    """A server with Prometheus' query API. Its credentials are encrypted at rest and never leave by the API (S13)."""

    name = models.CharField(max_length=100, unique=True)
    url = models.CharField(max_length=2048)  # up to what /api/v1/query follows
    sealed = models.BinaryField(null=True, editable=False)  # {"token"} or {"username", "password"}; None: none
    tenant = models.CharField(max_length=150, blank=True)  # X-Scope-OrgID
    series_label = models.CharField(max_length=100, default="instance")  # of the series: its value names the replica
    replica_label = models.CharField(max_length=63, blank=True)  # of the replica; "": host and port of its URL
    matchers = models.CharField(max_length=500, blank=True)  # PromQL label matchers that narrow the series down
    lookback_s = models.FloatField(default=60)  # how old a sample may be, 5 to 600
    delay_s = models.FloatField(default=0)  # seconds after which a scrape is whole there, 0 to 120
    enabled = models.BooleanField(default=True)  # off: its pools are scraped directly again
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    asked_at = models.DateTimeField(null=True, editable=False)  # when the last reading from it ended
    error = models.CharField(max_length=200, blank=True, editable=False)  # why it failed; "" when it did not
    found = models.PositiveIntegerField(null=True, editable=False)  # replicas that it told of; None: never asked
    missing = models.PositiveIntegerField(null=True, editable=False)  # replicas of its pools that it did not

    class Meta:
        ordering = ("name",)

    def __str__(self) -> str:
        return self.name


class ReadPool(models.Model):
    """A pool whose figures come from a metrics server. A pool has one such server at most."""

    pool = models.OneToOneField(Pool, models.CASCADE, related_name="read_from", primary_key=True)
    server = models.ForeignKey(MetricsServer, models.CASCADE, related_name="read_pools")

    def __str__(self) -> str:
        return f"{self.pool_id} from {self.server_id}"
