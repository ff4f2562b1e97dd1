"""The edges of a histogram, kept once for all readings that have them."""

from django.contrib.postgres.fields import ArrayField
from django.db import models


class BucketLayout(models.Model):
    """Upper edges of a histogram's buckets, in its unit, ascending, the infinite one left out (T2, T3)."""

    edges = ArrayField(models.FloatField())
    digest = models.CharField(max_length=64, unique=True)  # SHA-256 of the edges: 275 floats are too wide for an index

    def __str__(self) -> str:
        return f"{len(self.edges)} edges"
