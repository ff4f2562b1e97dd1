"""When a worker last ran scheduled work."""

from django.db import models


class WorkerLiveness(models.Model):
    """One row: the last run of a scheduled task, which takes a beat, the broker and a worker. No row: none ever ran."""

    seen_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"worker last seen {self.seen_at:%Y-%m-%d %H:%M:%S}"
