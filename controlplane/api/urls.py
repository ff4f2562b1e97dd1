"""Addresses of the control plane's REST API, below ``/api/v1/``."""

from django.urls import include, path
from rest_framework.routers import SimpleRouter

from .schema import SchemaView
from .viewsets import (
    audit,
    client_keys,
    config,
    configurations,
    discovered_replicas,
    events,
    fleet_settings,
    policies,
    pools,
    projects,
    replicas,
    revisions,
    rollouts,
    routers,
    sources,
    task_groups,
    tokens,
)

addresses = SimpleRouter(trailing_slash=False)
addresses.register("projects", projects.ProjectViewSet, "project")
addresses.register("pools", pools.PoolViewSet, "pool")
addresses.register("replicas", replicas.ReplicaViewSet, "replica")
addresses.register("replica-sources", sources.SourceViewSet, "replica-source")
addresses.register("discovered-replicas", discovered_replicas.DiscoveredReplicaViewSet, "discovered-replica")
addresses.register("task-groups", task_groups.TaskGroupViewSet, "task-group")
addresses.register("policies", policies.PolicyViewSet, "policy")
addresses.register("revisions", revisions.RevisionViewSet, "revision")
addresses.register("rollouts", rollouts.RolloutViewSet, "rollout")
addresses.register("routers", routers.RouterViewSet, "router")
addresses.register("configurations", configurations.ConfigurationViewSet, "configuration")
addresses.register("events", events.EventViewSet, "event")
addresses.register("audit", audit.AuditViewSet, "audit")
addresses.register("client-keys", client_keys.ClientKeyViewSet, "client-key")
addresses.register("tokens", tokens.TokenViewSet, "token")

app_name = "api"
urlpatterns = [
    path("config", config.ConfigView.as_view(), name="config"),
    path(
        "fleet-settings",
        fleet_settings.FleetSettingsViewSet.as_view({"get": "retrieve", "patch": "partial_update"}, detail=True),
        {"pk": 1},
        name="fleet-settings",
    ),
    path("openapi.json", SchemaView.as_view(), name="openapi"),
    path("routers/announce", routers.AnnounceView.as_view(), name="announce"),
    path("strategies", policies.CatalogueView.as_view(), name="strategies"),
    path("", include(addresses.urls)),
]
