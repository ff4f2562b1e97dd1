"""``/predictions``: for each rollout what was predicted when it was published, and what was measured after it."""

from __future__ import annotations

from typing import Any

from django_filters import rest_framework as filters
from rest_framework import serializers

from controlplane.api.pagination import newest_first
from controlplane.api.viewsets.base import NUMBER, ReadViewSet
from telemetry.models import Prediction, PredictionState


class PredictionFilter(filters.FilterSet):
    """``?pool=NAME&policy=NAME&state=STATE&rollout=ID``."""

    pool = filters.CharFilter(field_name="rollout__revision__policy__pool__name")
    policy = filters.CharFilter(field_name="rollout__revision__policy__name")
    state = filters.MultipleChoiceFilter(choices=PredictionState.choices)
    rollout = filters.NumberFilter()

    class Meta:
        model = Prediction
        fields = ("pool", "policy", "state", "rollout")


class PredictedOutcomeSerializer(serializers.Serializer[Any]):
    """What the what-if predicted of the whole pool; null: unknown."""

    hit_rate = serializers.FloatField(allow_null=True)
    ttft_p50_s = serializers.FloatField(allow_null=True)
    ttft_p95_s = serializers.FloatField(allow_null=True)
    difference = serializers.DictField(allow_null=True, help_text="From the active policy, with 95 % intervals.")
    verdict = serializers.CharField()
    is_calibrated = serializers.BooleanField()
    requests = serializers.IntegerField()
    traffic_until = serializers.DateTimeField()


class MeasuredOutcomeSerializer(serializers.Serializer[Any]):
    """What routers measured of the whole pool; null: unknown."""

    requests = serializers.IntegerField()
    hit_rate = serializers.FloatField(allow_null=True)
    accounted_ratio = serializers.FloatField(allow_null=True, help_text="Share of responses in the hit rate.")
    ttft_p50_s = serializers.FloatField(allow_null=True)
    ttft_p95_s = serializers.FloatField(allow_null=True)
    timed_requests = serializers.IntegerField(help_text="Streamed responses, which have a TTFT.")


class PredictionSerializer(serializers.ModelSerializer[Prediction]):
    """One rollout. Errors are predicted minus measured, of TTFT relative; null while one is unknown."""

    pool = serializers.CharField(source="rollout.revision.policy.pool.name", read_only=True)
    policy = serializers.CharField(source="rollout.revision.policy.name", read_only=True)
    revision = serializers.IntegerField(source="rollout.revision.number", read_only=True)
    published_at = serializers.DateTimeField(source="rollout.started_at", read_only=True)
    predicted = PredictedOutcomeSerializer(read_only=True, allow_null=True)
    measured = MeasuredOutcomeSerializer(read_only=True, allow_null=True)
    hit_rate_error = serializers.FloatField(read_only=True, allow_null=True)
    ttft_p50_error = serializers.FloatField(read_only=True, allow_null=True)
    ttft_p95_error = serializers.FloatField(read_only=True, allow_null=True)

    class Meta:
        model = Prediction
        fields = (
            *("id", "rollout", "pool", "policy", "revision", "published_at", "what_if", "predicted", "reason", "state"),
            *("measured_from", "measured_to", "measured", "measured_reason"),
            *("hit_rate_error", "ttft_p50_error", "ttft_p95_error"),
        )


class PredictionViewSet(ReadViewSet[Prediction]):
    """Predictions and outcomes of rollouts, newest first. Read-only: a worker fills them."""

    queryset = Prediction.objects.select_related("rollout__revision__policy__pool")
    serializer_class = PredictionSerializer
    filterset_class = PredictionFilter
    pagination_class = newest_first("-id")
    lookup_value_regex = NUMBER
