"""Short links to views, and search."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlencode, urlsplit

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_POST

from controlplane.access.actor import actor_of
from controlplane.errors import ControlPlaneError
from controlplane.models import Pool
from controlplane.web.base import current_user, viewable
from controlplane.web.navigation import navigation
from telemetry.models import ShortLink
from telemetry.services.lab.decisions import requests_of_id
from telemetry.services.navigation import MAX_QUERY_CHARS, follow, is_match, search, shorten
from telemetry.web.decisions import place_of
from telemetry.web.ranges import requested_range

KINDS = (
    "Pages", "Actions", "Pools", "Replicas", "Task groups", "Policies", "Revisions", "Strategies", "Rollouts", "Alerts",
    "Requests", "Settings",
)  # fmt: skip


@require_POST
def link_new(request: HttpRequest) -> HttpResponse:
    """Create a short link and show it."""
    try:
        link = shorten(request.POST.get("view", ""), by=current_user(request), now=timezone.now())
    except ControlPlaneError as error:
        messages.error(request, f"The short link could not be created: {error}")
        return redirect("telemetry:overview")
    return redirect("telemetry:link", link.code)


@require_GET
@never_cache
def link_page(request: HttpRequest, code: str) -> HttpResponse:
    """A short link to copy, and what it shows."""
    link = _link(code)
    href = request.build_absolute_uri(reverse("telemetry:link-follow", args=[link.code]))
    return render(request, "telemetry/link.html", {"link": link, "href": href, "fixed": fixed_view(link.view)})


@require_GET
@never_cache
def link_follow(request: HttpRequest, code: str) -> HttpResponse:  # noqa: ARG001 - the middleware checked permissions
    """Redirect to the view of a short link."""
    return redirect(_link(code).view)


def _link(code: str) -> ShortLink:
    link = follow(code, timezone.now())
    if link is None:
        raise Http404
    return link


def fixed_view(view: str) -> str | None:
    """The URL of the same view with the current time range as a fixed range; None if its range is already fixed."""
    parts = urlsplit(view)
    time_range = requested_range(QueryDict(parts.query))
    if not time_range.live:
        return None
    params = [(name, value) for name, value in parse_qsl(parts.query, keep_blank_values=True) if name != "range"]
    window = time_range.window
    times = [(name, f"{at:%Y-%m-%dT%H:%M:%S}") for name, at in (("from", window.start), ("to", window.end))]
    return f"{parts.path}?{urlencode([*params, *times])}"


@require_GET
@never_cache
def search_page(request: HttpRequest) -> HttpResponse:
    """Pages, actions, rows and requests that match a text, by kind; as a page, or as JSON for the dialog."""
    text = request.GET.get("q", "").strip()[:MAX_QUERY_CHARS]
    words, pages = text.lower().split(), navigation(request)
    found = [
        {
            "kind": "Pages",
            "name": link.label,
            "note": entry.label,
            "href": link.href + pages["carried"],
            "key": link.key,
        }
        for entry in pages["navigation"]
        for link in entry.pages
        if is_match(words, f"{entry.label} {link.label}")
    ]
    for row in search(actor_of(request), text):
        href = reverse(row.route, args=row.args) + (f"?{row.query}" if row.query else "")
        found.append({"kind": row.kind, "name": row.name, "note": row.note, "href": href, "key": ""})
    for decision in requests_of_id(viewable(request, Pool.objects.all()), text):
        href = reverse("telemetry:request", args=[place_of(decision)])
        found.append(
            {"kind": "Requests", "name": decision.request_id, "note": decision.replica, "href": href, "key": ""}
        )
    found.sort(key=lambda row: KINDS.index(row["kind"]))
    if request.GET.get("format") == "json":
        return JsonResponse({"found": found})
    return render(request, "telemetry/search.html", {"text": text, "found": found})
