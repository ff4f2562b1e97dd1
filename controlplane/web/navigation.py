"""The pages in the side rail, and the keys that go there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest
from django.urls import reverse


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
            ("Alerts", "telemetry:alerts", "a"),
            ("Events", "telemetry:events", "e"),
        ),
    ),
    (
        "Change",
        (
            ("Policies", "controlplane:policies", "p"),
            ("Task groups", "controlplane:task-groups", "t"),
            ("Fleet", "controlplane:fleet", "f"),
        ),
    ),
    ("Deliver", (("Routers", "controlplane:routers", "r"), ("Channels", "telemetry:channels", "c"))),
)


def navigation(request: HttpRequest) -> dict[str, Any]:
    """Context processor: the sections with their links, the current one marked. No query."""
    return {"navigation": [(title, [_link(request, *page) for page in pages]) for title, pages in _SECTIONS]}


def _link(request: HttpRequest, label: str, name: str, key: str) -> Link:
    href = reverse(name)
    current = request.path == href if href == "/" else request.path.startswith(href)
    return Link(label, href, key, current)
