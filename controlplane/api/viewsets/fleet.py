"""Doors to pools.

Doors to replicas.

Doors to task groups.

Doors to projects.

Doors to client keys.

The door to what holds for all routers.
"""

from __future__ import annotations

from django.db.models import QuerySet
from drf_spectacular.utils import extend_schema
from rest_framework import mixins, status
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.fields import check_allowed
from controlplane.api.filters import ClientKeyFilter, PoolFilter, ReplicaFilter, TaskGroupFilter
from controlplane.api.permissions import signed_in_user
from controlplane.api.serializers import fleet as s
from controlplane.api.viewsets.base import NAME, NUMBER, BaseViewSet, parsed
from controlplane.models import ClientKey, FleetSettings, Pool, Project, Replica, ReplicaState, TaskGroup
from controlplane.services.fleet import client_keys, pools, replicas, task_groups
from controlplane.services.fleet.pools import default_project, fleet_settings, update_fleet_settings


class PoolViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, BaseViewSet[Pool]):
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


class ReplicaViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, BaseViewSet[Replica]):
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


class TaskGroupViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, BaseViewSet[TaskGroup]):
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


class ProjectViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, BaseViewSet[Project]):
    """Projects: pools that the same people look after."""

    queryset = Project.objects.all()
    serializer_class = s.ProjectSerializer
    lookup_field = "name"
    lookup_value_regex = NAME

    @extend_schema(request=s.ProjectInput, responses={201: s.ProjectSerializer})
    def create(self, request: Request) -> Response:
        """Create a project; nobody but admins of everything sees it until they are given a role in it."""
        project = pools.create_project(**parsed(s.ProjectInput, request), by=signed_in_user(request))
        return Response(s.ProjectSerializer(project).data, status.HTTP_201_CREATED)

    @extend_schema(request=s.ProjectChange, responses=s.ProjectSerializer)
    def partial_update(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Change what is given."""
        changes = parsed(s.ProjectChange, request, partial=True)
        project = pools.update_project(self.get_object(), **changes, by=signed_in_user(request))
        return Response(s.ProjectSerializer(project).data)

    def destroy(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Remove a project with every role in it; 409 while it has pools."""
        pools.remove_project(self.get_object(), by=signed_in_user(request))
        return Response(status=status.HTTP_204_NO_CONTENT)


class ClientKeyViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, BaseViewSet[ClientKey]):
    """Keys that clients send to routers. Whether one is needed is a setting of the fleet."""

    queryset = ClientKey.objects.select_related("project", "created_by")
    serializer_class = s.ClientKeySerializer
    filterset_class = ClientKeyFilter
    lookup_value_regex = NUMBER
    shown_once = ("key",)

    @extend_schema(request=s.ClientKeyInput, responses={201: s.CreatedClientKeySerializer})
    def create(self, request: Request) -> Response:
        """Create a key; its text is in this answer and nowhere else."""
        key, text = client_keys.create_client_key(**parsed(s.ClientKeyInput, request), by=signed_in_user(request))
        answer = {**s.ClientKeySerializer(key).data, "key": text}
        return Response(answer, status.HTTP_201_CREATED, headers={"Cache-Control": "no-store"})

    @extend_schema(request=s.ClientKeyChange, responses=s.ClientKeySerializer)
    def partial_update(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Change what a key is good for; 409 for a revoked one."""
        changes = parsed(s.ClientKeyChange, request, partial=True)
        key = client_keys.update_client_key(self.get_object(), **changes, by=signed_in_user(request))
        return Response(s.ClientKeySerializer(key).data)

    def destroy(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Revoke a key; 409 if it was revoked before."""
        client_keys.revoke_client_key(self.get_object(), by=signed_in_user(request))
        return Response(status=status.HTTP_204_NO_CONTENT)


class FleetSettingsViewSet(mixins.RetrieveModelMixin, BaseViewSet[FleetSettings]):
    """Who is let in, and what routers accept and wait for; one object."""

    queryset = FleetSettings.objects.all()
    serializer_class = s.FleetSettingsSerializer
    http_method_names = ("get", "patch", "head", "options")

    def get_queryset(self) -> QuerySet[FleetSettings]:
        """The one row."""
        if not getattr(self, "swagger_fake_view", False):
            fleet_settings()
        return super().get_queryset()

    @extend_schema(request=s.FleetSettingsChange, responses=s.FleetSettingsSerializer)
    def partial_update(self, request: Request, pk: int) -> Response:  # noqa: ARG002 - there is one
        """Change what is given; routers learn of it at once."""
        changes = parsed(s.FleetSettingsChange, request, partial=True)
        row = update_fleet_settings(**changes, by=signed_in_user(request))
        return Response(s.FleetSettingsSerializer(row).data)
