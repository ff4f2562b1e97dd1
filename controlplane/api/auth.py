"""Authentication and permissions of the REST API: tokens, sessions and routers, checked against the rule table."""

from __future__ import annotations

import hmac
from dataclasses import replace
from typing import Any

from django.conf import settings
from django.contrib.auth.models import AnonymousUser, User
from django.db.models import Model
from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.exceptions import AuthenticationFailed, MethodNotAllowed, PermissionDenied
from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from controlplane.access.actor import HIGHEST_ROLE, Actor, actor_of, highest_role, project_id_of
from controlplane.access.middleware import lacks_second_factor, must_reauthenticate
from controlplane.access.rules import needed_role, permits
from controlplane.models import ApiToken, Role
from controlplane.request_origin import current_origin, set_origin
from controlplane.services.access.tokens import find_token, record_use


class BearerAuthentication(BaseAuthentication):
    """Base of the two kinds of bearer token."""

    def authenticate_header(self, request: Request) -> str:  # noqa: ARG002 - the signature is DRF's
        """The ``WWW-Authenticate`` header of a 401."""
        return "Bearer"


class TokenAuthentication(BearerAuthentication):
    """``Authorization: Bearer wp_<id>.<secret>``. Every rejection reads the same, whatever the cause."""

    def authenticate(self, request: Request) -> tuple[User, ApiToken] | None:
        """The token's user and the token; None where the request has no bearer token."""
        text = _bearer_token(request)
        if text is None:
            return None
        token = find_token(text)
        if token is None:
            raise AuthenticationFailed("The token is unknown, expired or revoked.")
        record_use(token)
        set_origin(replace(current_origin(), token=token.key_id))
        return token.user, token


class RouterAuthentication(BearerAuthentication):
    """``Authorization: Bearer $WARMPATH_ROUTER_ADMIN_TOKEN``, the token that routers and the control plane share.

    ``request.auth`` is then ``"router"`` and the user anonymous. Without a configured token no router can sign in.
    """

    def authenticate(self, request: Request) -> tuple[AnonymousUser, str] | None:
        """An anonymous user and ``"router"``; None where the request has no bearer token."""
        text = _bearer_token(request)
        if text is None:
            return None
        expected = settings.ROUTER_ADMIN_TOKEN
        if not expected or not hmac.compare_digest(text.encode(), expected.encode()):
            raise AuthenticationFailed("The token is not the one that routers share with this control plane.")
        return AnonymousUser(), "router"


class HasRole(BasePermission):
    """The role that the rule table requires: held in some project, and in the project of the object in the URL."""

    message: str

    def has_permission(self, request: Request, view: Any) -> bool:
        """Whether the actor holds the role anywhere. Lists and request bodies are restricted to projects later."""
        method = request.method or ""
        if isinstance(request.user, User) and method != "OPTIONS" and not hasattr(view, method.lower()):
            raise MethodNotAllowed(method)
        needed = needed_role_of(request)
        if needed is None or not permits(actor(request), route_of(request), needed):
            self.message = denial_text(request, needed)
            return False
        if request.auth is None:
            _check_session(request)
        return True

    def has_object_permission(self, request: Request, view: Any, obj: Model) -> bool:  # noqa: ARG002 - DRF's signature
        """Whether the role suffices in the object's project. An invisible object is a 404 before this is called."""
        needed = needed_role_of(request)
        if needed is not None and actor(request).may(needed, project_id_of(obj)):
            return True
        self.message = denial_text(request, needed)
        return False


def denial_text(request: Request, needed: Role | None) -> str:
    """Which role the request needs, and which scope of a token allows it."""
    if needed is None:
        return "No role allows this request."
    text = f"This request needs the role {needed.label.lower()}."
    if isinstance(request.auth, ApiToken) and not highest_role(request.auth).covers(needed):
        scope = next(scope for scope, role in HIGHEST_ROLE.items() if role.covers(needed))
        return f"{text} The token has the scope {', '.join(request.auth.scopes)}; the scope {scope} allows it."
    return text


class IsRouter(BasePermission):
    """Allows only requests with the routers' shared token."""

    def has_permission(self, request: Request, view: Any) -> bool:  # noqa: ARG002 - the signature is DRF's
        """Whether RouterAuthentication succeeded."""
        return request.auth == "router"


def actor(request: Request) -> Actor:
    """The roles of the client that sent the request, bounded by the token's scopes."""
    token = request.auth if isinstance(request.auth, ApiToken) else None
    return actor_of(request._request, token)  # noqa: SLF001 - Django's middleware caches the actor there


def needed_role_of(request: Request) -> Role | None:
    """The role that the rule table requires for this route and method; None if it is denied to all."""
    return needed_role(route_of(request), request.method or "")


def route_of(request: Request) -> str:
    """The name of the request's URL pattern, the key of the rule table."""
    match = request.resolver_match
    return match.view_name if match else ""


def signed_in_user(request: Request) -> User:
    """The user to record as author of a change. TypeError in a view without HasRole."""
    if not isinstance(request.user, User):
        raise TypeError("signed_in_user needs a view with the permission HasRole")
    return request.user


def _check_session(request: Request) -> None:
    """PermissionDenied where a signed-in user must set up a second factor or authenticate again first."""
    http_request = request._request  # noqa: SLF001 - Django's middleware keeps the session there
    if lacks_second_factor(http_request, actor(request)):
        raise PermissionDenied("Your role needs a second factor. Set it up on your account's page.")
    if must_reauthenticate(http_request, route_of(request)):
        raise PermissionDenied("Confirm your identity at /accounts/confirm/ and repeat the request, or use a token.")


def _bearer_token(request: Request) -> str | None:
    scheme, _, text = get_authorization_header(request).decode("latin-1").partition(" ")
    return text.strip() if scheme.lower() == "bearer" else None
