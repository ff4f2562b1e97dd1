"""The navigation: pages in the side rail and their keyboard shortcuts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest
from django.urls import reverse

from controlplane.access.actor import actor_of
from controlplane.access.rules import needed_role, permits


@dataclass(frozen=True, slots=True)
class Link:
    """A page; ``g`` followed by ``key`` opens it."""

    label: str
    href: str
    key: str
    current: bool


_SECTIONS = {
    "Observe": (
        ("Overview", "telemetry:overview", "o"),
        ("Hit-rate breakdown", "telemetry:breakdown", "w"),
        ("Value", "telemetry:value", "v"),
        ("Capacity and cost", "telemetry:capacity", "b"),
        ("What-if", "telemetry:what-ifs", "i"),
        ("Prefixes", "telemetry:prefixes", "x"),
        ("Requests", "telemetry:requests", "q"),
        ("Alerts", "telemetry:alerts", "a"),
        ("Prompts", "telemetry:prompts", "m"),
        ("Events", "telemetry:events", "e"),
    ),
    "Configure": (
        ("Policies", "controlplane:policies", "p"),
        ("Rollouts", "controlplane:rollouts", "l"),
        ("Task groups", "controlplane:task-groups", "t"),
        ("Fleet", "controlplane:fleet", "f"),
    ),
    "Operate": (
        ("Routers", "controlplane:routers", "r"),
        ("Configurations", "controlplane:configurations", "n"),
        ("Channels", "telemetry:channels", "c"),
        ("Prometheus servers", "telemetry:metrics-servers", "s"),
    ),
    "Access": (
        ("Users", "controlplane:users", "u"),
        ("Client keys", "controlplane:client-keys", "y"),
        ("API tokens", "controlplane:tokens", "k"),
        ("Audit log", "controlplane:audit", "d"),
    ),
}


def navigation(request: HttpRequest) -> dict[str, Any]:
    """Context processor: the pages that the user may open. Runs no query: the middleware has loaded the roles."""
    sections = [
        (title, [_link(request, *page) for page in pages if may_open(request, page[1])])
        for title, pages in _SECTIONS.items()
    ]
    return {"navigation": [(title, links) for title, links in sections if links]}


def may_open(request: HttpRequest, route: str) -> bool:
    """Whether the user may open a page in at least one project."""
    needed = needed_role(route, "GET")
    return needed is not None and permits(actor_of(request), route, needed)


def _link(request: HttpRequest, label: str, route: str, key: str) -> Link:
    href = reverse(route)
    return Link(label, href, key, request.path == href if href == "/" else request.path.startswith(href))
