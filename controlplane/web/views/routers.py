"""Routers: the configuration that each should run, the one that it runs, and why they differ."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from django.db.models import F, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods

from controlplane.errors import ConflictError
from controlplane.models import ConfigSnapshot, Router
from controlplane.push.client import signing_key_id
from controlplane.services.impact import Effect, effects_of_configurations
from controlplane.services.routers import remove_router, responding
from controlplane.services.snapshots import newest_snapshot
from controlplane.web.base import confirm_page, current_user, render_live, requested_sort

COLUMNS = ("name", "status", "running", "last_seen")
HISTORY = 20  # events on a router's page
RUNS_NOTHING = "It has no configuration yet and reports not ready on /readyz, so a load balancer sends it no requests."
UNAFFECTED = {  # by status; {} is what the router runs
    "in sync": "",
    "rejected": "It continues to serve with {}, which it validated. The push is retried every 20 s.",
    "unreachable": "It continues to serve with {}, as last reported. The push is retried within 20 s.",
    "pending": "It serves with {} until it acknowledges.",
    "silent": "If it runs, it continues to serve with {}. It counts as lost after 30 s without a heartbeat.",
    "lost": "If it runs, it continues to serve with its stored configuration, and receives the newest when it is back.",
}
SIGNATURES = {  # by what routers report: (shown, explanation)
    "": (
        "unknown",
        "The router does not report whether it checks signatures, because it has no configuration yet.",
    ),
    "unchecked": (
        "unchecked",
        "The router accepts configurations from anyone who has the router token. Set WARMPATH_ROUTER_CONFIG_KEYS to "
        "the keys that manage.py config_key prints.",
    ),
    "unsigned": ("unsigned", "The router runs a local file without a signature."),
    "expired": (
        "expired",
        "The signature was not renewed in time. The router continues to serve, and a new signature is being sent.",
    ),
}


@dataclass(frozen=True, slots=True)
class SharedState:
    """What a router shares with the others, as of its last scrape."""

    peers: int
    others: int  # further routers that share
    age_s: float | None  # of its view; None: it does not reach the server
    bytes_per_s: float | None  # published and received; None: not yet known

    @property
    def word(self) -> str:
        """Whether the router sees all others, as a badge."""
        if self.age_s is None:
            return "cut off"
        if not self.others:
            return "alone"
        return "sharing" if self.peers >= self.others else "apart"


@dataclass(frozen=True, slots=True)
class RouterLine:
    """One router compared with the newest configuration."""

    router: Router
    name: str
    status: str  # a key of UNAFFECTED
    reason: str  # why it is not in sync; "" if it is
    running: int | None
    behind: int | None  # configurations between the running and the newest; None if it runs none
    last_seen: datetime
    signature: tuple[str, str]  # (state, explanation); the explanation is "" if nothing is to be done
    shared_state: SharedState | None = None  # None: it does not share, or that is unknown

    @property
    def unaffected(self) -> str:
        """What continues to work although the router is not in sync."""
        if self.running is None and self.status != "in sync":
            return RUNS_NOTHING
        return UNAFFECTED[self.status].format(f"configuration {self.running}")


@dataclass(frozen=True, slots=True)
class Convergence:
    """The newest configuration, and every router compared with it."""

    newest: ConfigSnapshot | None
    lines: list[RouterLine]

    @property
    def acknowledged(self) -> int:
        """How many routers run the newest configuration."""
        return sum(line.status == "in sync" for line in self.lines)

    @property
    def ratio(self) -> float:
        """The share of routers that run the newest configuration, 0 to 1; 0 without routers."""
        return self.acknowledged / len(self.lines) if self.lines else 0.0


def convergence() -> Convergence:
    """The state of every router. Two queries."""
    newest = newest_snapshot()
    return Convergence(newest, lines_of(_annotated(), newest))


def _annotated() -> QuerySet[Any]:
    """Routers with what ``lines_of`` needs."""
    return Router.objects.annotate(shared=F("scrape_state__shared_state"), responds=responding(timezone.now()))


def lines_of(routers: Iterable[Any], newest: ConfigSnapshot | None) -> list[RouterLine]:
    """Each router, with the columns of ``_annotated``, compared with the newest configuration."""
    listed = list(routers)
    sharing = sum(router.lost_at is None and bool(router.shared) for router in listed)
    return [_line(router, newest, _shared_state(router.shared, sharing - 1)) for router in listed]


def _shared_state(shared: dict[str, float] | None, others: int) -> SharedState | None:
    if not shared:
        return None
    return SharedState(int(shared.get("peers", 0)), others, shared.get("age_s"), shared.get("bytes_per_s"))


def _line(router: Any, newest: ConfigSnapshot | None, shared_state: SharedState | None = None) -> RouterLine:
    status, reason = _status(router, newest)
    behind = newest.number - router.running_number if newest and router.running_number else None
    signature = _signature(router)
    return RouterLine(
        router, router.name, status, reason, router.running_number, behind, router.last_seen_at, signature, shared_state
    )


def _signature(router: Router) -> tuple[str, str]:
    nack: dict[str, Any] = router.last_nack or {}
    if str(nack.get("path", "")).startswith("$.signature"):
        return (
            "rejected",
            f"The router rejects this control plane's signature: {nack.get('reason', 'no reason given')}.",
        )
    state = router.signature_state
    if state == "verified" and router.signature_key != signing_key_id():
        text = (
            f"The configuration is signed with key {router.signature_key}, not with the current key. A new one is sent."
        )
        return "other key", text
    return SIGNATURES.get(state, (state, ""))


def _status(router: Any, newest: ConfigSnapshot | None) -> tuple[str, str]:
    """The status and its reason: the most specific one first."""
    if not router.responds and not router.lost_at:
        return "silent", f"No heartbeat for {router.silent_for_s(timezone.now()):.0f} s, and scrapes fail."
    if newest and router.runs(newest.number, newest.sha256):
        return (
            ("lost", "No heartbeat. It ran this configuration when last seen.") if router.lost_at else ("in sync", "")
        )
    if router.lost_at:
        return "lost", router.last_error or "No heartbeat, and pushes fail."
    nack: dict[str, Any] = router.last_nack or {}
    if newest and nack.get("revision") == newest.number:
        return "rejected", f"{nack.get('reason', 'no reason given')} (at {nack.get('path', 'an unknown path')})"
    return ("unreachable", router.last_error) if router.last_error else ("pending", "")


@require_GET
@never_cache
def router_list(request: HttpRequest) -> HttpResponse:
    """Every router that has registered."""
    state, sort = convergence(), requested_sort(request, COLUMNS)
    context = {"convergence": state, "lines": sort.apply(state.lines), "sort": sort}
    return render_live(request, "controlplane/routers.html", context)


@require_GET
@never_cache
def router_detail(request: HttpRequest, router_id: int) -> HttpResponse:
    """One router: status, missing changes and events."""
    router = get_object_or_404(_annotated(), pk=router_id)
    newest = newest_snapshot()
    nack_at = (router.last_nack or {}).get("at")
    context = {
        "line": _line(router, newest),
        "router": router,
        "newest": newest,
        "nack_at": datetime.fromisoformat(nack_at) if nack_at else None,
        "events": router.events.select_related("pool", "replica", "actor").order_by("-at", "-pk")[:HISTORY],
        **_missing_changes(router, newest),
    }
    return render(request, "controlplane/router.html", context)


@require_http_methods(["GET", "POST"])
def router_remove(request: HttpRequest, router_id: int) -> HttpResponse:
    """Remove a router that will not return."""
    router = get_object_or_404(Router, pk=router_id)
    return confirm_page(
        request,
        partial(remove_router, router, by=current_user(request)),
        back="controlplane:routers",
        cancel=reverse("controlplane:router", args=[router.pk]),
        title=f"Remove router {router.name}",
        text="It is no longer listed and receives no configurations. Its events are kept. If it runs after all, it "
        "registers again within 10 s.",
        warning=""
        if router.lost_at
        else "It still sends heartbeats. Stop it first: a running router cannot be removed.",
        action="Remove router",
        done=f"Router {router.name} was removed.",
    )


def _missing_changes(router: Router, newest: ConfigSnapshot | None) -> dict[str, Any]:
    """The effects of the newest configuration that the router lacks; ``unknown`` says why they are not known."""
    missed: list[Effect] = []
    if newest is None or router.runs(newest.number, newest.sha256):
        return {"missed": missed, "unknown": ""}
    if router.running_number is None:
        return {"missed": missed, "unknown": "It runs no configuration yet."}
    running = ConfigSnapshot.objects.filter(number=router.running_number, sha256=router.running_sha256).first()
    if running is None:
        unknown = f"It runs configuration {router.running_number}, which this control plane did not create."
        return {"missed": missed, "unknown": unknown}
    try:
        return {"missed": effects_of_configurations(running, ConfigSnapshot.objects.get(pk=newest.pk)), "unknown": ""}
    except ConflictError as error:
        return {"missed": missed, "unknown": str(error)}
