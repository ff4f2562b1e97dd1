"""Doors to what sources found."""

from __future__ import annotations

from drf_spectacular.utils import extend_schema
from rest_framework import mixins
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.filters import DiscoveredReplicaFilter
from controlplane.api.permissions import signed_in_user
from controlplane.api.serializers import discovered_replicas as s
from controlplane.models import DiscoveredReplica
from controlplane.services.discovery import proposals as discovered_replicas

from .doors import NUMBER, Door, parsed


class DiscoveredReplicaViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, Door[DiscoveredReplica]):
    """Engines that sources found: proposed, adopted or dismissed."""

    queryset = DiscoveredReplica.objects.select_related("source__pool", "replica")
    serializer_class = s.DiscoveredReplicaSerializer
    filterset_class = DiscoveredReplicaFilter
    lookup_value_regex = NUMBER
    observed = ("url", "condition", "labels", "last_seen_at", "missing_since", "drained_at", "problem")

    @extend_schema(request=s.AdoptInput, responses=s.DiscoveredReplicaSerializer)
    @action(detail=True, methods=["post"])
    def adopt(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Make it a replica, which follows its source; 409 when it is one, is gone, or its address is taken."""
        discovered_replicas.adopt(self.get_object(), **parsed(s.AdoptInput, request), by=signed_in_user(request))
        return Response(s.DiscoveredReplicaSerializer(self.get_object()).data)

    @extend_schema(request=None, responses=s.DiscoveredReplicaSerializer)
    @action(detail=True, methods=["post"])
    def dismiss(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Want none of it; 409 when it is a replica."""
        discovered_replicas.dismiss(self.get_object(), by=signed_in_user(request))
        return Response(s.DiscoveredReplicaSerializer(self.get_object()).data)
