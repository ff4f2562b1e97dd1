"""Routers: what each should run, what it runs, and why these differ."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods

from controlplane.errors import ConflictError
from controlplane.models import ConfigSnapshot, Router
from controlplane.services.impact.compare import effects_of_configurations
from controlplane.services.impact.effect import Effect
from controlplane.services.routers import remove_router
from controlplane.services.snapshots import newest_snapshot
from controlplane.web.base import errors_as_messages, signed_in
from controlplane.web.convergence import convergence, lines_of
from controlplane.web.tables import asked_sort

COLUMNS = ("name", "status", "running", "last_seen")
HISTORY = 20  # events on a router's page


@require_GET
@never_cache
def router_list(request: HttpRequest) -> HttpResponse:
    """Every router that announced itself; the table alone for a refresh."""
    state, sort = convergence(), asked_sort(request, COLUMNS)
    context = {"convergence": state, "lines": sort.apply(state.lines), "sort": sort}
    refresh = request.headers.get("HX-Request") == "true"
    return render(request, "controlplane/routers_table.html" if refresh else "controlplane/routers.html", context)


@require_GET
@never_cache
def router_detail(request: HttpRequest, router_id: int) -> HttpResponse:
    """One router: how far it is, why, what it misses, and what happened to it."""
    router = get_object_or_404(Router, pk=router_id)
    newest = newest_snapshot()
    (line,) = lines_of([router], newest)
    context = {
        "line": line,
        "router": router,
        "newest": newest,
        "nack_at": _moment((router.last_nack or {}).get("at")),
        "events": router.events.select_related("pool", "replica", "actor").order_by("-at", "-pk")[:HISTORY],
        **_missed(router, newest),
    }
    return render(request, "controlplane/router.html", context)


@require_http_methods(["GET", "POST"])
def router_remove(request: HttpRequest, router_id: int) -> HttpResponse:
    """Forget a router that is gone for good, after saying what that means."""
    router = get_object_or_404(Router, pk=router_id)
    if request.method == "POST":
        with errors_as_messages(request):
            remove_router(router, by=signed_in(request))
            messages.success(request, f"Router {router.name} was removed.")
        return redirect("controlplane:routers")
    context = {
        "title": f"Remove router {router.name}",
        "text": "It is no longer shown or pushed to. Its events stay. Should it only have been away, it announces "
        "itself within 10 s of coming back, and stands here again.",
        "warning": "" if router.lost_at else "It is still heard of. Stop it first; a router that runs is not removed.",
        "action": "Remove it",
        "danger": True,
        "back": reverse("controlplane:router", args=[router.pk]),
    }
    return render(request, "controlplane/confirm.html", context)


def _moment(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def _missed(router: Router, newest: ConfigSnapshot | None) -> dict[str, Any]:
    """What its requests still lack of the newest configuration; ``unknown`` says why nobody can tell."""
    missed: list[Effect] = []
    if newest is None or router.runs(newest.number, newest.sha256):
        return {"missed": missed, "unknown": ""}
    if router.running_number is None:
        return {"missed": missed, "unknown": "It runs nothing yet."}
    running = ConfigSnapshot.objects.filter(number=router.running_number, sha256=router.running_sha256).first()
    if running is None:
        unknown = f"Configuration {router.running_number}, which it runs, is none of this control plane's."
        return {"missed": missed, "unknown": unknown}
    try:
        return {"missed": effects_of_configurations(running, ConfigSnapshot.objects.get(pk=newest.pk)), "unknown": ""}
    except ConflictError as error:
        return {"missed": missed, "unknown": str(error)}
