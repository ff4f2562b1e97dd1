"""URLs of telemetry's REST API, below ``/api/v1/``."""

from django.urls import include, path
from rest_framework.routers import SimpleRouter

from telemetry.api import alert_viewsets, viewsets
from telemetry.api.breakdown import BreakdownView, ReconciliationView
from telemetry.api.capacity import CapacityView, ReportView, ResponseCachesView, ScalingView, ValueView
from telemetry.api.metrics_servers import HeartbeatViewSet, MetricsServerViewSet
from telemetry.api.what_ifs import WhatIfViewSet

router = SimpleRouter(trailing_slash=False)
router.register("alert-rules", alert_viewsets.AlertRuleViewSet, "alert-rule")
router.register("alerts", alert_viewsets.AlertViewSet, "alert")
router.register("silences", alert_viewsets.SilenceViewSet, "silence")
router.register("channels", viewsets.ChannelViewSet, "channel")
router.register("metrics-servers", MetricsServerViewSet, "metrics-server")
router.register("deliveries", viewsets.DeliveryViewSet, "delivery")
router.register("what-ifs", WhatIfViewSet, "what-if")

app_name = "telemetry-api"
urlpatterns = [
    path(
        "heartbeat",
        HeartbeatViewSet.as_view(
            {"get": "retrieve", "post": "create", "patch": "partial_update", "delete": "destroy"}, detail=True
        ),
        {"pk": 1},
        name="heartbeat",
    ),
    path("prompts", viewsets.PromptsView.as_view(), name="prompts"),
    path("series", viewsets.SeriesView.as_view(), name="series"),
    path("reconciliation", ReconciliationView.as_view(), name="reconciliation"),
    path("capacity", CapacityView.as_view(), name="capacity"),
    path("response-caches", ResponseCachesView.as_view(), name="response-caches"),
    path("scaling", ScalingView.as_view(), name="scaling"),
    path("value", ValueView.as_view(), name="value"),
    path("report", ReportView.as_view(), name="report"),
    path("breakdown", BreakdownView.as_view(), name="breakdown"),
    path("", include(router.urls)),
]
