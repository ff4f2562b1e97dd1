"""Events: the timeline of changes and incidents, as a page and as CSV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, QueryDict
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.urls import reverse
from django.utils.http import urlencode
from django.views.decorators.http import require_GET

from controlplane.api.filters import EventFilter
from controlplane.models import Event, EventKind, Pool, RoutingPolicy
from controlplane.web.base import csv_response, cursor_after, first_page, rows_after, viewable
from controlplane.web.navigation import may_open

PAGE = 50
COLUMNS = ("at", "kind", "pool", "replica", "router", "actor", "summary")  # of the CSV
FILTERS = ("pool", "replica", "router", "actor", "after", "before")  # besides ``kind``; as over REST
TOPICS = {  # prefixes of kinds; each kind is of one topic besides "All"
    "All": (),
    "Policies": ("policy_", "draft_", "prediction_", "rollout_"),
    "Fleet": ("pool_", "replica", "group_", "source_", "fleet_", "response_cache_", "traffic_mix_"),
    "Routers": ("router_", "config_"),
    "Alerts": ("alert_", "rule_", "channel_", "silence_", "metrics_server_"),
    "Access": (
        *("user_", "role_", "sign_in_", "second_factor_", "token_", "client_key_", "secrets_"),
        *("project_", "link_", "audit_"),
    ),
}


@require_GET
def event_list(request: HttpRequest) -> HttpResponse:
    """A page of events that match the filters, newest first. The number of queries is fixed."""
    filters = EventFilter(request.GET, queryset=_events(request))
    cursor = request.GET.get("cursor", "")
    events = filters.qs.order_by("-at", "-pk") if filters.is_valid() else Event.objects.none()
    after = rows_after(cursor)
    page, last = first_page(events.filter(after) if after else events, PAGE)
    kinds = request.GET.getlist("kind")
    context = {
        "rows": _rows(request, page),
        "older_cursor": last and cursor_after(last),
        "has_newer": bool(cursor),
        "topics": list(_topics(request.GET, kinds)),
        "kinds": EventKind.choices,
        "kind": kinds[0] if len(kinds) == 1 else "",
        "several": kinds if len(kinds) > 1 else [],
        "pools": viewable(request, Pool.objects.all()),
        "filters": {name: request.GET.get(name, "") for name in FILTERS},
        "filter_errors": filters.errors,
        "filtered": any(request.GET.get(name) for name in (*FILTERS, "kind", "cursor")),
    }
    return render(request, "telemetry/events.html", context)


@require_GET
def event_csv(request: HttpRequest) -> HttpResponseBase:
    """All events that match the filters, as CSV; 422 for an invalid filter."""
    filters = EventFilter(request.GET, queryset=_events(request))
    if not filters.is_valid():
        return HttpResponse(filters.errors.as_text(), status=422, content_type="text/plain; charset=utf-8")
    events = filters.qs.order_by("-at", "-pk").iterator(chunk_size=1000)
    rows = ([event.at.isoformat(), *map(str, _cells(event))] for event in events)
    return csv_response("events.csv", chain([COLUMNS], rows))


def _cells(event: Event) -> Iterator[Any]:
    """Cells of a CSV row after the time; "" for unknown ones."""
    return ("" if (value := getattr(event, name)) is None else value for name in COLUMNS[1:])


def _events(request: HttpRequest) -> QuerySet[Event]:
    return viewable(request, Event.objects.select_related("pool", "replica", "router", "actor"))


def _topics(params: QueryDict, kinds: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Each topic as a link that keeps the other filters."""
    for name, prefixes in TOPICS.items():
        selected = [str(kind) for kind in EventKind.values if kind.startswith(prefixes)]
        query = params.copy()
        query.pop("cursor", None)
        query.setlist("kind", selected)
        yield {"name": name, "href": f"?{query.urlencode()}", "current": sorted(kinds) == sorted(selected)}


def _rows(request: HttpRequest, events: Sequence[Event]) -> list[dict[str, Any]]:
    """Events, each with links to the objects that it names. One query."""
    names = {str(event.detail["policy"]) for event in events if "policy" in event.detail}
    policies = dict(viewable(request, RoutingPolicy.objects.filter(name__in=names)).values_list("name", "pk"))
    links_routers = may_open(request, "controlplane:routers")
    return [{"event": event, "links": list(_links(event, policies, links_routers))} for event in events]


def _links(event: Event, policies: dict[str, int], links_routers: bool) -> Iterator[tuple[str, str]]:
    """(text, URL) of each object."""
    if rollout := event.detail.get("rollout"):
        yield "rollout", reverse("controlplane:rollout", args=[rollout])
    if event.kind in {EventKind.ALERT_FIRING, EventKind.ALERT_RESOLVED}:
        yield "alert", reverse("telemetry:alert", args=[event.detail["alert"]])
    policy = policies.get(str(event.detail.get("policy", "")))
    if policy is not None and event.detail.get("revision"):
        yield f"revision {event.detail['revision']}", reverse("controlplane:policy-revisions", args=[policy])
    if policy is not None:
        yield f"policy {event.detail['policy']}", reverse("controlplane:policy", args=[policy])
    elif event.pool is not None:
        yield f"pool {event.pool.name}", f"?{urlencode({'pool': event.pool.name})}"
    if event.replica is not None:
        yield f"replica {event.replica.name}", reverse("telemetry:replica", args=[event.replica.name])
    if event.router is not None and links_routers:
        yield f"router {event.router.name}", reverse("controlplane:router", args=[event.router.pk])
    number = event.detail.get("after") if event.kind == EventKind.CONFIG_APPLIED else event.detail.get("revision")
    if event.kind in {EventKind.CONFIG_APPLIED, EventKind.CONFIG_REJECTED} and number and links_routers:
        yield f"configuration {number}", reverse("controlplane:configuration", args=[number])
