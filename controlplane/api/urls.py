"""Addresses of the control plane's REST API, below ``/api/v1/``."""

from django.urls import include, path
from rest_framework.routers import SimpleRouter

from .schema import SchemaView
from .viewsets import fleet, policies, records

router = SimpleRouter(trailing_slash=False)
router.register("projects", fleet.ProjectViewSet, "project")
router.register("pools", fleet.PoolViewSet, "pool")
router.register("replicas", fleet.ReplicaViewSet, "replica")
router.register("task-groups", fleet.TaskGroupViewSet, "task-group")
router.register("policies", policies.PolicyViewSet, "policy")
router.register("revisions", policies.RevisionViewSet, "revision")
router.register("rollouts", policies.RolloutViewSet, "rollout")
router.register("routers", fleet.RouterViewSet, "router")
router.register("events", records.EventViewSet, "event")
router.register("audit", records.AuditViewSet, "audit")
router.register("tokens", records.TokenViewSet, "token")

app_name = "api"
urlpatterns = [
    path("openapi.json", SchemaView.as_view(), name="openapi"),
    path("routers/announce", fleet.AnnounceView.as_view(), name="announce"),
    path("strategies", policies.CatalogueView.as_view(), name="strategies"),
    path("", include(router.urls)),
]
