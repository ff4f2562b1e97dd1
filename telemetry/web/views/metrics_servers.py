"""Metrics servers: where readings come from when replicas are not scraped directly, and a way to try.

``/metrics``: the web process and the control plane's own figures, as Prometheus text.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterator

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_not_required
from django.core.exceptions import PermissionDenied
from django.db import DatabaseError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_GET, require_http_methods, require_POST, require_safe
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controlplane.errors import ControlPlaneError
from controlplane.models import Pool
from controlplane.request_origin import client_address, lacks_forwarded_for
from controlplane.web.base import errors_as_messages, signed_in
from telemetry.models import MetricsServer
from telemetry.services import metrics_servers
from telemetry.services.self_monitoring import own_metrics
from telemetry.web.forms import MetricsServerForm


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
        with errors_as_messages(request):
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


PREFIX = "warmpath_controlplane_"


class OwnFigures(Collector):
    """What the database says; while it is away, only that."""

    def collect(self) -> Iterator[Metric]:
        """One family a name."""
        try:
            figures = own_metrics(timezone.now())
        except DatabaseError:
            figures = None
        yield GaugeMetricFamily(
            f"{PREFIX}database_up", "Whether the database answers.", value=float(figures is not None)
        )
        families: dict[str, GaugeMetricFamily] = {}
        for figure in figures or ():
            names = [name for name, _ in figure.labels]
            family = families.setdefault(
                figure.name, GaugeMetricFamily(PREFIX + figure.name, figure.text, labels=names)
            )
            if figure.value is not None:
                family.add_metric([value for _, value in figure.labels], figure.value)
        yield from families.values()


@login_not_required
@require_safe
def metrics(request: HttpRequest) -> HttpResponse:
    """For those with the token, and for those in the named networks."""
    if not _may_see(request):
        raise PermissionDenied
    text = generate_latest(REGISTRY) + generate_latest(OwnFigures())
    return HttpResponse(text, content_type=CONTENT_TYPE_LATEST)


def _may_see(request: HttpRequest) -> bool:
    expected = settings.METRICS_TOKEN
    given = request.headers.get("Authorization", "")
    if expected and hmac.compare_digest(given.encode(errors="replace"), f"Bearer {expected}".encode()):
        return True
    if lacks_forwarded_for(request):
        return False
    try:
        address = ipaddress.ip_address(client_address(request))
    except ValueError:
        return False
    return any(address in network for network in settings.METRICS_NETWORKS)
