"""The door to the heartbeat. Its address goes in and never comes out whole."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework import mixins, serializers, status
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.permissions import signed_in_user
from controlplane.api.viewsets.base import BaseViewSet, parsed
from telemetry.models import Heartbeat
from telemetry.services.notifications import heartbeats

OBSERVED = ("due_at", "sent_at", "failed_at", "error", "withheld")


class HeartbeatSerializer(serializers.ModelSerializer[Heartbeat]):
    """The heartbeat, and how the last one went."""

    target = serializers.SerializerMethodField(help_text="Where it goes, as far as that may be shown.")

    class Meta:
        model = Heartbeat
        fields = ("target", "every_s", *OBSERVED)

    def get_target(self, found: Heartbeat) -> str:
        """The host that hears it."""
        return heartbeats.target(found)


class HeartbeatChange(serializers.Serializer[Any]):
    """What to change of it."""

    url = serializers.CharField(max_length=2048, required=False, write_only=True)
    every_s = serializers.IntegerField(
        min_value=heartbeats.SHORTEST_S, max_value=heartbeats.LONGEST_S, required=False, help_text="Seconds."
    )


class HeartbeatInput(HeartbeatChange):
    """The first one."""

    url = serializers.CharField(max_length=2048, write_only=True)
    every_s = serializers.IntegerField(
        min_value=heartbeats.SHORTEST_S, max_value=heartbeats.LONGEST_S, default=60, help_text="Seconds."
    )


class HeartbeatViewSet(mixins.RetrieveModelMixin, BaseViewSet[Heartbeat]):
    """Who outside hears that all is well, and how often: one, or none (404)."""

    queryset = Heartbeat.objects.all()
    serializer_class = HeartbeatSerializer
    observed = OBSERVED

    @extend_schema(request=HeartbeatInput, responses={201: HeartbeatSerializer})
    def begin(self, request: Request, pk: int) -> Response:  # noqa: ARG002 - there is one
        """Begin to send it; 409 where one is sent already."""
        found = heartbeats.create_heartbeat(**parsed(HeartbeatInput, request), by=signed_in_user(request))
        return Response(HeartbeatSerializer(found).data, status.HTTP_201_CREATED, headers={"Location": request.path})

    @extend_schema(request=HeartbeatChange, responses=HeartbeatSerializer)
    def partial_update(self, request: Request, pk: int) -> Response:  # noqa: ARG002 - there is one
        """Change what is given."""
        changes = parsed(HeartbeatChange, request, partial=True)
        found = heartbeats.update_heartbeat(self.get_object(), **changes, by=signed_in_user(request))
        return Response(HeartbeatSerializer(found).data)

    def destroy(self, request: Request, pk: int) -> Response:  # noqa: ARG002 - there is one
        """Send it no more: whoever listens will take that for an outage."""
        self.get_object()  # 404, 403
        heartbeats.remove_heartbeat(by=signed_in_user(request))
        return Response(status=status.HTTP_204_NO_CONTENT)
