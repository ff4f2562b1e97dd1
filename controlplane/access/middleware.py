"""Access control of pages: checks the rule table for the object in the URL, second factors and re-authentication."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

from allauth.account.adapter import get_adapter
from django.apps import apps
from django.conf import settings
from django.contrib import messages
from django.contrib.auth.models import User
from django.core.exceptions import BadRequest, PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect

from controlplane.access.actor import Actor, actor_of, visible_project
from controlplane.access.rules import (
    MODEL_OF_URL_PARAMETER,
    PUBLIC_ROUTES,
    needed_role,
    needs_reauthentication,
    permits,
)
from controlplane.accounts.sign_in_methods import has_totp, is_recently_authenticated, signed_in_by_provider
from controlplane.models import Event, EventKind, Role


class AccessMiddleware:
    """Checks page requests against the rule table, and rejects NUL, which no database stores, in their URLs.

    The REST API checks the same table after authentication, and each parameter by itself.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        is_page = not request.path.startswith("/api/")
        if is_page and ("\0" in request.path or "%00" in request.META.get("QUERY_STRING", "")):
            raise BadRequest("The address contains a NUL character, %00: remove it.")
        return self.get_response(request)

    def process_view(
        self,
        request: HttpRequest,
        view: Callable[..., HttpResponse],
        args: tuple[Any, ...],  # noqa: ARG002 - the signature is Django's
        kwargs: dict[str, Any],
    ) -> HttpResponse | None:
        """None to continue, or a redirect to a second factor or re-authentication. Http404, PermissionDenied."""
        match = request.resolver_match
        route = match.view_name if match else ""
        if route in PUBLIC_ROUTES or not getattr(view, "login_required", True) or hasattr(view, "cls"):
            return None
        if not request.user.is_authenticated:  # LoginRequiredMiddleware redirects to the sign-in page
            return None
        if lacks_second_factor(request, actor_of(request)):
            messages.warning(request, "Your role needs a second factor. Set it up to continue.")
            return redirect("mfa_activate_totp")
        check_page(request, route, kwargs)
        return redirect_to_reauthentication(request) if must_reauthenticate(request, route) else None


def check_page(request: HttpRequest, route: str, parameters: Mapping[str, Any]) -> None:
    """Http404 for an object that the actor may not see, PermissionDenied where the role does not suffice."""
    actor, needed = actor_of(request), needed_role(route, request.method or "")
    if needed is None:
        raise PermissionDenied(f"No rule allows {request.method} {route}.")
    objects = [
        (MODEL_OF_URL_PARAMETER[name], value) for name, value in parameters.items() if name in MODEL_OF_URL_PARAMETER
    ]
    if not objects and not permits(actor, route, needed):
        raise PermissionDenied
    for (label, field), value in objects:
        rows = apps.get_model(label)._default_manager.filter(**{field: value})  # noqa: SLF001 - Django's name
        project = visible_project(actor, rows)
        if project is None and label == "controlplane.Replica" and field == "name":  # a removed replica keeps its page
            removals = Event.objects.filter(kind=EventKind.REPLICA_REMOVED, detail__before__name=value)
            project = visible_project(actor, removals)
        if project is None:
            raise Http404
        if not actor.may(needed, *project):
            raise PermissionDenied


def lacks_second_factor(request: HttpRequest, actor: Actor) -> bool:
    """Whether one of the actor's roles needs a second factor and the user has none. At most one query.

    The identity provider decides about second factors of those who sign in there.
    """
    if settings.REQUIRE_TOTP_FOR.isdisjoint(actor.roles.values()) or signed_in_by_provider(request):
        return False
    return isinstance(request.user, User) and not has_totp(request.user)


def must_reauthenticate(request: HttpRequest, route: str) -> bool:
    """Whether the route needs a recent authentication and the session's last one is too old."""
    return needs_reauthentication(route, request.method or "") and not is_recently_authenticated(request)


def redirect_to_reauthentication(request: HttpRequest) -> HttpResponse:
    """Redirect to the re-authentication page and back. PermissionDenied for a user without password or provider."""
    methods = get_adapter().get_reauthentication_methods(request.user)
    if not methods:
        raise PermissionDenied("You have no way to confirm your identity; ask an admin for a password.")
    next_url = request.get_full_path()
    if request.method != "GET":
        referer = urlsplit(request.headers.get("Referer", ""))  # the page with the form, unless it is another site's
        next_url = referer.path or "/" if referer.netloc == request.get_host() else "/"
        messages.info(request, "Thank you. Nothing was changed yet: submit the form once more.")
    url = methods[0]["url"]
    return redirect(f"{url}{'&' if '?' in url else '?'}{urlencode({'next': next_url})}")


def required_role(request: HttpRequest) -> Role:
    """The role that the current page needs."""
    needed = needed_role(request.resolver_match.view_name if request.resolver_match else "", request.method or "")
    if needed is None:
        raise PermissionDenied
    return needed
