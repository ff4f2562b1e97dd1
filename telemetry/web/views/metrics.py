"""``/metrics``: the web process and the control plane's own figures, as Prometheus text."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterator

from django.conf import settings
from django.contrib.auth.decorators import login_not_required
from django.core.exceptions import PermissionDenied
from django.db import DatabaseError
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.views.decorators.http import require_safe
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controlplane.client_address import client_address, is_hidden_by_proxy
from telemetry.services.own.figures import own_figures

PREFIX = "warmpath_controlplane_"


class OwnFigures(Collector):
    """What the database says; while it is away, only that."""

    def collect(self) -> Iterator[Metric]:
        """One family a name."""
        try:
            figures = own_figures(timezone.now())
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
    if is_hidden_by_proxy(request):
        return False
    try:
        address = ipaddress.ip_address(client_address(request))
    except ValueError:
        return False
    return any(address in network for network in settings.METRICS_NETWORKS)
