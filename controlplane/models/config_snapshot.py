"""What routers are told, numbered and sealed."""

from typing import Any

from django.conf import settings
from django.db import models
from django.db.models import CheckConstraint, Q

from controlplane.errors import FrozenError


class ConfigSnapshot(models.Model):
    """The whole configuration at one moment, as routers receive it. The newest is what every router should run.

    Written once, never changed: a trigger holds this in the database too (migration 0002).
    """

    number = models.PositiveBigIntegerField(unique=True)  # the wire's revision: 1, 2, 3 ...
    sha256 = models.CharField(max_length=64)  # of the config's bytes, as routers compute it
    document = models.JSONField()  # the config for people: its hash_secret is shown as ***
    sealed = models.BinaryField()  # the very bytes that routers get, encrypted at rest
    reason = models.CharField(max_length=500)
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, null=True, blank=True, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("-number",)
        constraints = (CheckConstraint(condition=Q(number__gt=0), name="snapshot_number_positive"),)

    def __str__(self) -> str:
        return f"snapshot {self.number}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save a new snapshot; FrozenError for one that exists."""
        if self.pk:
            raise FrozenError("configuration snapshot", str(self.number))
        super().save(*args, **kwargs)
