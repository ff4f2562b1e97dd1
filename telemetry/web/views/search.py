"""Search by name: a page, and the same as JSON for the list that opens on ``/``."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET

from controlplane.access.asker import asker_of
from telemetry.services.search import Found, search

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
    found = [{"kind": one.kind, "name": _name(one), "href": _href(one)} for one in search(asker_of(request), text)]
    if request.GET.get("format") == "json":
        return JsonResponse({"found": found})
    return render(request, "telemetry/search.html", {"text": text, "found": found})


def _name(one: Found) -> str:
    return f"{one.key[0]} / {one.name}" if one.kind == "task group" else one.name


def _href(one: Found) -> str:
    return reverse(PAGES[one.kind], args=one.key)
