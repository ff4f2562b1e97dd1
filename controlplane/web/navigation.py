"""The navigation: entries in the rail, their pages as tabs at the top of each page, and keyboard shortcuts.

Links carry the pool and the time range of the current page (``carried``), so both are chosen once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest, QueryDict
from django.urls import reverse

from controlplane.access.actor import actor_of
from controlplane.access.rules import PUBLIC_ROUTES, needed_role, permits

CARRIED = ("pool", "range", "from", "to")


@dataclass(frozen=True, slots=True)
class Link:
    """A page; ``g`` followed by ``key``, a letter of its label where one is free, opens it."""

    label: str
    href: str
    key: str
    current: bool


@dataclass(frozen=True, slots=True)
class Entry:
    """A question of the reader, with the pages that answer it. ``icon`` is the path of a 24 by 24 outline."""

    label: str
    icon: str
    pages: list[Link]

    @property
    def current(self) -> Link | None:
        """The page that is shown, or to which it belongs."""
        return next((page for page in self.pages if page.current), None)


# By label: the icon, and for each page its label, route, key, and the other paths that belong to it.
_ENTRIES: dict[str, tuple[str, tuple[tuple[str, str, str, tuple[str, ...]], ...]]] = {
    "Now": (
        "M2 12h5l3-8 4 16 3-8h5",
        (
            ("Overview", "telemetry:overview", "o", ("/pools/", "/replicas/", "/charts/")),
            ("Alerts", "telemetry:alerts", "a", ()),
            ("Events", "telemetry:events", "e", ()),
        ),
    ),
    "Why": (
        "M10 3a7 7 0 1 0 0 14a7 7 0 0 0 0-14M15 15l6 6M10 7v3l2 2",
        (
            ("Breakdown", "telemetry:breakdown", "b", ()),
            ("Prefixes", "telemetry:prefixes", "x", ()),
            ("Prompts", "telemetry:prompts", "m", ()),
            ("Requests", "telemetry:requests", "q", ()),
        ),
    ),
    "Improve": (
        "M3 17l6-6 4 4 8-8M15 7h6v6",
        (
            ("Value", "telemetry:value", "v", ()),
            ("What-if", "telemetry:what-ifs", "w", ()),
            ("Capacity and cost", "telemetry:capacity", "c", ()),
            ("Before and after", "telemetry:report", "d", ()),
        ),
    ),
    "Change": (
        "M4 7h9M17 7h3M4 17h3M11 17h9M15 4.5v5M9 14.5v5",
        (
            ("Policies", "controlplane:policies", "p", ()),
            ("Rollouts", "controlplane:rollouts", "l", ()),
            ("Task groups", "controlplane:task-groups", "t", ()),
        ),
    ),
    "Fleet": (
        "M3 4h18v6H3zM3 14h18v6H3zM7 7h.01M7 17h.01",
        (
            ("Replicas", "controlplane:fleet", "f", ()),
            ("Routers", "controlplane:routers", "r", ()),
            ("Configurations", "controlplane:configurations", "g", ()),
        ),
    ),
    "Settings": (
        "M12 8.5a3.5 3.5 0 1 0 0 7a3.5 3.5 0 0 0 0-7M12 2v4M12 18v4M2 12h4M18 12h4M5 5l2.5 2.5M16.5 16.5l2.5 2.5"
        "M19 5l-2.5 2.5M7.5 16.5L5 19",
        (
            ("Get started", "telemetry:start", "j", ()),
            ("Views", "telemetry:views", "z", ("/links/",)),
            ("Channels", "telemetry:channels", "h", ("/deliveries/",)),
            ("Prometheus", "telemetry:metrics-servers", "s", ()),
            ("Users", "controlplane:users", "u", ("/projects/",)),
            ("Client keys", "controlplane:client-keys", "k", ()),
            ("API tokens", "controlplane:tokens", "n", ()),
            ("Audit log", "controlplane:audit", "i", ()),
            ("Your account", "controlplane:sessions", "y", ("/accounts/",)),
        ),
    ),
}


def navigation(request: HttpRequest) -> dict[str, Any]:
    """Context processor: the pages that the user may open. Runs no query: the middleware has loaded the roles."""
    entries = [
        Entry(label, icon, [_link(request, *page) for page in pages if may_open(request, page[1])])
        for label, (icon, pages) in _ENTRIES.items()
    ]
    return {"navigation": [entry for entry in entries if entry.pages], "carried": carried(request.GET)}


def carried(query: QueryDict) -> str:
    """The pool and the time range as ``?...`` for links to other pages, or ""."""
    params = QueryDict(mutable=True)
    params.update({key: value for key in CARRIED if (value := query.get(key))})
    return f"?{params.urlencode()}" if params else ""


def may_open(request: HttpRequest, route: str) -> bool:
    """Whether the user may open a page in at least one project."""
    needed = needed_role(route, "GET")
    return route in PUBLIC_ROUTES or (needed is not None and permits(actor_of(request), route, needed))


def _link(request: HttpRequest, label: str, route: str, key: str, others: tuple[str, ...]) -> Link:
    href = reverse(route)
    return Link(
        label, href, key, request.path == href or request.path.startswith((*others, href if href != "/" else "//"))
    )
