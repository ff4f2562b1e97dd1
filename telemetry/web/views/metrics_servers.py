"""Metrics servers: where readings come from when replicas are not scraped directly, and a way to try."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from controlplane.errors import ControlPlaneError
from controlplane.models import Pool
from controlplane.web.doors import refusals_as_messages, signed_in
from telemetry.models import MetricsServer
from telemetry.services import metrics_servers
from telemetry.web.metrics_server_form import MetricsServerForm


@require_GET
@never_cache
def server_list(request: HttpRequest) -> HttpResponse:
    """Every server, its pools, and how the last reading from it went."""
    rows = list(metrics_servers.metrics_servers())
    return render(request, "telemetry/metrics_servers.html", {"servers": rows})


@sensitive_post_parameters("token")
@never_cache
@require_http_methods(["GET", "POST"])
def server_new(request: HttpRequest) -> HttpResponse:
    """Add a server."""
    form = MetricsServerForm(request.POST or None, pools=Pool.objects.order_by("name"))
    if request.method == "POST" and form.is_valid():
        try:
            server = metrics_servers.create_server(**form.arguments(), by=signed_in(request))
        except ControlPlaneError as error:
            form.refuse(error)
        else:
            messages.success(request, f"Metrics server {server.name} was added. Try it before you rely on it.")
            return redirect("telemetry:metrics-server", server.pk)
    return _edit(request, form, None)


@sensitive_post_parameters("token")
@never_cache
@require_http_methods(["GET", "POST"])
def server_edit(request: HttpRequest, server_id: int) -> HttpResponse:
    """Change a server."""
    server = get_object_or_404(MetricsServer, pk=server_id)
    form = MetricsServerForm(request.POST or None, server=server, pools=Pool.objects.order_by("name"))
    if request.method == "POST" and form.is_valid():
        try:
            metrics_servers.update_server(server, **form.arguments(), by=signed_in(request))
        except ControlPlaneError as error:
            form.refuse(error)
        else:
            messages.success(request, f"Metrics server {server.name} was changed.")
            return redirect("telemetry:metrics-servers")
    return _edit(request, form, server)


@require_POST
def server_try(request: HttpRequest, server_id: int) -> HttpResponse:
    """Ask it now, and show which replicas it tells of."""
    server = get_object_or_404(MetricsServer, pk=server_id)
    trial = metrics_servers.try_server(server)
    return render(request, "telemetry/metrics_server_tried.html", {"server": server, "trial": trial})


@require_http_methods(["GET", "POST"])
def server_remove(request: HttpRequest, server_id: int) -> HttpResponse:
    """Forget a server, after saying what will happen."""
    server = get_object_or_404(MetricsServer, pk=server_id)
    if request.method == "POST":
        with refusals_as_messages(request):
            metrics_servers.delete_server(server, by=signed_in(request))
            messages.success(request, f"Metrics server {server.name} was removed.")
        return redirect("telemetry:metrics-servers")
    context = {
        "title": f"Remove metrics server {server.name}",
        "text": "The replicas of its pools are scraped directly from then on; what was read stays.",
        "action": "Remove the server",
        "danger": True,
        "back": reverse("telemetry:metrics-servers"),
    }
    return render(request, "controlplane/confirm.html", context)


def _edit(request: HttpRequest, form: MetricsServerForm, server: MetricsServer | None) -> HttpResponse:
    context = {"form": form, "server": server}
    return render(request, "telemetry/metrics_server_edit.html", context, status=422 if form.errors else 200)
