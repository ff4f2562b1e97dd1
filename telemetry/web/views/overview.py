"""The overview: what is my hit rate, TTFT and KV usage, now and over time, and how far from the reachable share?"""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_GET

from controlplane.web.sorting import asked_sort
from telemetry.services.figures.heat import heat_strips
from telemetry.services.figures.overview import fleet_tiles, group_rows, replica_rows
from telemetry.services.notifications.channels import notified_by
from telemetry.web.asking import Asked, asked
from telemetry.web.pages import around, frame, live_part
from telemetry.web.silence import reading_stopped
from telemetry.web.tables import GROUP_COLUMNS, REPLICA_COLUMNS


@require_GET
def overview(request: HttpRequest) -> HttpResponse:
    """The whole page; its charts ask for their figures themselves. A pool that is asked for has a page of its own."""
    state = asked(request)
    if state.subject.pool is not None:
        query = request.GET.copy()
        query.pop("pool", None)
        return redirect(f"{reverse('telemetry:pool', args=[state.subject.pool.name])}?{query.urlencode()}")
    return render(request, "telemetry/overview.html", {**_live(request, state), **frame(request, state)})


@live_part
def overview_live(request: HttpRequest) -> HttpResponse:
    """Tiles, tables and events, asked for again every few seconds; 304 while nothing changed."""
    return render(request, "telemetry/overview_live.html", _live(request, asked(request)))


def _live(request: HttpRequest, state: Asked) -> dict[str, Any]:
    """Everything that changes by itself. A fixed number of queries, whatever the fleet's size."""
    subject = state.subject
    tiles = fleet_tiles(subject.among, state.range.now)
    replica_sort = asked_sort(request, REPLICA_COLUMNS)
    group_sort = asked_sort(request, GROUP_COLUMNS, param="gsort")
    return {
        **around(state),
        "notified_by": notified_by(),
        "tiles": tiles,
        "silence": reading_stopped(tiles, timezone.now()) if state.range.live else "",
        "replicas": replica_sort.apply(replica_rows(subject.among, state.range.table)),
        "strips": heat_strips(subject.replicas(), state.range.window),
        "replica_sort": replica_sort,
        "groups": group_sort.apply(group_rows(subject.among, state.range.table)),
        "group_sort": group_sort,
    }
