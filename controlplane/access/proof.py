"""How well somebody proved who they are: with a second factor where their role needs one, and not too long ago where
what they ask for cannot be undone.
"""

from __future__ import annotations

from urllib.parse import urlencode, urlsplit

from allauth.account.adapter import get_adapter
from django.conf import settings
from django.contrib import messages
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect

from controlplane.access.asker import Asker
from controlplane.access.rules import ASKS_AGAIN
from controlplane.accounts.proof import is_fresh
from controlplane.accounts.second_factor import has_code
from controlplane.accounts.ways import came_by_provider


def lacks_second_factor(request: HttpRequest, asker: Asker) -> bool:
    """Whether somebody holds a role that needs a second factor, and has none. One query, where any role needs one.

    Whoever came by the identity provider proved themselves there as it asks for.
    """
    if settings.REQUIRE_TOTP_FOR.isdisjoint(asker.roles.values()) or came_by_provider(request):
        return False
    return isinstance(request.user, User) and not has_code(request.user)


def must_prove(request: HttpRequest, route: str) -> bool:
    """Whether this request asks for a fresher proof than there is."""
    return (route, request.method) in ASKS_AGAIN and not is_fresh(request)


def ask_again(request: HttpRequest) -> HttpResponse:
    """Send somebody to prove who they are, and from there back to where they were; PermissionDenied without a way."""
    ways = get_adapter().get_reauthentication_methods(request.user)
    if not ways:
        raise PermissionDenied("There is no way left for you to prove who you are; ask an admin for a password.")
    back = request.get_full_path()
    if request.method != "GET":
        back = _page_before(request)
        messages.info(request, "Thank you. Nothing was changed yet: ask for it once more.")
    url = ways[0]["url"]
    return redirect(f"{url}{'&' if '?' in url else '?'}{urlencode({'next': back})}")


def _page_before(request: HttpRequest) -> str:
    """The page with the form that was sent, if it is one of ours."""
    named = urlsplit(request.headers.get("Referer", ""))
    return named.path or "/" if named.netloc == request.get_host() else "/"
