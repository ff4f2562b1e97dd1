"""Short links, saved views, read-only links, search, and the page of a new installation."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from urllib.parse import parse_qsl, urlencode, urlsplit

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_not_required
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseNotFound, JsonResponse, QueryDict
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from controlplane.access.actor import actor_of, visible
from controlplane.errors import ControlPlaneError
from controlplane.models import Pool, Role, Router
from controlplane.request_origin import client_address, rate_limit_network
from controlplane.services.fleet.pools import fleet_settings
from controlplane.services.rates import request_counter
from controlplane.web.base import current_user, viewable
from controlplane.web.navigation import navigation
from telemetry.models import SavedView, SharedLink, ShortLink
from telemetry.services.lab.decisions import decision as decision_at
from telemetry.services.lab.decisions import requests_of_id
from telemetry.services.navigation import (
    MAX_QUERY_CHARS,
    MAX_SAVED_VIEWS,
    create_shared_link,
    find_shared_link,
    follow,
    is_match,
    revoke_shared_link,
    save_view,
    saved_views,
    search,
    shared_links,
    shorten,
)
from telemetry.services.setup import SETUP_COOKIE, served_model, setup_steps
from telemetry.web.decisions import parse_place, place_of
from telemetry.web.forms import SharedLinkForm
from telemetry.web.pages import PAGE, SHARED_PARTS, SharedContent, shared_content
from telemetry.web.ranges import requested_range

GONE = "This link is unknown, or it expired or was revoked. Ask whoever sent it for another one.\n"
_shared_contents = SharedContent()
COOKIE_S = 400 * 86_400
SCREENS = 20  # of a read-only link: how many times the rate of an unknown client it may be requested
CLIENTS = (  # template of the lines, name, number of lines
    ("curl", "curl", 4),
    ("openai", "OpenAI's SDK (Python)", 10),
    ("anthropic", "Anthropic's SDK (Python)", 10),
    ("langchain", "LangChain", 10),
    ("claude-code", "Claude Code", 5),
    ("open-webui", "Open WebUI", 2),
)
KINDS = (
    "Views", "Pages", "Actions", "Pools", "Replicas", "Task groups", "Policies", "Revisions", "Strategies", "Rollouts",
    "Alerts", "Requests", "Settings",
)  # fmt: skip


@require_POST
def link_new(request: HttpRequest) -> HttpResponse:
    """Create a short link and show it; with a name, save the view."""
    view, name, by = request.POST.get("view", ""), request.POST.get("name"), current_user(request)
    try:
        if name is not None:
            messages.success(request, f"{save_view(view, name, by=by, now=timezone.now())} is in your views.")
            return redirect("telemetry:views")
        link = shorten(view, by=by, now=timezone.now())
    except ControlPlaneError as error:
        failed = "The short link could not be created" if name is None else "The view was not saved"
        messages.error(request, f"{failed}: {error}")
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


@require_http_methods(["GET", "POST"])
def views(request: HttpRequest) -> HttpResponse:
    """The user's saved views, read-only links, and a form for one, whose address is shown once in the response."""
    pools = visible(actor_of(request).at_least(Role.EDITOR), Pool.objects.all())
    shown = {**request.GET.dict(), "start": request.GET.get("from"), "end": request.GET.get("to")}
    form, address = SharedLinkForm(request.POST or None, initial=shown, pools=pools), ""
    by = current_user(request)
    if form.is_valid():
        values = form.cleaned_data
        with form.service_errors():
            valid = timedelta(hours=int(values["hours"]))
            _, token = create_shared_link(values["pool"], values["query"], valid=valid, by=by, now=timezone.now())
            address = request.build_absolute_uri(reverse("telemetry:shared", args=[token]))
    context = {
        "saved": SavedView.objects.filter(user=by).select_related("link"),
        "max_saved": MAX_SAVED_VIEWS,
        "links": viewable(request, shared_links(timezone.now())),
        "form": form,
        "address": address,
    }
    return render(request, "telemetry/views.html", context, status=422 if form.errors else 200)


@require_POST
def view_remove(request: HttpRequest, view_id: int) -> HttpResponse:
    """Remove one of the user's saved views; its short link stays."""
    get_object_or_404(SavedView, pk=view_id, user=current_user(request)).delete()
    return redirect("telemetry:views")


@require_POST
def shared_revoke(request: HttpRequest, shared_id: int) -> HttpResponse:
    """Revoke a read-only link."""
    link = get_object_or_404(SharedLink.objects.select_related("pool__project"), pk=shared_id)
    revoke_shared_link(link, by=current_user(request))
    messages.success(request, "The link was revoked: it opens nothing any more.")
    return redirect("telemetry:views")


@login_not_required
@csrf_exempt  # there is no session to forge a request for
@require_GET
def shared(request: HttpRequest, token: str, part: str = PAGE) -> HttpResponse:
    """A part of what a read-only link shows, to everybody who has it. Every refusal of a link is the same response."""
    link = find_shared_link(token, timezone.now())
    limit = settings.API_RATE_UNAUTHENTICATED
    if link is None:
        allowance = request_counter().charge(f"address:{rate_limit_network(client_address(request))}", limit)
    else:  # many screens may show one link
        allowance = request_counter().charge(f"link:{link.pk}", SCREENS * limit)
    if allowance is not None and allowance.remaining < 0:
        response = HttpResponse("Too many requests.\n", content_type="text/plain", status=429)
        response["Retry-After"] = str(allowance.reset_s)
    elif link is not None and part in SHARED_PARTS:
        content, content_type, status = _shared_contents.get(
            (link.pk, part), partial(shared_content, link, part), settings.LIVE_PARTS_FRESH_S
        )
        response = HttpResponse(content, content_type=content_type, status=status)
    else:
        response = HttpResponseNotFound(GONE, content_type="text/plain")
    response["Cache-Control"], response["Referrer-Policy"] = "no-store", "no-referrer"
    return response


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
    for saved in saved_views(current_user(request), words):
        href = reverse("telemetry:link-follow", args=[saved.link.code])
        found.append({"kind": "Views", "name": saved.name, "note": "", "href": href, "key": ""})
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
