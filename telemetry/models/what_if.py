"""What-ifs: predictions of what other policies would bring, replayed from a pool's captured traffic by a worker.

Theory of operation. A row is a queue entry and its result. A worker claims a queued row by a conditional update, and
writes ``heartbeat_at`` while it works. A running row without a recent heartbeat belongs to a worker that was killed:
the next worker claims it again and starts over, which changes nothing but time.
"""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.db import models
from django.db.models import CheckConstraint, Index, Q

from controlplane.models import Pool


class WhatIfState(models.TextChoices):
    """The life cycle of a what-if."""

    QUEUED = "queued", "Queued"
    RUNNING = "running", "Running"
    DONE = "done", "Done"
    FAILED = "failed", "Failed"
    CANCELLED = "cancelled", "Cancelled"


class WhatIf(models.Model):
    """A question about a pool's traffic, and its answer. Documents: ``telemetry.services.lab.what_ifs``."""

    pool = models.ForeignKey(Pool, models.CASCADE, related_name="what_ifs")
    start = models.DateTimeField()  # of the captured traffic
    end = models.DateTimeField()
    candidates = models.JSONField()  # as requested
    state = models.CharField(max_length=9, choices=WhatIfState, default=WhatIfState.QUEUED)
    progress_ratio = models.FloatField(default=0.0)  # 0 to 1
    is_cancelled = models.BooleanField(default=False)  # requested; the worker stops soon
    attempts = models.PositiveSmallIntegerField(default=0)  # by workers
    result = models.JSONField(null=True)
    reason = models.CharField(max_length=500, blank=True)  # why it failed
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)
    heartbeat_at = models.DateTimeField(null=True)  # of the worker that runs it
    ended_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ("-created_at", "-pk")
        indexes = (Index(fields=["state"], condition=Q(state__in=("queued", "running")), name="what_if_open"),)
        constraints = (
            CheckConstraint(condition=Q(state__in=WhatIfState.values), name="what_if_state_known"),
            CheckConstraint(condition=Q(end__gt=models.F("start")), name="what_if_window_positive"),
        )

    def __str__(self) -> str:
        return f"what-if {self.pk} of pool {self.pool_id}"

    @property
    def is_open(self) -> bool:
        """Whether it is queued or running."""
        return self.state in {WhatIfState.QUEUED, WhatIfState.RUNNING}

    @property
    def replays(self) -> list[dict[str, Any]]:
        """The replayed candidates, the active policy first; [] before the end."""
        return [] if self.result is None else self.result["candidates"]
