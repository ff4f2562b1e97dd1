"""Addresses of the control plane's REST API, below ``/api/v1/``."""

from django.urls import include, path
from rest_framework.routers import SimpleRouter

from controlplane.api.schema import SchemaView
from controlplane.api.viewsets import config, discovery, fleet, policies, routers

addresses = SimpleRouter(trailing_slash=False)
addresses.register("projects", fleet.ProjectViewSet, "project")
addresses.register("pools", fleet.PoolViewSet, "pool")
addresses.register("replicas", fleet.ReplicaViewSet, "replica")
addresses.register("replica-sources", discovery.SourceViewSet, "replica-source")
addresses.register("discovered-replicas", discovery.DiscoveredReplicaViewSet, "discovered-replica")
addresses.register("task-groups", fleet.TaskGroupViewSet, "task-group")
addresses.register("policies", policies.PolicyViewSet, "policy")
addresses.register("revisions", policies.RevisionViewSet, "revision")
addresses.register("rollouts", policies.RolloutViewSet, "rollout")
addresses.register("routers", routers.RouterViewSet, "router")
addresses.register("configurations", policies.ConfigurationViewSet, "configuration")
addresses.register("events", routers.EventViewSet, "event")
addresses.register("audit", routers.AuditViewSet, "audit")
addresses.register("client-keys", fleet.ClientKeyViewSet, "client-key")
addresses.register("tokens", routers.TokenViewSet, "token")

app_name = "api"
urlpatterns = [
    path("config", config.ConfigView.as_view(), name="config"),
    path(
        "fleet-settings",
        fleet.FleetSettingsViewSet.as_view({"get": "retrieve", "patch": "partial_update"}, detail=True),
        {"pk": 1},
        name="fleet-settings",
    ),
    path("openapi.json", SchemaView.as_view(), name="openapi"),
    path("routers/announce", routers.AnnounceView.as_view(), name="announce"),
    path("strategies", policies.CatalogueView.as_view(), name="strategies"),
    path("", include(addresses.urls)),
]
