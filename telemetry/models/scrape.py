"""Scraping: the last cycle of each shard, the state of each target, and Prometheus servers with their pools."""

from __future__ import annotations

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import CheckConstraint, Q, TextChoices
from django.db.models.functions import Now

from controlplane.models import Pool, Replica, Router, VersionedModel


class ScrapeShard(models.Model):
    """The last scrape cycle of one shard. A shard that the fleet no longer needs has no row."""

    number = models.PositiveSmallIntegerField(primary_key=True)
    due_at = models.DateTimeField()  # of the last cycle
    lag_s = models.FloatField()  # from then until the cycle started
    took_s = models.FloatField(null=True)  # until everything was stored; None while it runs
    targets = models.PositiveIntegerField(default=0)  # scraped in the cycle
    failures = models.PositiveIntegerField(default=0)  # failed scrapes among them
    missed = models.PositiveBigIntegerField(default=0)  # cycles that were missed since the shard exists
    refused_since = models.DateTimeField(null=True)  # since when the database has had no space for readings

    def __str__(self) -> str:
        return f"shard {self.number} at {self.due_at:%F %T}"


# A replica that was never scraped counts as starting for so long after it was added, then as down: an engine loads
# weights and compiles for up to ten minutes.
STARTING_S = 900.0


class Health(TextChoices):
    """Whether a target can be scraped."""

    UNKNOWN = "unknown", "Unknown"  # no scrape succeeded yet, and it is not known to be down
    UP = "up", "Up"
    DOWN = "down", "Down"


class ScrapeState(models.Model):
    """The last scrape of a replica or a router. Stored, so that a worker may restart at any time."""

    replica = models.OneToOneField(Replica, models.CASCADE, null=True, related_name="scrape_state")
    router = models.OneToOneField(Router, models.CASCADE, null=True, related_name="scrape_state")
    at = models.DateTimeField()  # when the last scrape was due
    ok_at = models.DateTimeField(null=True)  # when the last one that succeeded was due
    health = models.CharField(max_length=8, choices=Health, default=Health.UNKNOWN)
    failures = models.PositiveIntegerField(default=0)  # in a row
    reason = models.CharField(max_length=200, blank=True)  # why the last scrape failed
    restarted_at = models.DateTimeField(null=True)  # when a restart was last detected
    asleep = models.BooleanField(default=False)  # vLLM's sleep mode
    lacks_prefix_cache = models.BooleanField(default=False, db_default=False)  # the engine says that it is off
    # Requests of routers themselves to a replica (probes, warm-ups) that are not yet left out of its readings.
    probes = models.PositiveIntegerField(default=0, db_default=0)
    probe_tokens = models.PositiveIntegerField(default=0, db_default=0)  # of their prompts
    probe_cached_tokens = models.PositiveIntegerField(default=0, db_default=0)
    duration_s = models.FloatField(null=True)  # of the last scrape; None: it failed
    engine = models.CharField(max_length=16, blank=True, default="", db_default="")  # vllm, sglang, tensorrt_llm
    role = models.CharField(max_length=8, blank=True, default="", db_default="")  # prefill, decode
    lora_adapters = ArrayField(models.TextField(), null=True)  # with requests at the last scrape; null: unknown
    # KV event streams of a router by replica, then rank, at the last scrape (``KvStreams``); null: unknown.
    kv_streams = models.JSONField(null=True)
    # Saturation, waiting work and prefill rate of each pool by a router (``PoolLoads``); null: unknown.
    pool_loads = models.JSONField(null=True)
    # Semantic caches of task groups by a router: state, figures and checks (``SemanticCaches``); null: unknown.
    semantic_caches = models.JSONField(null=True)
    # Replicas by pool that a router considers healthy (``ServingReplicas``); null: unknown.
    serving_replicas = models.JSONField(null=True)
    # Peers of a router, age of its view and bytes (``SharedState``), {} if it shares nothing; null: unknown.
    shared_state = models.JSONField(null=True)
    version = models.CharField(max_length=40, blank=True, default="", db_default="")  # as /version last reported
    version_at = models.DateTimeField(null=True)  # when that was last checked
    raw_counters = models.JSONField(default=dict)  # by source; see telemetry.scraping.merge

    class Meta:
        constraints = (
            CheckConstraint(
                condition=Q(replica=None, router__isnull=False) | Q(replica__isnull=False, router=None),
                name="scrape_state_one_target",
            ),
        )

    def __str__(self) -> str:
        return f"{self.health} at {self.at:%F %T}"


class MetricsServer(VersionedModel):
    """A server with Prometheus' query API. Its credentials are encrypted at rest and never returned by REST."""

    name = models.CharField(max_length=100, unique=True)
    url = models.CharField(max_length=2048)  # up to what /api/v1/query follows
    encrypted = models.BinaryField(null=True, editable=False)  # {"token"} or {"username", "password"}; None: none
    tenant = models.CharField(max_length=150, blank=True)  # X-Scope-OrgID
    series_label = models.CharField(max_length=100, default="instance")  # of the series; its value names the replica
    replica_label = models.CharField(max_length=63, blank=True)  # with that value; "": host and port
    matchers = models.CharField(max_length=500, blank=True)  # PromQL label matchers that narrow the series down
    lookback_s = models.FloatField(default=60)  # how old a sample may be, 5 to 600
    delay_s = models.FloatField(default=0)  # seconds after which a scrape is complete there, 0 to 120
    enabled = models.BooleanField(default=True)  # off: its pools are scraped directly again
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    asked_at = models.DateTimeField(null=True, editable=False)  # when it was last queried
    error = models.CharField(max_length=200, blank=True, editable=False)  # why that failed; "" if it did not
    found = models.PositiveIntegerField(null=True, editable=False)  # replicas with metrics; None: never queried
    missing = models.PositiveIntegerField(null=True, editable=False)  # replicas of its pools without metrics

    class Meta:
        ordering = ("name",)

    def __str__(self) -> str:
        return self.name


class ReadPool(models.Model):
    """A pool whose metrics are read from a Prometheus server instead of from its replicas."""

    pool = models.OneToOneField(Pool, models.CASCADE, related_name="read_from", primary_key=True)
    server = models.ForeignKey(MetricsServer, models.CASCADE, related_name="read_pools")

    def __str__(self) -> str:
        return f"{self.pool_id} from {self.server_id}"
