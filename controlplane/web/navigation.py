"""The pages in the side rail, and the keys that go there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest
from django.urls import reverse

from controlplane.access.actor import actor_of
from controlplane.access.rules import needed_role, permits


@dataclass(frozen=True, slots=True)
class Link:
    """A page; ``key`` goes there after ``g``."""

    label: str
    href: str
    key: str
    current: bool


_SECTIONS = (
    (
        "See",
        (
            ("Overview", "telemetry:overview", "o"),
            ("Ladder", "telemetry:ladder", "w"),
            ("Prefixes", "telemetry:prefixes", "x"),
            ("Requests", "telemetry:requests", "q"),
            ("Alerts", "telemetry:alerts", "a"),
            ("Prompts", "telemetry:prompts", "m"),
            ("Events", "telemetry:events", "e"),
        ),
    ),
    (
        "Change",
        (
            ("Policies", "controlplane:policies", "p"),
            ("Rollouts", "controlplane:rollouts", "l"),
            ("Task groups", "controlplane:task-groups", "t"),
            ("Fleet", "controlplane:fleet", "f"),
        ),
    ),
    (
        "Deliver",
        (
            ("Routers", "controlplane:routers", "r"),
            ("Configurations", "controlplane:configurations", "n"),
            ("Channels", "telemetry:channels", "c"),
            ("Metrics servers", "telemetry:metrics-servers", "s"),
        ),
    ),
    (
        "Admit",
        (
            ("People", "controlplane:people", "u"),
            ("Client keys", "controlplane:client-keys", "y"),
            ("Tokens", "controlplane:tokens", "k"),
            ("Audit", "controlplane:audit", "d"),
        ),
    ),
)


def navigation(request: HttpRequest) -> dict[str, Any]:
    """Context processor: the pages that open to the actor, the current one marked. No query: the gate asked."""
    sections = [
        (title, [_link(request, *page) for page in pages if _opens(request, page[1])]) for title, pages in _SECTIONS
    ]
    return {"navigation": [(title, links) for title, links in sections if links]}


def _opens(request: HttpRequest, route: str) -> bool:
    needed = needed_role(route, "GET")
    return needed is not None and permits(actor_of(request), route, needed)


def _link(request: HttpRequest, label: str, name: str, key: str) -> Link:
    href = reverse(name)
    current = request.path == href if href == "/" else request.path.startswith(href)
    return Link(label, href, key, current)
