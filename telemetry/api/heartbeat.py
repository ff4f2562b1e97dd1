"""REST API of the heartbeat. Its URL is write-only; only the host is returned."""

from __future__ import annotations

from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework import serializers, status
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.auth import signed_in_user
from controlplane.api.fields import VersionedSerializer
from controlplane.api.viewsets.base import BaseViewSet, DestroyMixin, UpdateMixin, validated_body
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


class HeartbeatViewSet(UpdateMixin, DestroyMixin, RetrieveModelMixin, BaseViewSet[Heartbeat]):
    """The outgoing heartbeat (dead man's switch); 404 if there is none."""

    queryset = Heartbeat.objects.all()
    serializer_class = HeartbeatSerializer
    change_input = HeartbeatChange
    update_row = staticmethod(heartbeats.update_heartbeat)
    remove_row = staticmethod(lambda _row, by: heartbeats.remove_heartbeat(by=by))
    descriptions: ClassVar = {"destroy": "Stop sending the heartbeat; the receiver will report an outage."}

    @extend_schema(request=HeartbeatInput, responses={201: HeartbeatSerializer})
    def create(self, request: Request, pk: int) -> Response:  # noqa: ARG002 - there is one
        """Create the heartbeat; 409 if it exists."""
        heartbeat = heartbeats.create_heartbeat(**validated_body(HeartbeatInput, request), by=signed_in_user(request))
        return Response(
            HeartbeatSerializer(heartbeat).data, status.HTTP_201_CREATED, headers={"Location": request.path}
        )
