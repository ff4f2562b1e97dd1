"""Doors to pools."""

from __future__ import annotations

from drf_spectacular.utils import extend_schema
from rest_framework import mixins, status
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.fields import check_allowed
from controlplane.api.filters import PoolFilter
from controlplane.api.permissions import signed_in_user
from controlplane.api.serializers import pools as s
from controlplane.models import Pool
from controlplane.services.access.projects import default_project
from controlplane.services.fleet import pools

from .doors import NAME, Door, parsed


class PoolViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, Door[Pool]):
    """Pools of replicas that serve the same models."""

    queryset = Pool.objects.select_related("project")
    serializer_class = s.PoolSerializer
    filterset_class = PoolFilter
    lookup_field = "name"
    lookup_value_regex = NAME

    @extend_schema(request=s.PoolInput, responses={201: s.CreatedPoolSerializer})
    def create(self, request: Request) -> Response:
        """Create a pool; its policy is lowest_cost until another is published."""
        given = parsed(s.PoolInput, request)
        if "project" not in given:
            check_allowed(request, default_project())
        pool = pools.create_pool(**given, by=signed_in_user(request))
        return Response(s.CreatedPoolSerializer(pool).data, status.HTTP_201_CREATED)

    @extend_schema(request=s.PoolChange, responses=s.PoolSerializer)
    def partial_update(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Change what is given."""
        changes = parsed(s.PoolChange, request, partial=True)
        pool = pools.update_pool(self.get_object(), **changes, by=signed_in_user(request))
        return Response(s.PoolSerializer(pool).data)

    def destroy(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Remove an empty pool; 409 while it has replicas or task groups."""
        pools.remove_pool(self.get_object(), by=signed_in_user(request))
        return Response(status=status.HTTP_204_NO_CONTENT)
