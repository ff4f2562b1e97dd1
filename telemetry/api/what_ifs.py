"""``/what-ifs``: predictions of other policies, from captured traffic."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from django_filters import rest_framework as filters
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema
from rest_framework import serializers, status
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.auth import signed_in_user
from controlplane.api.fields import ByName
from controlplane.api.pagination import NewestFirst
from controlplane.api.viewsets.base import NUMBER, ReadViewSet, validated_body
from controlplane.models import Pool
from telemetry.models import WhatIf, WhatIfState
from telemetry.services.lab.sizing import create_sweep
from telemetry.services.lab.what_ifs import cancel_what_if, create_what_if, trace_lines


class WhatIfFilter(filters.FilterSet):
    """``?pool=NAME&state=STATE``."""

    pool = filters.CharFilter(field_name="pool__name")
    state = filters.MultipleChoiceFilter(choices=WhatIfState.choices)

    class Meta:
        model = WhatIf
        fields = ("pool", "state")


class WhatIfPages(NewestFirst):
    """What-ifs, the newest first."""

    ordering = ("-created_at", "-id")


class CandidateInput(serializers.Serializer[Any]):
    """One candidate; what it leaves out stays as it is."""

    name = serializers.CharField(max_length=100)
    settings = serializers.DictField(
        required=False, allow_null=True, help_text="A policy's settings, as in a draft; null: the active policy."
    )
    groups = serializers.DictField(
        required=False,
        allow_null=True,
        child=serializers.DictField(allow_null=True),
        help_text="Settings by task group; null: the pool's policy.",
    )
    replicas = serializers.IntegerField(required=False, allow_null=True, help_text="Number of replicas.")
    cache_tokens = serializers.IntegerField(
        required=False, allow_null=True, help_text="Cache size of each replica in tokens."
    )


class WhatIfInput(serializers.Serializer[Any]):
    """A new what-if. The default window is the last 30 minutes."""

    pool = ByName(queryset=Pool.objects.all())
    candidates = CandidateInput(many=True, required=False)
    sweep = serializers.ChoiceField(
        choices=["capacity"],
        required=False,
        help_text="Instead of candidates: numbers of replicas and cache sizes around the present ones.",
    )
    start = serializers.DateTimeField(required=False)
    end = serializers.DateTimeField(required=False)

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Either candidates or a sweep."""
        if ("candidates" in attrs) == ("sweep" in attrs):
            raise serializers.ValidationError({"candidates": "expected either candidates or sweep"})
        return attrs


class WhatIfSummary(serializers.ModelSerializer[WhatIf]):
    """A what-if without its result."""

    pool = ByName(read_only=True)
    candidates = serializers.ListField(child=serializers.DictField(), read_only=True)

    class Meta:
        model = WhatIf
        fields: tuple[str, ...] = (
            "id",
            "pool",
            "start",
            "end",
            "candidates",
            "state",
            "progress_ratio",
            "reason",
            "created_at",
            "ended_at",
        )


class WhatIfSerializer(WhatIfSummary):
    """A what-if. ``result`` is null until it is done: calibration, and figures of each candidate, the active first."""

    result = serializers.DictField(read_only=True, allow_null=True)

    class Meta(WhatIfSummary.Meta):
        fields = (*WhatIfSummary.Meta.fields, "result")


class WhatIfViewSet(ReadViewSet[WhatIf]):
    """Predictions of other policies on captured traffic."""

    queryset = WhatIf.objects.select_related("pool")
    serializer_class = WhatIfSerializer
    filterset_class = WhatIfFilter
    pagination_class = WhatIfPages
    lookup_value_regex = NUMBER

    def get_serializer_class(self) -> type[WhatIfSummary]:
        """Lists omit the results."""
        return WhatIfSummary if self.action == "list" else WhatIfSerializer

    @extend_schema(request=WhatIfInput, responses={201: WhatIfSerializer})
    def create(self, request: Request) -> Response:
        """Queue a what-if; a worker runs it. 409 if too many of the pool are queued or running."""
        params = validated_body(WhatIfInput, request)
        create = create_sweep if params.pop("sweep", None) else create_what_if
        created = create(params.pop("pool"), **params, by=signed_in_user(request))
        return Response(WhatIfSerializer(created).data, status.HTTP_201_CREATED)

    @extend_schema(request=None, responses=WhatIfSerializer)
    @action(detail=True, methods=["post"])
    def cancel(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Cancel it; a running one stops within a second or two. 409 if it has ended."""
        return Response(WhatIfSerializer(cancel_what_if(self.get_object().pk)).data)

    @extend_schema(responses={(200, "application/x-ndjson"): OpenApiTypes.STR})
    @action(detail=True, methods=["get"])
    def trace(self, request: Request, pk: str) -> HttpResponse:  # noqa: ARG002 - get_object reads it
        """The captured traffic as a trace in Mooncake's format: times, lengths and block ids, no text."""
        what_if = self.get_object()
        body = b"".join(trace_lines(what_if.pool, what_if.start, what_if.end))
        response = HttpResponse(body, content_type="application/x-ndjson")
        response["Content-Disposition"] = f'attachment; filename="{what_if.pool.name}.jsonl"'
        return response
