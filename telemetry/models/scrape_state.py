"""What the scraper remembers of a target between two scrapes."""

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import CheckConstraint, Q, TextChoices

from controlplane.models import Replica, Router

# A replica that was never read is starting for so long after it was added, then down: an engine loads weights and
# compiles for up to some ten minutes.
STARTING_S = 900.0


class Health(TextChoices):
    """What scraping found out about a target."""

    UNKNOWN = "unknown", "Unknown"  # never answered, never failed for sure
    UP = "up", "Up"
    DOWN = "down", "Down"


class ScrapeState(models.Model):
    """The last scrape of a replica or a router. One row each, so that a worker may restart at any moment."""

    replica = models.OneToOneField(Replica, models.CASCADE, null=True, related_name="scrape_state")
    router = models.OneToOneField(Router, models.CASCADE, null=True, related_name="scrape_state")
    at = models.DateTimeField()  # when the last scrape was due
    ok_at = models.DateTimeField(null=True)  # when the last one that succeeded was due
    health = models.CharField(max_length=8, choices=Health, default=Health.UNKNOWN)
    failures = models.PositiveIntegerField(default=0)  # in a row
    reason = models.CharField(max_length=200, blank=True)  # why the last one failed
    restarted_at = models.DateTimeField(null=True)  # when a restart was last noticed
    asleep = models.BooleanField(default=False)  # vLLM's sleep mode
    lag_s = models.FloatField(null=True)  # seconds from the beginning of the last scrape to its answer
    engine = models.CharField(max_length=16, blank=True, default="", db_default="")  # whose metrics it has
    role = models.CharField(max_length=8, blank=True, default="", db_default="")  # prefill, decode (H19)
    lora_adapters = ArrayField(models.TextField(), null=True)  # with requests at the last scrape; null: unknown
    version = models.CharField(max_length=40, blank=True, default="", db_default="")  # as /version last said
    version_at = models.DateTimeField(null=True)  # when that was last asked (H13)
    marks = models.JSONField(default=dict)  # raw counters by source; telemetry.scraping.memory reads and writes it

    class Meta:
        constraints = (
            CheckConstraint(
                condition=Q(replica=None, router__isnull=False) | Q(replica__isnull=False, router=None),
                name="scrape_state_one_target",
            ),
        )

    def __str__(self) -> str:
        return f"{self.health} at {self.at:%F %T}"
