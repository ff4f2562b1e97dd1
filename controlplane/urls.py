"""Joins the packages' URLs."""

from django.urls import include, path, re_path

from controlplane.api.exceptions import no_such_endpoint
from controlplane.health import healthz, readyz

handler400 = "controlplane.api.exceptions.malformed"
handler500 = "controlplane.api.exceptions.failed"

urlpatterns = [
    path("healthz", healthz),
    path("readyz", readyz),
    path("accounts/", include("controlplane.web.account_urls")),
    path("api/v1/", include("controlplane.api.urls")),
    path("api/v1/", include("telemetry.api.urls")),
    re_path("^api/", no_such_endpoint),
    path("", include("controlplane.web.urls")),
    path("", include("telemetry.web.urls")),
]
