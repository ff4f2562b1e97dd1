"""Prometheus servers, read by telemetry instead of replicas; and this server's own ``/metrics``."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterator
from functools import partial

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_not_required
from django.core.exceptions import PermissionDenied
from django.db import DatabaseError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_GET, require_http_methods, require_POST, require_safe
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controlplane.models import Pool
from controlplane.request_origin import client_address, lacks_forwarded_for
from controlplane.web.base import confirm_page, current_user
from telemetry.models import MetricsServer
from telemetry.services import metrics_servers
from telemetry.services.self_monitoring import own_metrics
from telemetry.web.forms import MetricsServerForm

PREFIX = "warmpath_controlplane_"


@require_GET
@never_cache
def server_list(request: HttpRequest) -> HttpResponse:
    """Every Prometheus server with its pools and its last query."""
    servers = list(metrics_servers.metrics_servers())
    return render(request, "telemetry/metrics_servers.html", {"servers": servers})


@sensitive_post_parameters("token")
@never_cache
@require_http_methods(["GET", "POST"])
def server_new(request: HttpRequest) -> HttpResponse:
    """Add a Prometheus server."""
    form = MetricsServerForm(request.POST or None, pools=Pool.objects.order_by("name"))
    if form.is_valid():
        with form.service_errors():
            server = metrics_servers.create_server(**form.arguments(), by=current_user(request))
            messages.success(request, f"Prometheus server {server.name} was added. Test it before you rely on it.")
            return redirect("telemetry:metrics-server", server.pk)
    return _form(request, form, None)


@sensitive_post_parameters("token")
@never_cache
@require_http_methods(["GET", "POST"])
def server_edit(request: HttpRequest, server_id: int) -> HttpResponse:
    """Change a Prometheus server."""
    server = get_object_or_404(MetricsServer, pk=server_id)
    form = MetricsServerForm(request.POST or None, server=server, pools=Pool.objects.order_by("name")).editing(server)
    if form.is_valid():
        with form.service_errors(), form.locked():
            metrics_servers.update_server(server, **form.arguments(), by=current_user(request))
            messages.success(request, f"Prometheus server {server.name} was changed.")
            return redirect("telemetry:metrics-servers")
    return _form(request, form, server)


def _form(request: HttpRequest, form: MetricsServerForm, server: MetricsServer | None) -> HttpResponse:
    context = {"form": form, "server": server}
    return render(request, "telemetry/metrics_server_edit.html", context, status=422 if form.errors else 200)


@require_POST
def server_test(request: HttpRequest, server_id: int) -> HttpResponse:
    """Query a Prometheus server now, and show for which replicas it has metrics."""
    server = get_object_or_404(MetricsServer, pk=server_id)
    context = {"server": server, "test_result": metrics_servers.try_server(server)}
    return render(request, "telemetry/metrics_server_test.html", context)


@require_http_methods(["GET", "POST"])
def server_remove(request: HttpRequest, server_id: int) -> HttpResponse:
    """Remove a Prometheus server."""
    server = get_object_or_404(MetricsServer, pk=server_id)
    return confirm_page(
        request,
        partial(metrics_servers.delete_server, server, by=current_user(request)),
        back="telemetry:metrics-servers",
        title=f"Remove Prometheus server {server.name}",
        text="The replicas of its pools are then scraped directly. Stored metrics are kept.",
        action="Remove server",
        done=f"Prometheus server {server.name} was removed.",
    )


class OwnMetrics(Collector):
    """Metrics of the control plane from the database; only ``database_up`` while it is unavailable."""

    def collect(self) -> Iterator[Metric]:
        """One family per name."""
        try:
            figures = own_metrics(timezone.now())
        except DatabaseError:
            figures = None
        is_up = float(figures is not None)
        yield GaugeMetricFamily(f"{PREFIX}database_up", "Whether the database responds.", value=is_up)
        families: dict[str, GaugeMetricFamily] = {}
        for figure in figures or ():
            labels = [name for name, _ in figure.labels]
            new = GaugeMetricFamily(PREFIX + figure.name, figure.text, labels=labels)
            family = families.setdefault(figure.name, new)
            if figure.value is not None:
                family.add_metric([value for _, value in figure.labels], figure.value)
        yield from families.values()


@login_not_required
@require_safe
def metrics(request: HttpRequest) -> HttpResponse:
    """Prometheus metrics, for requests with the token and for clients in METRICS_NETWORKS."""
    if not _is_permitted(request):
        raise PermissionDenied
    text = generate_latest(REGISTRY) + generate_latest(OwnMetrics())
    return HttpResponse(text, content_type=CONTENT_TYPE_LATEST)


def _is_permitted(request: HttpRequest) -> bool:
    token = settings.METRICS_TOKEN
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if token and scheme.lower() == "bearer" and hmac.compare_digest(given.encode(errors="replace"), token.encode()):
        return True
    if lacks_forwarded_for(request):
        return False
    try:
        address = ipaddress.ip_address(client_address(request))
    except ValueError:
        return False
    return any(address in network for network in settings.METRICS_NETWORKS)
