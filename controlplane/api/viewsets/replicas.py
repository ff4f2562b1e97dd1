"""Doors to replicas."""

from __future__ import annotations

from drf_spectacular.utils import extend_schema
from rest_framework import mixins, status
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.filters import ReplicaFilter
from controlplane.api.permissions import signed_in_user
from controlplane.api.serializers import replicas as s
from controlplane.models import Replica, ReplicaState
from controlplane.services.fleet import replicas

from .doors import NAME, Door, parsed


class ReplicaViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, Door[Replica]):
    """Replicas: vLLM engines behind a base URL."""

    queryset = Replica.objects.select_related("pool")
    serializer_class = s.ReplicaSerializer
    filterset_class = ReplicaFilter
    lookup_field = "name"
    conditional_actions = ("state",)
    observed = ("block_tokens", "capacity_blocks")
    lookup_value_regex = NAME

    @extend_schema(request=s.ReplicaInput, responses={201: s.ReplicaSerializer})
    def create(self, request: Request) -> Response:
        """Add a replica; routers learn of it at once."""
        replica = replicas.add_replica(**parsed(s.ReplicaInput, request), by=signed_in_user(request))
        return Response(s.ReplicaSerializer(replica).data, status.HTTP_201_CREATED)

    @extend_schema(request=s.ReplicaChange, responses=s.ReplicaSerializer)
    def partial_update(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Change what is given."""
        changes = parsed(s.ReplicaChange, request, partial=True)
        replica = replicas.update_replica(self.get_object(), **changes, by=signed_in_user(request))
        return Response(s.ReplicaSerializer(replica).data)

    def destroy(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Remove a replica; 409 if it is the last of a task group's subset."""
        replicas.remove_replica(self.get_object(), by=signed_in_user(request))
        return Response(status=status.HTTP_204_NO_CONTENT)

    @extend_schema(request=s.ReplicaStateInput, responses=s.ReplicaSerializer)
    @action(detail=True, methods=["post"])
    def state(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Say what is wanted of it: active, draining or disabled."""
        wanted = ReplicaState(parsed(s.ReplicaStateInput, request)["state"])
        replica = replicas.set_replica_state(self.get_object(), wanted, by=signed_in_user(request))
        return Response(s.ReplicaSerializer(replica).data)
