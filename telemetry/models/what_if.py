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

from controlplane.models import Pool, Rollout


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


class PredictionState(models.TextChoices):
    """The life cycle of a record."""

    WAITING = "waiting", "Waiting for the rollout"
    MEASURING = "measuring", "Measuring"
    MEASURED = "measured", "Measured"
    UNMEASURED = "unmeasured", "Not measured"


OPEN_PREDICTIONS = (PredictionState.WAITING, PredictionState.MEASURING)


class Prediction(models.Model):
    """Prediction and outcome of one rollout. Documents: ``telemetry.services.lab.prediction_records``."""

    rollout = models.OneToOneField(Rollout, models.CASCADE, related_name="prediction")
    what_if = models.ForeignKey(WhatIf, models.SET_NULL, null=True, related_name="+")  # None: none, or deleted since
    predicted = models.JSONField(null=True)  # PredictedOutcome
    reason = models.CharField(max_length=500, blank=True)  # why there is no prediction
    state = models.CharField(max_length=10, choices=PredictionState, default=PredictionState.WAITING)
    measured_from = models.DateTimeField(null=True)
    measured_to = models.DateTimeField(null=True)
    measured = models.JSONField(null=True)  # MeasuredOutcome; while measuring, up to ``measured_to``
    measured_reason = models.CharField(max_length=500, blank=True)  # why nothing was measured
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("-pk",)
        indexes = (Index(fields=["state"], condition=Q(state__in=OPEN_PREDICTIONS), name="prediction_open"),)
        constraints = (CheckConstraint(condition=Q(state__in=PredictionState.values), name="prediction_state_known"),)

    def __str__(self) -> str:
        return f"prediction of rollout {self.rollout_id}"

    @property
    def is_open(self) -> bool:
        """Whether its outcome is still to be measured."""
        return self.state in OPEN_PREDICTIONS

    @property
    def is_calibrated(self) -> bool:
        """Whether there is a prediction whose replay matched what was measured before."""
        return self.predicted is not None and bool(self.predicted["is_calibrated"])

    @property
    def hit_rate_error(self) -> float | None:
        """Predicted minus measured hit rate, -1 to 1; None while one is unknown."""
        predicted, measured = self._pair("hit_rate")
        return None if predicted is None or measured is None else predicted - measured

    @property
    def ttft_p50_error(self) -> float | None:
        """Predicted / measured TTFT p50 - 1; None while one is unknown."""
        return self._relative_error("ttft_p50_s")

    @property
    def ttft_p95_error(self) -> float | None:
        """Predicted / measured TTFT p95 - 1; None while one is unknown."""
        return self._relative_error("ttft_p95_s")

    def _pair(self, name: str) -> tuple[Any, Any]:
        return (self.predicted or {}).get(name), (self.measured or {}).get(name)

    def _relative_error(self, name: str) -> float | None:
        predicted, measured = self._pair(name)
        return predicted / measured - 1 if predicted is not None and measured else None
