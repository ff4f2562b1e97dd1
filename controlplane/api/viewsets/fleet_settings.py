"""The door to what holds for all routers."""

from __future__ import annotations

from django.db.models import QuerySet
from drf_spectacular.utils import extend_schema
from rest_framework import mixins
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.permissions import signed_in_user
from controlplane.api.serializers import fleet_settings as s
from controlplane.models import FleetSettings
from controlplane.services.fleet.settings import fleet_settings, update_fleet_settings

from .doors import Door, parsed


class FleetSettingsViewSet(mixins.RetrieveModelMixin, Door[FleetSettings]):
    """Who is let in, and what routers accept and wait for; one object."""

    queryset = FleetSettings.objects.all()
    serializer_class = s.FleetSettingsSerializer
    http_method_names = ("get", "patch", "head", "options")

    def get_queryset(self) -> QuerySet[FleetSettings]:
        """The one row."""
        if not getattr(self, "swagger_fake_view", False):
            fleet_settings()
        return super().get_queryset()

    @extend_schema(request=s.FleetSettingsChange, responses=s.FleetSettingsSerializer)
    def partial_update(self, request: Request, pk: int) -> Response:  # noqa: ARG002 - there is one
        """Change what is given; routers learn of it at once."""
        changes = parsed(s.FleetSettingsChange, request, partial=True)
        row = update_fleet_settings(**changes, by=signed_in_user(request))
        return Response(s.FleetSettingsSerializer(row).data)
