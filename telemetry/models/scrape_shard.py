"""How well a part of the fleet is being scraped."""

from django.db import models


class ScrapeShard(models.Model):
    """The last tick of one shard. A shard that the fleet no longer needs has no row."""

    number = models.PositiveSmallIntegerField(primary_key=True)
    due_at = models.DateTimeField()  # the place on the shard's grid that was taken last
    lag_s = models.FloatField()  # from then until the scrape began
    took_s = models.FloatField(null=True)  # from its beginning until all was stored; None while it runs
    targets = models.PositiveIntegerField(default=0)  # scraped by it
    failures = models.PositiveIntegerField(default=0)  # of those
    missed = models.PositiveBigIntegerField(default=0)  # ticks that never were, since the shard exists
    refused_since = models.DateTimeField(null=True)  # the database had no room for what was scraped

    def __str__(self) -> str:
        return f"shard {self.number} at {self.due_at:%F %T}"
