"""Records of predictions: for each rollout what was predicted when it was published, and what was measured after it.

Theory of operation. A periodic task creates one row for each rollout and fills it from stored what-ifs, events and
readings. Every run computes a row from the beginning, so a run that is killed or repeated changes nothing.
"""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.models import CheckConstraint, Index, Q

from controlplane.models import Rollout
from telemetry.models.what_if import WhatIf


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
