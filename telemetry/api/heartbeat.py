"""REST API of the heartbeat. Its URL is write-only; only the host is returned."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework import mixins, serializers, status
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.auth import signed_in_user
from controlplane.api.fields import VersionedSerializer
from controlplane.api.viewsets.base import BaseViewSet, validated_body
from telemetry.models import Heartbeat
from telemetry.services.notifications import heartbeats


class HeartbeatSerializer(VersionedSerializer[Heartbeat]):
    """The heartbeat and the result of its last delivery."""

    target = serializers.SerializerMethodField(help_text="Host of the URL.")

    class Meta:
        model = Heartbeat
        fields = ("target", "every_s", "due_at", "sent_at", "failed_at", "error", "withheld")

    def get_target(self, heartbeat: Heartbeat) -> str:
        return heartbeats.masked_url(heartbeat)


class HeartbeatChange(serializers.Serializer[Any]):
    """Changes of the heartbeat."""

    url = serializers.CharField(max_length=2048, required=False, write_only=True)
    every_s = serializers.IntegerField(
        min_value=heartbeats.MIN_S, max_value=heartbeats.MAX_S, required=False, help_text="Seconds."
    )


class HeartbeatInput(HeartbeatChange):
    """A new heartbeat."""

    url = serializers.CharField(max_length=2048, write_only=True)
    every_s = serializers.IntegerField(
        min_value=heartbeats.MIN_S, max_value=heartbeats.MAX_S, default=60, help_text="Seconds."
    )


class HeartbeatViewSet(mixins.RetrieveModelMixin, BaseViewSet[Heartbeat]):
    """The outgoing heartbeat (dead man's switch); 404 if there is none."""

    queryset = Heartbeat.objects.all()
    serializer_class = HeartbeatSerializer

    @extend_schema(request=HeartbeatInput, responses={201: HeartbeatSerializer})
    def create(self, request: Request, pk: int) -> Response:  # noqa: ARG002 - there is one
        """Create the heartbeat; 409 if it exists."""
        heartbeat = heartbeats.create_heartbeat(**validated_body(HeartbeatInput, request), by=signed_in_user(request))
        return Response(
            HeartbeatSerializer(heartbeat).data, status.HTTP_201_CREATED, headers={"Location": request.path}
        )

    @extend_schema(request=HeartbeatChange, responses=HeartbeatSerializer)
    def partial_update(self, request: Request, pk: int) -> Response:  # noqa: ARG002 - there is one
        """Change the given fields."""
        changes = validated_body(HeartbeatChange, request, partial=True)
        heartbeat = heartbeats.update_heartbeat(self.get_object(), **changes, by=signed_in_user(request))
        return Response(HeartbeatSerializer(heartbeat).data)

    def destroy(self, request: Request, pk: int) -> Response:  # noqa: ARG002 - there is one
        """Stop sending the heartbeat; the receiver will report an outage."""
        self.get_object()  # 404, 403
        heartbeats.remove_heartbeat(by=signed_in_user(request))
        return Response(status=status.HTTP_204_NO_CONTENT)
