"""Short links to views, and search by name."""

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
from controlplane.web.base import current_user
from telemetry.models import ShortLink
from telemetry.services.navigation import follow, search, shorten
from telemetry.web.ranges import requested_range

PAGES = {
    "pool": "telemetry:pool",
    "task group": "telemetry:group",
    "replica": "telemetry:replica",
    "policy": "controlplane:policy",
}


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
    """Objects whose name contains a text, as a page or as JSON for the search dialog."""
    text = request.GET.get("q", "")
    found = [
        {
            "kind": row.kind,
            "name": f"{row.key[0]} / {row.name}" if row.kind == "task group" else row.name,
            "href": reverse(PAGES[row.kind], args=row.key),
        }
        for row in search(actor_of(request), text)
    ]
    if request.GET.get("format") == "json":
        return JsonResponse({"found": found})
    return render(request, "telemetry/search.html", {"text": text, "found": found})
