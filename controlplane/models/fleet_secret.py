"""The fleet's one secret."""

from django.db import models
from django.db.models import CheckConstraint, Q


class FleetSecret(models.Model):
    """The ``hash_secret`` mixed into every prefix hash, generated once, encrypted at rest. One row."""

    id = models.PositiveSmallIntegerField(primary_key=True, default=1)
    sealed = models.BinaryField()
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = (CheckConstraint(condition=Q(id=1), name="fleet_secret_single_row"),)

    def __str__(self) -> str:
        return "fleet secret"
