"""Doors to task groups."""

from __future__ import annotations

from drf_spectacular.utils import extend_schema
from rest_framework import mixins, status
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.filters import TaskGroupFilter
from controlplane.api.permissions import signed_in_user
from controlplane.api.serializers import task_groups as s
from controlplane.models import TaskGroup
from controlplane.services.fleet import task_groups

from .doors import NUMBER, Door, parsed


class TaskGroupViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, Door[TaskGroup]):
    """Task groups: requests with one purpose."""

    queryset = TaskGroup.objects.select_related("pool").prefetch_related("replicas")
    serializer_class = s.TaskGroupSerializer
    filterset_class = TaskGroupFilter
    lookup_value_regex = NUMBER

    @extend_schema(request=s.TaskGroupInput, responses={201: s.TaskGroupSerializer})
    def create(self, request: Request) -> Response:
        """Create a group; the pool's policy places it until it has one of its own."""
        group = task_groups.create_task_group(**parsed(s.TaskGroupInput, request), by=signed_in_user(request))
        return Response(s.TaskGroupSerializer(group).data, status.HTTP_201_CREATED)

    @extend_schema(request=s.TaskGroupChange, responses=s.TaskGroupSerializer)
    def partial_update(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Change what is given; an empty list of replicas means all of the pool's."""
        changes = parsed(s.TaskGroupChange, request, partial=True)
        group = task_groups.update_task_group(self.get_object(), **changes, by=signed_in_user(request))
        return Response(s.TaskGroupSerializer(group).data)

    def destroy(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Remove a group with its policy."""
        task_groups.remove_task_group(self.get_object(), by=signed_in_user(request))
        return Response(status=status.HTTP_204_NO_CONTENT)
