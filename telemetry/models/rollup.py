"""How far readings have been rolled up, and what of that is to be done again."""

from django.db import models
from django.db.models import UniqueConstraint


class RollupState(models.Model):
    """One resolution. Bins that end at or before ``rolled_through`` are read from its tables, later ones are not."""

    resolution_s = models.PositiveIntegerField(primary_key=True)
    closed_through = models.DateTimeField(null=True)  # who stores a reading of this time or before marks its bin
    rolled_through = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return f"{self.resolution_s} s through {self.rolled_through}"


class RollupRepair(models.Model):
    """A bin that was rolled up before all its readings were there."""

    resolution_s = models.PositiveIntegerField()
    at = models.DateTimeField()  # the end of the bin

    class Meta:
        constraints = (UniqueConstraint(fields=["resolution_s", "at"], name="rollup_repair_once"),)

    def __str__(self) -> str:
        return f"{self.resolution_s} s to {self.at:%F %T}"
