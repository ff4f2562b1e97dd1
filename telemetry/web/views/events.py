"""Everything that happened, newest first: the one timeline of changes, charts, alerts and the audit log."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, QueryDict, StreamingHttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_GET

from controlplane.access.actor import actor_of, visible
from controlplane.access.rules import needed_role, permits
from controlplane.api.filters import EventFilter
from controlplane.models import Event, EventKind, Pool, RoutingPolicy
from controlplane.web.tables import beyond, cursor_after
from controlplane.web.tags import spreadsheet_safe

PAGE = 50
COLUMNS = ("at", "kind", "pool", "replica", "router", "actor", "summary")  # of the CSV
FILTERS = ("pool", "replica", "router", "actor", "after", "before")  # beside ``kind``; as over REST

# What people look for, as several kinds at once.
TOPICS = (
    ("Policies", ("policy_", "rollout_", "revision_", "trial_", "guard_")),
    ("Fleet", ("pool_", "replica_", "group_", "source_")),
    ("Routers", ("router_", "config_")),
    ("Alerts", ("alert_", "rule_", "channel_", "silence_")),
    ("Access", ("user_", "role_", "token_", "project_", "key_", "secret_")),
)


@dataclass(frozen=True, slots=True)
class Row:
    """An event with the addresses of what it tells of."""

    event: Event
    links: tuple[tuple[str, str], ...]  # (name, address)


@require_GET
def event_list(request: HttpRequest) -> HttpResponse:
    """A page of events, narrowed as asked; older ones by a plain link. As many queries whatever the page holds."""
    asked = EventFilter(request.GET, queryset=_mine(request))
    cursor, place = request.GET.get("cursor", ""), beyond(request.GET.get("cursor", ""))
    events = asked.qs.order_by("-at", "-pk") if asked.is_valid() else Event.objects.none()
    page = list((events.filter(place) if place else events)[: PAGE + 1])
    kinds = request.GET.getlist("kind")
    context = {
        "rows": _rows(request, page[:PAGE]),
        "more": cursor_after(page[PAGE - 1]) if len(page) > PAGE else None,
        "later": bool(cursor),
        "topics": list(_topics(request.GET, kinds)),
        "kinds": EventKind.choices,
        "kind": kinds[0] if len(kinds) == 1 else "",
        "several": kinds if len(kinds) > 1 else [],
        "pools": visible(actor_of(request), Pool.objects.all()),
        "asked": {name: request.GET.get(name, "") for name in FILTERS},
        "wrong": asked.errors,
        "filtered": any(request.GET.get(name) for name in (*FILTERS, "kind", "cursor")),
    }
    return render(request, "telemetry/events.html", context)


@require_GET
def event_csv(request: HttpRequest) -> HttpResponse | StreamingHttpResponse:
    """The same events, all of them, as CSV; 422 where a filter cannot be read."""
    asked = EventFilter(request.GET, queryset=_mine(request))
    if not asked.is_valid():
        return HttpResponse(asked.errors.as_text(), status=422, content_type="text/plain; charset=utf-8")
    answer = StreamingHttpResponse(_lines(asked.qs.order_by("-at", "-pk")), content_type="text/csv; charset=utf-8")
    answer["Content-Disposition"] = 'attachment; filename="events.csv"'
    return answer


def _mine(request: HttpRequest) -> QuerySet[Event]:
    return visible(actor_of(request), Event.objects.select_related("pool", "replica", "router", "actor"))


def _topics(asked: QueryDict, kinds: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Each topic as a link that keeps the other filters."""
    for name, beginnings in (("All", ()), *TOPICS):
        chosen = [str(kind) for kind in EventKind.values if beginnings and kind.startswith(beginnings)]
        query = asked.copy()
        query.pop("cursor", None)
        query.setlist("kind", chosen)
        yield {"name": name, "href": f"?{query.urlencode()}", "current": sorted(kinds) == sorted(chosen)}


def _rows(request: HttpRequest, events: Sequence[Event]) -> list[Row]:
    """Events with their links; one query for the policies that they name."""
    names = {str(event.detail["policy"]) for event in events if "policy" in event.detail}
    policies = dict(visible(actor_of(request), RoutingPolicy.objects.filter(name__in=names)).values_list("name", "pk"))
    opens_routers = _opens(request, "controlplane:routers")
    return [Row(event, tuple(_links(event, policies, opens_routers))) for event in events]


def _links(event: Event, policies: dict[str, int], opens_routers: bool) -> Iterator[tuple[str, str]]:
    policy = policies.get(str(event.detail.get("policy", "")))
    if policy is not None:
        yield f"policy {event.detail['policy']}", reverse("controlplane:policy", args=[policy])
    elif event.pool is not None:
        yield f"pool {event.pool.name}", f"?{_query(pool=event.pool.name)}"
    if event.replica is not None:
        yield f"replica {event.replica.name}", f"?{_query(replica=event.replica.name)}"
    if event.router is not None and opens_routers:
        yield f"router {event.router.name}", reverse("controlplane:router", args=[event.router.pk])
    number = event.detail.get("after") if event.kind == EventKind.CONFIG_APPLIED else event.detail.get("revision")
    if event.kind in {EventKind.CONFIG_APPLIED, EventKind.CONFIG_REFUSED} and number and opens_routers:
        yield f"configuration {number}", reverse("controlplane:configuration", args=[number])


def _query(**params: str) -> str:
    query = QueryDict(mutable=True)
    query.update(params)
    return query.urlencode()


def _opens(request: HttpRequest, route: str) -> bool:
    needed = needed_role(route, "GET")
    return needed is not None and permits(actor_of(request), route, needed)


def _lines(events: QuerySet[Event]) -> Iterable[str]:
    writer = csv.writer(_Echo())
    yield writer.writerow(COLUMNS)  # what _Echo returns
    for event in events.iterator(chunk_size=1000):
        row = [
            event.at.isoformat(),
            *("" if (value := getattr(event, name)) is None else value for name in COLUMNS[1:]),
        ]
        yield writer.writerow([spreadsheet_safe(str(value)) for value in row])


class _Echo:
    """A file that hands back what is written to it."""

    def write(self, text: str) -> str:
        return text
