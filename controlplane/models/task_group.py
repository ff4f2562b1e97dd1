"""Requests with one purpose."""

from django.db import models
from django.db.models import UniqueConstraint

from .names import SHORT_NAME, short_name, well_formed
from .pool import Pool
from .replica import Replica


class TaskGroup(models.Model):
    """Requests with one purpose, sharing a tier-1 prefix; named by the ``X-Task-Group`` header."""

    pool = models.ForeignKey(Pool, models.PROTECT, related_name="groups")
    name = short_name()
    owner = models.CharField(max_length=200, blank=True)  # who to ask: a team, an address
    description = models.TextField(blank=True, max_length=1000)
    replicas = models.ManyToManyField(Replica, related_name="groups", blank=True)  # the subset it may use; none: all
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("pool__name", "name")
        constraints = (
            well_formed("group_name_form", SHORT_NAME),
            UniqueConstraint(fields=["pool", "name"], name="group_name_unique"),
        )

    def __str__(self) -> str:
        return f"{self.pool.name}.{self.name}"
