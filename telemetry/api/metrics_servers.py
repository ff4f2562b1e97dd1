"""``/metrics-servers``: Prometheus servers; ``/heartbeat``: the external monitor that receives a heartbeat."""

from __future__ import annotations

from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema
from msgspec import to_builtins
from rest_framework import serializers, status
from rest_framework.decorators import action
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.auth import signed_in_user
from controlplane.api.fields import ByName, VersionedSerializer, serializer_of
from controlplane.api.viewsets.base import NUMBER, BaseViewSet, CrudViewSet, DestroyMixin, UpdateMixin, validated_body
from controlplane.models import Pool
from telemetry.models import Heartbeat, MetricsServer
from telemetry.services import metrics_servers
from telemetry.services.metrics_servers import ServerTestResult
from telemetry.services.notifications import heartbeats


class MetricsServerSerializer(VersionedSerializer[MetricsServer]):
    """A Prometheus server and the result of its last query."""

    pools = serializers.SerializerMethodField()
    has_credentials = serializers.SerializerMethodField()

    class Meta:
        model = MetricsServer
        fields = (
            "id",
            "name",
            "url",
            "has_credentials",
            "tenant",
            "series_label",
            "replica_label",
            "matchers",
            "lookback_s",
            "delay_s",
            "enabled",
            "pools",
            "created_at",
            "asked_at",
            "error",
            "found",
            "missing",
        )

    def get_pools(self, server: MetricsServer) -> list[str]:
        """Names of the pools whose metrics are read from this server."""
        return sorted(read.pool.name for read in server.read_pools.all())

    def get_has_credentials(self, server: MetricsServer) -> bool:
        """Whether credentials are stored."""
        return server.encrypted is not None


class Credentials(serializers.Serializer[Any]):
    """A token, or username and password; an empty object removes stored credentials."""

    token = serializers.CharField(required=False, allow_blank=True, max_length=4096)
    username = serializers.CharField(required=False, allow_blank=True, max_length=4096)
    password = serializers.CharField(required=False, allow_blank=True, max_length=4096, trim_whitespace=False)


class MetricsServerChange(serializers.Serializer[Any]):
    """Changes of a server; ``pools`` replaces all pools."""

    name = serializers.CharField(max_length=100, required=False)
    url = serializers.CharField(max_length=2048, required=False)
    credentials = Credentials(required=False, write_only=True)
    tenant = serializers.CharField(max_length=150, required=False, allow_blank=True)
    series_label = serializers.CharField(max_length=100, required=False)
    replica_label = serializers.CharField(max_length=63, required=False, allow_blank=True)
    matchers = serializers.CharField(max_length=500, required=False, allow_blank=True)
    lookback_s = serializers.FloatField(required=False, min_value=5, max_value=600)
    delay_s = serializers.FloatField(required=False, min_value=0, max_value=120)
    enabled = serializers.BooleanField(required=False)
    pools = ByName(queryset=Pool.objects.all(), many=True, required=False)


class MetricsServerInput(MetricsServerChange):
    """A new server."""

    name = serializers.CharField(max_length=100)
    url = serializers.CharField(max_length=2048)


class MetricsServerViewSet(CrudViewSet[MetricsServer]):
    """Prometheus-compatible servers that replace scraping of replicas."""

    queryset = MetricsServer.objects.prefetch_related("read_pools__pool")
    serializer_class = MetricsServerSerializer
    create_input, change_input = MetricsServerInput, MetricsServerChange
    create_row = staticmethod(metrics_servers.create_server)
    update_row = staticmethod(metrics_servers.update_server)
    remove_row = staticmethod(metrics_servers.delete_server)
    lookup_value_regex = NUMBER
    descriptions: ClassVar = {
        "create": "Add a server; its pools are read from it from the next scrape cycle on.",
        "destroy": "Delete a server; the replicas of its pools are scraped directly again.",
    }

    @extend_schema(request=None, responses=serializer_of(ServerTestResult))
    @action(detail=True, methods=["post"])
    def test(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Query the server for the replicas of its pools; nothing is stored."""
        return Response(to_builtins(metrics_servers.try_server(self.get_object())))


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
