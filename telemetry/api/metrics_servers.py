"""REST API of Prometheus servers. Credentials are write-only."""

from __future__ import annotations

from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema
from msgspec import to_builtins
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.fields import ByName, VersionedSerializer, serializer_of
from controlplane.api.viewsets.base import NUMBER, CrudViewSet
from controlplane.models import Pool
from telemetry.models import MetricsServer
from telemetry.services import metrics_servers
from telemetry.services.metrics_servers import ServerTestResult


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
