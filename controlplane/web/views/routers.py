"""Routers: what each should run, what it runs, and why these differ."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET

from controlplane.web.convergence import convergence
from controlplane.web.sorting import asked_sort

COLUMNS = ("name", "status", "running", "last_seen")


@require_GET
@never_cache
def router_list(request: HttpRequest) -> HttpResponse:
    """Every router that announced itself; the table alone for a refresh."""
    state, sort = convergence(), asked_sort(request, COLUMNS)
    context = {"convergence": state, "lines": sort.apply(state.lines), "sort": sort}
    refresh = request.headers.get("HX-Request") == "true"
    return render(request, "controlplane/routers_table.html" if refresh else "controlplane/routers.html", context)
