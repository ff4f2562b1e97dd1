"""How well somebody proved who they are: with a second factor where their role needs one, and not too long ago where
what they ask for cannot be undone.

The gate before every page: the rule table, asked for the object that the address names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

from allauth.account.adapter import get_adapter
from django.apps import apps
from django.conf import settings
from django.contrib import messages
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect

from controlplane.access.actor import Actor, actor_of, find
from controlplane.access.rules import ASKS_AGAIN, NAMED_BY, OPEN, needed_role, opens
from controlplane.accounts.sign_in_methods import came_by_provider, has_code, is_fresh
from controlplane.models import Role


def lacks_second_factor(request: HttpRequest, actor: Actor) -> bool:
    """Whether somebody holds a role that needs a second factor, and has none. One query, where any role needs one.

    Whoever came by the identity provider proved themselves there as it asks for.
    """
    if settings.REQUIRE_TOTP_FOR.isdisjoint(actor.roles.values()) or came_by_provider(request):
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


Handler = Callable[[HttpRequest], HttpResponse]


class AccessMiddleware:
    """Let a request through to its view if the actor's role suffices. The REST API asks the same table itself, after
    it has found out who is asking.
    """

    def __init__(self, get_response: Handler) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Nothing: see ``process_view``."""
        return self.get_response(request)

    def process_view(
        self,
        request: HttpRequest,
        view: Callable[..., HttpResponse],
        args: tuple[Any, ...],  # noqa: ARG002 - the signature is Django's
        kwargs: dict[str, Any],
    ) -> HttpResponse | None:
        """Raise Http404 or PermissionDenied, send somebody to prove who they are, or let it pass."""
        match = request.resolver_match
        route = match.view_name if match else ""
        if route in OPEN or not getattr(view, "login_required", True) or hasattr(view, "cls"):
            return None
        if not request.user.is_authenticated:  # the middleware before this one sends them to sign in
            return None
        if lacks_second_factor(request, actor_of(request)):
            messages.warning(request, "Your role needs a second factor. Set it up to go on.")
            return redirect("mfa_activate_totp")
        check_page(request, route, kwargs)
        return ask_again(request) if must_prove(request, route) else None


def check_page(request: HttpRequest, route: str, named: Mapping[str, Any]) -> None:
    """Http404 for an object that the actor cannot know of, PermissionDenied where the role does not suffice."""
    actor, needed = actor_of(request), needed_role(route, request.method or "")
    if needed is None:
        raise PermissionDenied(f"No rule lets anybody {request.method} {route}.")
    objects = [(NAMED_BY[name], value) for name, value in named.items() if name in NAMED_BY]
    if not objects and not opens(actor, route, needed):
        raise PermissionDenied
    for (label, field), value in objects:
        found = find(actor, apps.get_model(label)._default_manager.filter(**{field: value}))  # noqa: SLF001 - Django's name
        if found is None:
            raise Http404
        if not actor.may(needed, *found):
            raise PermissionDenied


def required_role(request: HttpRequest) -> Role:
    """The role that the present page needs; the gate has let nobody in without one."""
    needed = needed_role(request.resolver_match.view_name if request.resolver_match else "", request.method or "")
    if needed is None:
        raise PermissionDenied
    return needed
