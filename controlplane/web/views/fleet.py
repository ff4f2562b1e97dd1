"""The whole fleet: pools with their replicas and sources."""

from __future__ import annotations

from django.db.models import Prefetch
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET

from controlplane.models import Pool, Replica
from controlplane.web.doors import mine
from controlplane.web.sorting import asked_sort
from controlplane.web.source_lines import source_lines, with_sources
from controlplane.web.warming import warm_ups

COLUMNS = ("name", "state", "url", "weight", "block_tokens", "capacity_blocks")


@require_GET
def fleet(request: HttpRequest) -> HttpResponse:
    """Every pool with its replicas, sorted by plain links."""
    sort = asked_sort(request, COLUMNS)
    pools = mine(request, Pool.objects.select_related("project")).prefetch_related(
        Prefetch("replicas", Replica.objects.order_by("name")), with_sources()
    )
    rows = [
        {"pool": pool, "replicas": sort.apply(pool.replicas.all()), "sources": source_lines(pool)} for pool in pools
    ]
    context = {"pools": rows, "sort": sort, "warm_ups": warm_ups(mine(request, Replica.objects.all()))}
    return render(request, "controlplane/fleet.html", context)


@require_GET
@never_cache
def warming(request: HttpRequest) -> HttpResponse:
    """The replicas that are warmed up, for a refresh."""
    return render(request, "controlplane/warming.html", {"warm_ups": warm_ups(mine(request, Replica.objects.all()))})
