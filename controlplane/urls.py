"""Joins the packages' URLs."""

from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse
from django.urls import include, path


@login_not_required
def healthz(_request: HttpRequest) -> HttpResponse:
    """Alive; asks nothing of anybody."""
    return HttpResponse("ok\n", content_type="text/plain")


urlpatterns = [
    path("healthz", healthz),
    path("accounts/", include("controlplane.web.account_urls")),
    path("", include("controlplane.web.urls")),
]
