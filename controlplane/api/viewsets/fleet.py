"""Doors to pools, replicas, task groups and routers."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework import mixins, status
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.api import serializers as s
from controlplane.api.authentication import RouterAuthentication
from controlplane.api.fields import check_allowed
from controlplane.api.filters import ReplicaFilter, TaskGroupFilter
from controlplane.api.permissions import IsRouter, signed_in_user
from controlplane.models import Pool, Project, Replica, ReplicaState, Router, TaskGroup
from controlplane.services import fleet, projects, routers, task_groups
from controlplane.services.projects import default_project
from controlplane.services.snapshots import newest_snapshot

from .doors import NAME, NUMBER, Door, parsed


class ProjectViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, Door[Project]):
    """Projects: pools that the same people look after."""

    queryset = Project.objects.all()
    serializer_class = s.ProjectSerializer
    lookup_field = "name"
    lookup_value_regex = NAME

    @extend_schema(request=s.ProjectInput, responses={201: s.ProjectSerializer})
    def create(self, request: Request) -> Response:
        """Create a project; nobody but admins of everything sees it until they are given a role in it."""
        project = projects.create_project(**parsed(s.ProjectInput, request), by=signed_in_user(request))
        return Response(s.ProjectSerializer(project).data, status.HTTP_201_CREATED)

    def destroy(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Remove a project with every role in it; 409 while it has pools."""
        projects.remove_project(self.get_object(), by=signed_in_user(request))
        return Response(status=status.HTTP_204_NO_CONTENT)


class PoolViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, Door[Pool]):
    """Pools of replicas that serve the same models."""

    queryset = Pool.objects.select_related("project")
    serializer_class = s.PoolSerializer
    lookup_field = "name"
    lookup_value_regex = NAME

    @extend_schema(request=s.PoolInput, responses={201: s.PoolSerializer})
    def create(self, request: Request) -> Response:
        """Create a pool; its policy is lowest_cost until another is published."""
        given = parsed(s.PoolInput, request)
        if "project" not in given:
            check_allowed(request, default_project())
        pool = fleet.create_pool(**given, by=signed_in_user(request))
        return Response(s.PoolSerializer(pool).data, status.HTTP_201_CREATED)

    @extend_schema(request=s.PoolChange, responses=s.PoolSerializer)
    def partial_update(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Change what is given."""
        changes = parsed(s.PoolChange, request, partial=True)
        pool = fleet.update_pool(self.get_object(), **changes, by=signed_in_user(request))
        return Response(s.PoolSerializer(pool).data)

    def destroy(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Remove an empty pool; 409 while it has replicas or task groups."""
        fleet.remove_pool(self.get_object(), by=signed_in_user(request))
        return Response(status=status.HTTP_204_NO_CONTENT)


class ReplicaViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, Door[Replica]):
    """Replicas: vLLM engines behind a base URL."""

    queryset = Replica.objects.select_related("pool")
    serializer_class = s.ReplicaSerializer
    filterset_class = ReplicaFilter
    lookup_field = "name"
    lookup_value_regex = NAME

    @extend_schema(request=s.ReplicaInput, responses={201: s.ReplicaSerializer})
    def create(self, request: Request) -> Response:
        """Add a replica; routers learn of it at once."""
        replica = fleet.add_replica(**parsed(s.ReplicaInput, request), by=signed_in_user(request))
        return Response(s.ReplicaSerializer(replica).data, status.HTTP_201_CREATED)

    @extend_schema(request=s.ReplicaChange, responses=s.ReplicaSerializer)
    def partial_update(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Change what is given."""
        changes = parsed(s.ReplicaChange, request, partial=True)
        replica = fleet.update_replica(self.get_object(), **changes, by=signed_in_user(request))
        return Response(s.ReplicaSerializer(replica).data)

    def destroy(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Remove a replica; 409 if it is the last of a task group's subset."""
        fleet.remove_replica(self.get_object(), by=signed_in_user(request))
        return Response(status=status.HTTP_204_NO_CONTENT)

    @extend_schema(request=s.ReplicaStateInput, responses=s.ReplicaSerializer)
    @action(detail=True, methods=["post"])
    def state(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Say what is wanted of it: active, draining or disabled."""
        wanted = ReplicaState(parsed(s.ReplicaStateInput, request)["state"])
        replica = fleet.set_replica_state(self.get_object(), wanted, by=signed_in_user(request))
        return Response(s.ReplicaSerializer(replica).data)


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


class RouterViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, Door[Router]):
    """Routers, each with what it runs and what it should run. They announce themselves."""

    queryset = Router.objects.all()
    serializer_class = s.RouterSerializer
    lookup_field = "name"
    lookup_value_regex = NAME

    def get_serializer_context(self) -> dict[str, Any]:
        """The newest snapshot, asked for once."""
        return {**super().get_serializer_context(), "desired": newest_snapshot()}


class AnnounceView(APIView):
    """Where routers report themselves, by the token that they share with the control plane."""

    authentication_classes = (RouterAuthentication,)
    permission_classes = (IsRouter,)

    @extend_schema(request=s.AnnounceInput, responses=s.AnnouncedSerializer)
    def post(self, request: Request) -> Response:
        """Note a heartbeat; the answer is the number to run, which is then pushed to the admin port."""
        routers.announce(**parsed(s.AnnounceInput, request))
        desired = newest_snapshot()
        return Response({"desired_revision": desired.number if desired else None})
