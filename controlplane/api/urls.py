"""URLs of the control plane's REST API, below ``/api/v1/``."""

from django.urls import include, path
from rest_framework.routers import SimpleRouter

from controlplane.api.bundle import ConfigView
from controlplane.api.viewsets import fleet, policies, routers

router = SimpleRouter(trailing_slash=False)
router.register("projects", fleet.ProjectViewSet, "project")
router.register("pools", fleet.PoolViewSet, "pool")
router.register("replicas", fleet.ReplicaViewSet, "replica")
router.register("replica-sources", fleet.SourceViewSet, "replica-source")
router.register("discovered-replicas", fleet.DiscoveredReplicaViewSet, "discovered-replica")
router.register("task-groups", fleet.TaskGroupViewSet, "task-group")
router.register("policies", policies.PolicyViewSet, "policy")
router.register("revisions", policies.RevisionViewSet, "revision")
router.register("rollouts", policies.RolloutViewSet, "rollout")
router.register("routers", routers.RouterViewSet, "router")
router.register("configurations", policies.ConfigurationViewSet, "configuration")
router.register("events", routers.EventViewSet, "event")
router.register("audit", routers.AuditViewSet, "audit")
router.register("client-keys", fleet.ClientKeyViewSet, "client-key")
router.register("tokens", routers.TokenViewSet, "token")

app_name = "api"
urlpatterns = [
    path("config", ConfigView.as_view(), name="config"),
    path(
        "fleet-settings",
        fleet.FleetSettingsViewSet.as_view({"get": "retrieve", "patch": "partial_update"}, detail=True),
        {"pk": 1},
        name="fleet-settings",
    ),
    path("openapi.json", routers.SchemaView.as_view(), name="openapi"),
    path("routers/announce", routers.AnnounceView.as_view(), name="announce"),
    path("strategies", policies.CatalogueView.as_view(), name="strategies"),
    path("", include(router.urls)),
]
