"""Short links: a code that leads to a view, with its range, zoom and filters.

Theory of operation. A link is no more than an address: whoever follows it has to sign in, and sees there what they may
see. Only addresses of our own pages are taken, so a link never leads elsewhere. The least recently followed go first
when there are too many, and what nobody followed for ``KEPT`` goes as well.
"""

from __future__ import annotations

import secrets
from datetime import datetime, timedelta
from urllib.parse import urlsplit

from django.contrib.auth.models import User
from django.db import transaction
from django.urls import Resolver404, resolve

from controlplane.access.rules import RULES
from controlplane.errors import ConflictError, InvalidError
from telemetry.models import ShortLink
from telemetry.models.notification import LONGEST

KEPT = timedelta(days=400)
MOST = 50_000
MOST_A_DAY = 500  # of one person
DAY = timedelta(days=1)
CODE_BYTES = 6  # random; 8 characters


@transaction.atomic
def shorten(view: str, *, by: User, now: datetime) -> ShortLink:
    """The link to a view, path and query; the one that there is, or a new one. InvalidError for what is no page."""
    check_view(view)
    found = ShortLink.objects.filter(view=view).first()
    if found is not None:
        return found
    if ShortLink.objects.filter(made_by=by, made_at__gt=now - DAY)[:MOST_A_DAY].count() >= MOST_A_DAY:
        raise ConflictError(f"You made {MOST_A_DAY} short links within a day. Those that there are go on working.")
    _make_room(now)
    code = secrets.token_urlsafe(CODE_BYTES)
    return ShortLink.objects.get_or_create(
        view=view, defaults={"code": code, "made_by": by, "made_at": now, "used_at": now}
    )[0]


def follow(code: str, now: datetime) -> ShortLink | None:
    """The link of a code, which has been used now. One query, and once a day a write."""
    found = ShortLink.objects.select_related("made_by").filter(code=code).first()
    if found is not None and found.used_at < now - DAY:
        ShortLink.objects.filter(pk=found.pk).update(used_at=now)
    return found


def check_view(view: str) -> None:
    """Refuse what is not the address of one of our pages."""
    if len(view) > LONGEST or not (view.isascii() and view.isprintable()):
        raise InvalidError("$.view", f"expected the address of a page, of at most {LONGEST} printable characters")
    try:
        name = resolve(urlsplit(view).path).view_name if view[:1] == "/" and view[:2] not in {"//", "/\\"} else ""
    except (Resolver404, ValueError):
        name = ""
    is_page = "GET" in RULES.get(name, ()) and name.startswith(("telemetry:", "controlplane:"))
    if not is_page:
        raise InvalidError("$.view", "expected the address of one of these pages, beginning with /")


def _make_room(now: datetime) -> None:
    ShortLink.objects.filter(used_at__lt=now - KEPT).delete()
    excess = ShortLink.objects.count() - MOST + 1
    if excess > 0:
        least = ShortLink.objects.order_by("used_at", "pk").values("pk")[:excess]
        ShortLink.objects.filter(pk__in=least).delete()
