"""Viewsets of projects, pools, replicas, replica sources, task groups, client keys and fleet settings."""

from __future__ import annotations

from typing import ClassVar

from django.db.models import QuerySet
from drf_spectacular.utils import extend_schema
from rest_framework import status
from rest_framework.decorators import action
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.auth import signed_in_user
from controlplane.api.exceptions import problem_response
from controlplane.api.filters import (
    ClientKeyFilter,
    DiscoveredReplicaFilter,
    PoolFilter,
    ReplicaFilter,
    SourceFilter,
    TaskGroupFilter,
)
from controlplane.api.serializers import fleet as serializers
from controlplane.api.views import query_flag
from controlplane.api.viewsets.base import (
    NAME,
    NUMBER,
    BaseViewSet,
    CrudViewSet,
    ReadViewSet,
    UpdateMixin,
    validated_body,
)
from controlplane.models import (
    ClientKey,
    DiscoveredReplica,
    FleetSettings,
    Pool,
    Project,
    Replica,
    ReplicaSource,
    ReplicaState,
    TaskGroup,
)
from controlplane.services.discovery import adoption, sources
from controlplane.services.fleet import client_keys, pools, replicas, task_groups


class ProjectViewSet(CrudViewSet[Project]):
    """Projects: pools that the same users manage."""

    queryset = Project.objects.all()
    serializer_class = serializers.ProjectSerializer
    create_input, change_input = serializers.ProjectInput, serializers.ProjectChange
    create_row = staticmethod(pools.create_project)
    update_row = staticmethod(pools.update_project)
    remove_row = staticmethod(pools.remove_project)
    lookup_field, lookup_value_regex = "name", NAME
    descriptions: ClassVar = {
        "create": "Create a project. Only admins of all projects see it until somebody gets a role in it.",
        "destroy": "Remove a project with every role in it; 409 while it has pools.",
    }


class PoolViewSet(CrudViewSet[Pool]):
    """Pools of replicas that serve the same models."""

    queryset = Pool.objects.select_related("project")
    serializer_class = serializers.PoolSerializer
    created_serializer = serializers.CreatedPoolSerializer
    create_input, change_input = serializers.PoolInput, serializers.PoolChange
    create_row = staticmethod(pools.create_pool)
    update_row = staticmethod(pools.update_pool)
    remove_row = staticmethod(pools.remove_pool)
    filterset_class = PoolFilter
    lookup_field, lookup_value_regex = "name", NAME
    descriptions: ClassVar = {
        "create": "Create a pool; its policy is lowest_cost until another is published.",
        "destroy": "Remove an empty pool; 409 while it has replicas or task groups.",
    }


class ReplicaViewSet(CrudViewSet[Replica]):
    """Replicas: vLLM engines behind a base URL."""

    queryset = Replica.objects.select_related("pool")
    serializer_class = serializers.ReplicaSerializer
    create_input, change_input = serializers.ReplicaInput, serializers.ReplicaChange
    create_row = staticmethod(replicas.add_replica)
    update_row = staticmethod(replicas.update_replica)
    remove_row = staticmethod(replicas.remove_replica)
    filterset_class = ReplicaFilter
    lookup_field, lookup_value_regex = "name", NAME
    conditional_actions = ("state",)
    descriptions: ClassVar = {
        "create": "Add a replica; routers learn of it at once.",
        "destroy": "Remove a replica; 409 if it is the last of a task group's replicas.",
    }

    @extend_schema(request=serializers.ReplicaStateInput, responses=serializers.ReplicaSerializer)
    @action(detail=True, methods=["post"])
    def state(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Set the desired state: active, draining or disabled."""
        state = ReplicaState(validated_body(serializers.ReplicaStateInput, request)["state"])
        replica = replicas.set_replica_state(self.get_object(), state, by=signed_in_user(request))
        return Response(serializers.ReplicaSerializer(replica).data)


class TaskGroupViewSet(CrudViewSet[TaskGroup]):
    """Task groups: requests with one purpose."""

    queryset = TaskGroup.objects.select_related("pool").prefetch_related("replicas")
    serializer_class = serializers.TaskGroupSerializer
    create_input, change_input = serializers.TaskGroupInput, serializers.TaskGroupChange
    create_row = staticmethod(task_groups.create_task_group)
    update_row = staticmethod(task_groups.update_task_group)
    remove_row = staticmethod(task_groups.remove_task_group)
    filterset_class = TaskGroupFilter
    lookup_value_regex = NUMBER
    descriptions: ClassVar = {
        "create": "Create a group; the pool's policy places its requests until it has a policy of its own.",
        "partial_update": "Change the fields that the body holds; an empty list of replicas means all of the pool's.",
        "destroy": "Remove a group with its policy.",
    }

    @extend_schema(request=serializers.PurgeInput, responses=serializers.PurgeSerializer)
    @action(detail=True, methods=["post"], url_path="purge-response-cache")
    def purge_response_cache(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Remove its stored responses from all routers and their store; 502 with ``routers`` if some may be left.

        A dry run counts them.
        """
        group, scope = self.get_object(), validated_body(serializers.PurgeInput, request)
        is_dry_run, by = query_flag(request, "dry_run"), signed_in_user(request)
        purged = task_groups.purge_response_cache(group, **scope, by=by, dry_run=is_dry_run)
        if error := purged.incomplete:
            return problem_response(error, {"request": request})  # not raised: the audit entry is committed
        return Response(serializers.PurgeSerializer(purged).data)


class SourceViewSet(CrudViewSet[ReplicaSource]):
    """Replica sources, which find a pool's replicas by DNS, Kubernetes or a file."""

    queryset = ReplicaSource.objects.select_related("pool")
    serializer_class = serializers.SourceSerializer
    create_input, change_input = serializers.SourceInput, serializers.SourceChange
    create_row = staticmethod(sources.create_source)
    update_row = staticmethod(sources.update_source)
    remove_row = staticmethod(sources.remove_source)
    filterset_class = SourceFilter
    lookup_field, lookup_value_regex = "name", NAME
    descriptions: ClassVar = {
        "create": "Add a source; it is polled within seconds.",
        "partial_update": "Change the fields that the body holds; settings are sent whole.",
        "destroy": "Remove a source and its proposals; its replicas stay.",
    }

    @extend_schema(request=None, responses={202: serializers.SourceSerializer})
    @action(detail=True, methods=["post"])
    def poll(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Poll the source now; 202, and ``last_poll_at`` says when that was done. 409 while it is paused."""
        source = self.get_object()
        sources.request_poll(source)
        return Response(serializers.SourceSerializer(source).data, status.HTTP_202_ACCEPTED)


class DiscoveredReplicaViewSet(ReadViewSet[DiscoveredReplica]):
    """Engines that sources found: proposed, adopted, or dismissed because a user removed the replica."""

    queryset = DiscoveredReplica.objects.select_related("source__pool", "replica")
    serializer_class = serializers.DiscoveredReplicaSerializer
    filterset_class = DiscoveredReplicaFilter
    lookup_value_regex = NUMBER

    @extend_schema(request=serializers.AdoptInput, responses=serializers.DiscoveredReplicaSerializer)
    @action(detail=True, methods=["post"])
    def adopt(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Create a replica that follows its source; 409 when it exists, the engine is gone, or its URL is taken."""
        adoption.adopt(self.get_object(), **validated_body(serializers.AdoptInput, request), by=signed_in_user(request))
        return Response(serializers.DiscoveredReplicaSerializer(self.get_object()).data)


class ClientKeyViewSet(CrudViewSet[ClientKey]):
    """API keys that clients send to routers. A fleet setting says whether they are required."""

    queryset = ClientKey.objects.select_related("project", "created_by")
    serializer_class = serializers.ClientKeySerializer
    created_serializer = serializers.CreatedClientKeySerializer
    create_input, change_input = serializers.ClientKeyInput, serializers.ClientKeyChange
    create_row = staticmethod(client_keys.create_client_key)
    update_row = staticmethod(client_keys.update_client_key)
    remove_row = staticmethod(client_keys.revoke_client_key)
    filterset_class = ClientKeyFilter
    lookup_value_regex = NUMBER
    shown_once = ("key",)
    descriptions: ClassVar = {
        "create": "Create a key; its text is in this response only.",
        "partial_update": "Change the permissions and limits of a key; 409 for a revoked one.",
        "destroy": "Revoke a key; 409 if it is revoked already.",
    }


class FleetSettingsViewSet(UpdateMixin, RetrieveModelMixin, BaseViewSet[FleetSettings]):
    """Settings of all routers: whether clients need a key, and limits; one object."""

    queryset = FleetSettings.objects.all()
    serializer_class = serializers.FleetSettingsSerializer
    change_input = serializers.FleetSettingsChange
    update_row = staticmethod(lambda _row, **changes: pools.update_fleet_settings(**changes))
    http_method_names = ("get", "patch", "head", "options")

    def get_queryset(self) -> QuerySet[FleetSettings]:
        """The single row, created on first use."""
        if not getattr(self, "swagger_fake_view", False):
            pools.fleet_settings()
        return super().get_queryset()
