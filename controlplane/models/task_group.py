"""Requests with one purpose."""

from django.db import models
from django.db.models import CheckConstraint, Q, UniqueConstraint

from routing.schema import LEAST_URGENT

from .names import SHORT_NAME, short_name, well_formed
from .pool import Pool
from .replica import Replica


class TaskGroup(models.Model):
    """Requests with one purpose, sharing a tier-1 prefix; named by the ``X-Task-Group`` header, or found by ``match``.

    What routers do about it is kept as the schema's own JSON (``schema_fields``).
    """

    pool = models.ForeignKey(Pool, models.PROTECT, related_name="groups")
    name = short_name()
    owner = models.CharField(max_length=200, blank=True)  # who to ask: a team, an address
    description = models.TextField(blank=True, max_length=1000)
    replicas = models.ManyToManyField(Replica, related_name="groups", blank=True)  # the subset it may use; none: all
    match = models.JSONField(null=True, blank=True)  # routing.schema.GroupMatch; None: the header alone
    tier1 = models.JSONField(null=True, blank=True)  # routing.schema.Tier1; None: the pool's, else the policy's
    auto_replicas = models.JSONField(null=True, blank=True)  # routing.schema.AutoReplicas, instead of ``replicas``
    priority = models.PositiveSmallIntegerField(default=0)  # place in line, 0 first
    concurrency = models.JSONField(null=True, blank=True)  # routing.schema.ConcurrencyConfig; None: no limit
    caps = models.JSONField(null=True, blank=True)  # routing.schema.Caps; None: the pool's
    expected_tier1 = models.CharField(max_length=16, blank=True)  # hash of the prefix that it should share; "": unsaid
    hit_rate_objective = models.FloatField(null=True, blank=True)  # ratio that it should reach; None: unsaid
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("pool__name", "name")
        constraints = (
            well_formed("group_name_form", SHORT_NAME),
            UniqueConstraint(fields=["pool", "name"], name="group_name_unique"),
            CheckConstraint(condition=Q(priority__lte=LEAST_URGENT), name="group_priority_range"),
            CheckConstraint(condition=Q(expected_tier1__regex=r"^([0-9a-f]{16})?$"), name="group_expected_tier1_form"),
            CheckConstraint(
                condition=Q(hit_rate_objective=None) | Q(hit_rate_objective__gt=0, hit_rate_objective__lte=1),
                name="group_hit_rate_objective_range",
            ),
        )

    def __str__(self) -> str:
        return f"{self.pool.name}.{self.name}"
