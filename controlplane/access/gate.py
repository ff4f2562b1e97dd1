"""The gate before every page: the rule table, asked for the object that the address names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from django.apps import apps
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect

from controlplane.access.asker import asker_of
from controlplane.access.proof import ask_again, lacks_second_factor, must_prove
from controlplane.access.rules import NAMED_BY, OPEN, needed_role, opens
from controlplane.access.scope import find
from controlplane.models import Role

Handler = Callable[[HttpRequest], HttpResponse]


class AccessMiddleware:
    """Let a request through to its view if the asker's role suffices. The REST API asks the same table itself, after
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
        if lacks_second_factor(request, asker_of(request)):
            messages.warning(request, "Your role needs a second factor. Set it up to go on.")
            return redirect("mfa_activate_totp")
        check_page(request, route, kwargs)
        return ask_again(request) if must_prove(request, route) else None


def check_page(request: HttpRequest, route: str, named: Mapping[str, Any]) -> None:
    """Http404 for an object that the asker cannot know of, PermissionDenied where the role does not suffice."""
    asker, needed = asker_of(request), needed_role(route, request.method or "")
    if needed is None:
        raise PermissionDenied(f"No rule lets anybody {request.method} {route}.")
    objects = [(NAMED_BY[name], value) for name, value in named.items() if name in NAMED_BY]
    if not objects and not opens(asker, route, needed):
        raise PermissionDenied
    for (label, field), value in objects:
        found = find(asker, apps.get_model(label)._default_manager.filter(**{field: value}))  # noqa: SLF001 - Django's name
        if found is None:
            raise Http404
        if not asker.may(needed, *found):
            raise PermissionDenied


def needed_here(request: HttpRequest) -> Role:
    """The role that the present page needs; the gate has let nobody in without one."""
    needed = needed_role(request.resolver_match.view_name if request.resolver_match else "", request.method or "")
    if needed is None:
        raise PermissionDenied
    return needed
