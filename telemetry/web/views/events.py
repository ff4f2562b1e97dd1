"""Everything that happened, newest first."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from controlplane.access.asker import asker_of
from controlplane.access.scope import visible
from controlplane.models import Event, EventKind, Pool

PAGE = 50


@require_GET
def event_list(request: HttpRequest) -> HttpResponse:
    """A page of events, of one kind or pool if asked; older ones by a plain link."""
    kind, pool, before = request.GET.get("kind", ""), request.GET.get("pool", ""), request.GET.get("before", "")
    events = visible(asker_of(request), Event.objects.select_related("pool", "replica", "router", "actor")).order_by(
        "-pk"
    )
    if kind in EventKind.values:
        events = events.filter(kind=kind)
    if "\0" in pool:  # PostgreSQL looks for no such name
        events = events.none()
    elif pool:
        events = events.filter(pool__name=pool)
    if before.isascii() and before.isdigit() and len(before) < 19:
        events = events.filter(pk__lt=int(before))
    page = list(events[: PAGE + 1])
    context = {
        "events": page[:PAGE],
        "more": page[PAGE - 1].pk if len(page) > PAGE else None,
        "kinds": EventKind.choices,
        "kind": kind,
        "pools": visible(asker_of(request), Pool.objects.all()),
        "pool": pool,
        "filtered": bool(kind or pool or before),
    }
    return render(request, "telemetry/events.html", context)
