"""Doors to replica sources.

Doors to what sources found.
"""

from __future__ import annotations

from drf_spectacular.utils import extend_schema
from rest_framework import mixins, status
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.filters import DiscoveredReplicaFilter, SourceFilter
from controlplane.api.permissions import signed_in_user
from controlplane.api.serializers import discovery as s
from controlplane.api.viewsets.base import NAME, NUMBER, BaseViewSet, parsed
from controlplane.models import DiscoveredReplica, ReplicaSource
from controlplane.services.discovery import adoption as discovered_replicas
from controlplane.services.discovery import sources


class SourceViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, BaseViewSet[ReplicaSource]):
    """Where to look for a pool's replicas: DNS, Kubernetes or a file."""

    queryset = ReplicaSource.objects.select_related("pool")
    serializer_class = s.SourceSerializer
    filterset_class = SourceFilter
    lookup_field = "name"
    observed = s.OBSERVED
    lookup_value_regex = NAME

    @extend_schema(request=s.SourceInput, responses={201: s.SourceSerializer})
    def create(self, request: Request) -> Response:
        """Add a source; it is looked at within seconds."""
        source = sources.create_source(**parsed(s.SourceInput, request), by=signed_in_user(request))
        return Response(s.SourceSerializer(source).data, status.HTTP_201_CREATED)

    @extend_schema(request=s.SourceChange, responses=s.SourceSerializer)
    def partial_update(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Change what is given; settings are given whole."""
        changes = parsed(s.SourceChange, request, partial=True)
        source = sources.update_source(self.get_object(), **changes, by=signed_in_user(request))
        return Response(s.SourceSerializer(source).data)

    def destroy(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Forget a source and what it proposed; its replicas stay as they are."""
        sources.remove_source(self.get_object(), by=signed_in_user(request))
        return Response(status=status.HTTP_204_NO_CONTENT)

    @extend_schema(request=None, responses={202: s.SourceSerializer})
    @action(detail=True, methods=["post"])
    def look(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Have it looked at now; 202, and ``looked_at`` says when that was done. 409 while it is paused."""
        source = self.get_object()
        sources.request_poll(source)
        return Response(s.SourceSerializer(source).data, status.HTTP_202_ACCEPTED)


class DiscoveredReplicaViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, BaseViewSet[DiscoveredReplica]):
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
