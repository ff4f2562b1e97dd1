"""Short links to views: made, shown, followed.

Search by name: a page, and the same as JSON for the list that opens on ``/``.
"""

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
from controlplane.web.base import signed_in
from telemetry.models import ShortLink
from telemetry.services.navigation import SearchResult, follow, search, shorten
from telemetry.web.ranges import asked_range


@require_POST
def link_new(request: HttpRequest) -> HttpResponse:
    """Make one, and show it."""
    try:
        link = shorten(request.POST.get("view", ""), by=signed_in(request), now=timezone.now())
    except ControlPlaneError as error:
        messages.error(request, f"There is no short link to that: {error}")
        return redirect("telemetry:overview")
    return redirect("telemetry:link", link.code)


@require_GET
@never_cache
def link_page(request: HttpRequest, code: str) -> HttpResponse:
    """The link, to copy; and what it shows: a time that moves on, or one that stays."""
    link = _of(code)
    fixed = fixed_view(link.view)
    context = {
        "link": link,
        "href": request.build_absolute_uri(reverse("telemetry:link-follow", args=[link.code])),
        "fixed": fixed,
    }
    return render(request, "telemetry/link.html", context)


@require_GET
@never_cache
def link_follow(request: HttpRequest, code: str) -> HttpResponse:  # noqa: ARG001 - the gate has seen who asks
    """Go there."""
    return redirect(_of(code).view)


def _of(code: str) -> ShortLink:
    link = follow(code, timezone.now())
    if link is None:
        raise Http404
    return link


def fixed_view(view: str) -> str | None:
    """The same view of the very time that it shows now; None where its time stays anyway."""
    parts = urlsplit(view)
    asked = asked_range(QueryDict(parts.query))
    if not asked.live:
        return None
    kept = [(name, value) for name, value in parse_qsl(parts.query, keep_blank_values=True) if name != "range"]
    times = [(name, f"{at:%Y-%m-%dT%H:%M:%S}") for name, at in (("from", asked.window.start), ("to", asked.window.end))]
    return f"{parts.path}?{urlencode([*kept, *times])}"


PAGES = {
    "pool": "telemetry:pool",
    "task group": "telemetry:group",
    "replica": "telemetry:replica",
    "policy": "controlplane:policy",
}


@require_GET
@never_cache
def search_page(request: HttpRequest) -> HttpResponse:
    """What is called so, each with the address of its page."""
    text = request.GET.get("q", "")
    found = [{"kind": one.kind, "name": _name(one), "href": _href(one)} for one in search(actor_of(request), text)]
    if request.GET.get("format") == "json":
        return JsonResponse({"found": found})
    return render(request, "telemetry/search.html", {"text": text, "found": found})


def _name(one: SearchResult) -> str:
    return f"{one.key[0]} / {one.name}" if one.kind == "task group" else one.name


def _href(one: SearchResult) -> str:
    return reverse(PAGES[one.kind], args=one.key)
