"""Short links to views, search, and the page of a new installation."""

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
from controlplane.models import Pool, Router
from controlplane.services.fleet.pools import fleet_settings
from controlplane.web.base import current_user, viewable
from controlplane.web.navigation import navigation
from telemetry.models import ShortLink
from telemetry.services.lab.decisions import decision as decision_at
from telemetry.services.lab.decisions import requests_of_id
from telemetry.services.navigation import MAX_QUERY_CHARS, follow, is_match, search, shorten
from telemetry.services.setup import SETUP_COOKIE, served_model, setup_steps
from telemetry.web.decisions import parse_place, place_of
from telemetry.web.ranges import requested_range

COOKIE_S = 400 * 86_400
CLIENTS = (  # template of the lines, name, number of lines
    ("curl", "curl", 4),
    ("openai", "OpenAI's SDK (Python)", 10),
    ("anthropic", "Anthropic's SDK (Python)", 10),
    ("langchain", "LangChain", 10),
    ("claude-code", "Claude Code", 5),
    ("open-webui", "Open WebUI", 2),
)
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
    pools = viewable(request, Pool.objects.all())
    place = parse_place(text)  # of the request's page
    named = decision_at(place[0], *place[1:]) if place else None
    requests = [named] if named and pools.filter(name=named.pool).exists() else requests_of_id(pools, text)
    for decision in requests:
        href = reverse("telemetry:request", args=[place_of(decision)])
        found.append(
            {"kind": "Requests", "name": decision.request_id, "note": decision.replica, "href": href, "key": ""}
        )
    found.sort(key=lambda row: KINDS.index(row["kind"]))
    if request.GET.get("format") == "json":
        return JsonResponse({"found": found})
    return render(request, "telemetry/search.html", {"text": text, "found": found})


@require_GET
def start_page(request: HttpRequest) -> HttpResponse:
    """The steps of a new installation, and lines by which clients use a router."""
    routers = [router for router in Router.objects.order_by("lost_at", "name") if router.data_url]
    pools = viewable(request, Pool.objects.order_by("name"))
    model = next((pool.models[0] for pool in pools if pool.models), None) or served_model(pools, timezone.now())
    address = routers[0].data_url.rstrip("/") if routers else "http://ROUTER:8080"
    context = {
        "steps": setup_steps(current_user(request), timezone.now()),
        "routers": routers,
        "address": address,
        "model": model or "YOUR_MODEL",
        "knows_model": model is not None,
        "clients": CLIENTS,
        "needs_key": fleet_settings().needs_key,
    }
    return render(request, "telemetry/start.html", context)


@require_POST
def start_dismiss(request: HttpRequest) -> HttpResponse:
    """Do not show the steps on the overview in this browser any more."""
    response = redirect("telemetry:overview")
    response.set_cookie(
        SETUP_COOKIE, "off", max_age=COOKIE_S, httponly=True, samesite="Lax", secure=request.is_secure()
    )
    return response
