"""Doors to configurations."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import mixins, serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.pagination import ConfigurationPages
from controlplane.api.serializers import configurations as s
from controlplane.models import ConfigSnapshot
from controlplane.services.policies.comparisons import effects_of_configurations

from .doors import NUMBER, Door

COMPARED = (("from", "A configuration's number."), ("to", "Another's: what runs instead."))


class ConfigurationViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, Door[ConfigSnapshot]):
    """Everything that routers were ever told to run, newest first. Read-only: each change of the fleet makes one."""

    queryset = ConfigSnapshot.objects.select_related("created_by").defer("sealed")
    serializer_class = s.ConfigurationSerializer
    pagination_class = ConfigurationPages
    lookup_field = "number"
    lookup_value_regex = NUMBER

    def get_queryset(self) -> QuerySet[ConfigSnapshot]:
        """Without the documents, unless one is asked for."""
        rows = super().get_queryset()
        return rows if self.action == "retrieve" else rows.defer("sealed", "document")

    def get_serializer_class(self) -> type[serializers.BaseSerializer[ConfigSnapshot]]:
        """The document, as large as the fleet, only where one is asked for."""
        return s.WholeConfigurationSerializer if self.action == "retrieve" else s.ConfigurationSerializer

    @extend_schema(
        parameters=[OpenApiParameter(name, int, required=True, description=text) for name, text in COMPARED],
        responses=s.ConfigurationsCompared,
        filters=False,
    )
    @action(detail=False, methods=["get"], pagination_class=None)
    def compare(self, request: Request) -> Response:
        """What one configuration does instead of another, for whom; 409 where one cannot be read any more."""
        asked = s.ConfigurationsAsked(data=request.query_params)
        asked.is_valid(raise_exception=True)
        before, after = asked.validated_data["from"], asked.validated_data["to"]
        answer: dict[str, Any] = {
            "before": before.number,
            "after": after.number,
            "effects": effects_of_configurations(before, after),
        }
        return Response(s.ConfigurationsCompared(answer).data)
