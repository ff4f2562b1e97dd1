"""``/scaling``: a pool's saturation, waiting work and recommended replicas, for autoscalers."""

from __future__ import annotations

from typing import Any

from django.utils import timezone
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.fields import ByName
from controlplane.api.views import TransactionalView
from controlplane.models import Pool
from telemetry.lab.scaling import Limit
from telemetry.services.lab.scaling import scaling_of


class ScalingQuery(serializers.Serializer[Any]):
    """Parameters of ``/scaling``."""

    pool = ByName(queryset=Pool.objects.all())


class ScalingResponse(serializers.Serializer[Any]):
    """Null: unknown. ``reason`` explains the recommendation, or why there is none."""

    pool = serializers.CharField()
    replicas = serializers.IntegerField(help_text="active ones that were scraped lately")
    saturation_ratio = serializers.FloatField(allow_null=True, help_text="0 to 1: the higher of the next two")
    prefill_ratio = serializers.FloatField(allow_null=True, help_text="offered work / prefill rate, of all routers")
    kv_usage_ratio = serializers.FloatField(allow_null=True, help_text="mean over the replicas")
    waiting_work_s = serializers.FloatField(allow_null=True, help_text="time that the waiting tokens need")
    peak_saturation_ratio = serializers.FloatField(
        allow_null=True, help_text="in the busiest minute of the last hour; above 1: more than the replicas can prefill"
    )
    recommended_replicas = serializers.IntegerField(allow_null=True)
    limited_by = serializers.CharField(
        allow_null=True, help_text=f"what decides the recommendation: {', '.join(Limit)}"
    )
    reason = serializers.CharField(allow_blank=True)


class ScalingView(TransactionalView):
    """Scaling signals of a pool."""

    @extend_schema(parameters=[ScalingQuery], responses=ScalingResponse)
    def get(self, request: Request) -> Response:
        """Saturation, waiting work and recommended replicas of a pool, as of the newest scrapes."""
        query = ScalingQuery(data=request.query_params, context={"request": request})
        query.is_valid(raise_exception=True)
        return Response(scaling_of([query.validated_data["pool"]], timezone.now())[0].as_json())
