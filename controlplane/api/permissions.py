"""What the actor may do over REST: the rule table, for scripts with a token and people with a session."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import User
from django.db.models import Model
from rest_framework.exceptions import MethodNotAllowed, PermissionDenied
from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from controlplane.access.actor import Actor, actor_of, project_id_of
from controlplane.access.middleware import lacks_second_factor, must_prove
from controlplane.access.rules import needed_role, opens
from controlplane.models import ApiToken, Role


class HasRole(BasePermission):
    """The role that the table asks for: somewhere, and in the project of the object that the address names."""

    def has_permission(self, request: Request, view: Any) -> bool:
        """Whether the actor holds the role anywhere. What a list shows and a body may name is narrowed further."""
        method = request.method or ""
        if isinstance(request.user, User) and method != "OPTIONS" and not hasattr(view, method.lower()):
            raise MethodNotAllowed(method)
        needed = role_needed(request)
        if needed is None or not opens(actor(request), route_of(request), needed):
            return False
        if request.auth is None:  # a person with a session
            check_proof(request)
        return True

    def has_object_permission(self, request: Request, view: Any, obj: Model) -> bool:  # noqa: ARG002 - DRF's signature
        """Whether the role suffices for this object; one that the actor cannot see is not found before."""
        needed = role_needed(request)
        return needed is not None and actor(request).may(needed, project_id_of(obj))


def check_proof(request: Request) -> None:
    """PermissionDenied for a person whose session is no proof enough; pages send them to give a better one."""
    asked = request._request  # noqa: SLF001 - where Django's middleware keeps the session
    if lacks_second_factor(asked, actor(request)):
        raise PermissionDenied("Your role needs a second factor. Set it up on your account's page.")
    if must_prove(asked, route_of(request)):
        raise PermissionDenied("Confirm that it is you at /accounts/confirm/, and ask again, or use a token.")


class IsRouter(BasePermission):
    """Only a router, by the token that routers share with the control plane."""

    def has_permission(self, request: Request, view: Any) -> bool:  # noqa: ARG002 - the signature is DRF's
        """Whether RouterAuthentication let it in."""
        return request.auth == "router"


def actor(request: Request) -> Actor:
    """Who is asking, and which roles they hold."""
    token = request.auth if isinstance(request.auth, ApiToken) else None
    return actor_of(request._request, token)  # noqa: SLF001 - where Django's middleware keeps it too


def role_needed(request: Request) -> Role | None:
    """What the table says of this address and method."""
    return needed_role(route_of(request), request.method or "")


def route_of(request: Request) -> str:
    """The address's name in the table."""
    match = request.resolver_match
    return match.view_name if match else ""


def signed_in_user(request: Request) -> User:
    """Who is asking, for a service's ``by``; behind HasRole there always is somebody."""
    if not isinstance(request.user, User):
        raise TypeError("a view without HasRole asked who is signed in")
    return request.user
