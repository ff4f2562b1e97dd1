"""Search by name, and short links: a code that leads to a view with its range, zoom and filters.

A short link is only an address: a user who follows it must sign in and sees what their permissions allow. Only
addresses of Warmpath's own pages are accepted, so a link never redirects elsewhere. Links that were not followed for
``RETENTION`` are deleted, and so are the least recently followed ones above ``MAX_LINKS``.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import QuerySet
from django.urls import Resolver404, resolve

from controlplane.access.actor import Actor, visible
from controlplane.access.rules import RULES
from controlplane.errors import ConflictError, InvalidError
from controlplane.models import Pool, Replica, RoutingPolicy, TaskGroup
from telemetry.models import ShortLink
from telemetry.models.notification import MAX_VIEW_CHARS

MAX_RESULTS = 8  # of each kind
MAX_QUERY_CHARS = 63
RETENTION = timedelta(days=400)
MAX_LINKS = 50_000
MAX_LINKS_PER_DAY = 500  # of one user
DAY = timedelta(days=1)
CODE_BYTES = 6  # random; 8 characters


@dataclass(frozen=True, slots=True)
class SearchResult:
    """A row whose name matches. ``key`` identifies its page."""

    kind: str  # "pool", "task group", "replica" or "policy"
    name: str
    key: tuple[str, ...]


def search(actor: Actor, text: str) -> list[SearchResult]:
    """Rows that the actor may see and whose name contains a text; names that start with it first. Four queries."""
    query = text.strip().lower()[:MAX_QUERY_CHARS]
    if not query:
        return []

    def matching(rows: QuerySet[Any]) -> QuerySet[Any]:
        return visible(actor, rows).filter(name__contains=query).order_by("name")[:MAX_RESULTS]

    groups = matching(TaskGroup.objects.select_related("pool"))
    results = [
        *(SearchResult("pool", row.name, (row.name,)) for row in matching(Pool.objects.all())),
        *(SearchResult("task group", row.name, (row.pool.name, row.name)) for row in groups),
        *(SearchResult("replica", row.name, (row.name,)) for row in matching(Replica.objects.all())),
        *(SearchResult("policy", row.name, (str(row.pk),)) for row in matching(RoutingPolicy.objects.all())),
    ]
    return sorted(results, key=lambda result: not result.name.startswith(query))


@transaction.atomic
def shorten(view: str, *, by: User, now: datetime) -> ShortLink:
    """The link to a view (path and query): an existing one, or a new one. InvalidError if it is not a page."""
    check_view(view)
    link = ShortLink.objects.filter(view=view).first()
    if link is not None:
        return link
    if ShortLink.objects.filter(made_by=by, made_at__gt=now - DAY)[:MAX_LINKS_PER_DAY].count() >= MAX_LINKS_PER_DAY:
        raise ConflictError(f"You created {MAX_LINKS_PER_DAY} short links within a day. Existing links still work.")
    _delete_old_links(now)
    code = secrets.token_urlsafe(CODE_BYTES)
    return ShortLink.objects.get_or_create(
        view=view, defaults={"code": code, "made_by": by, "made_at": now, "used_at": now}
    )[0]


def follow(code: str, now: datetime) -> ShortLink | None:
    """The link of a code, marked as used. One query, and one write a day."""
    link = ShortLink.objects.select_related("made_by").filter(code=code).first()
    if link is not None and link.used_at < now - DAY:
        ShortLink.objects.filter(pk=link.pk).update(used_at=now)
    return link


def check_view(view: str) -> None:
    """InvalidError unless this is the address of one of Warmpath's pages."""
    if len(view) > MAX_VIEW_CHARS or not (view.isascii() and view.isprintable()):
        raise InvalidError(
            "$.view", f"expected the address of a page, of at most {MAX_VIEW_CHARS} printable characters"
        )
    try:
        name = resolve(urlsplit(view).path).view_name if view[:1] == "/" and view[:2] not in {"//", "/\\"} else ""
    except (Resolver404, ValueError):
        name = ""
    is_page = "GET" in (RULES[name].roles if name in RULES else ()) and name.startswith(("telemetry:", "controlplane:"))
    if not is_page:
        raise InvalidError("$.view", "expected the address of a Warmpath page, beginning with /")


def _delete_old_links(now: datetime) -> None:
    ShortLink.objects.filter(used_at__lt=now - RETENTION).delete()
    excess = ShortLink.objects.count() - MAX_LINKS + 1
    if excess > 0:
        oldest = ShortLink.objects.order_by("used_at", "pk").values("pk")[:excess]
        ShortLink.objects.filter(pk__in=oldest).delete()
