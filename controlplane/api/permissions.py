"""What the asker may do. The rule table of the REST API; everything not allowed here is denied."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import User
from rest_framework.permissions import SAFE_METHODS, BasePermission
from rest_framework.request import Request

from controlplane.models import ApiToken, Scope

_ORDER = list(Scope)  # each includes the ones before it


class HasScope(BasePermission):
    """Reading needs ``read`` and changing ``write``; a view with ``needs_admin = True`` needs ``admin`` for both.

    A signed-in person may read and change; ``admin`` is for staff.
    """

    def has_permission(self, request: Request, view: Any) -> bool:
        """Whether the asker's scopes cover what the view needs."""
        needed = Scope.READ if request.method in SAFE_METHODS else Scope.WRITE
        if getattr(view, "needs_admin", False):
            needed = Scope.ADMIN
        return any(_ORDER.index(Scope(scope)) >= _ORDER.index(needed) for scope in granted(request))


class IsRouter(BasePermission):
    """Only a router, by the token that routers share with the control plane."""

    def has_permission(self, request: Request, view: Any) -> bool:  # noqa: ARG002 - the signature is DRF's
        """Whether RouterAuthentication let it in."""
        return request.auth == "router"


def granted(request: Request) -> list[str]:
    """The scopes that the asker holds; none for an anonymous one."""
    if isinstance(request.auth, ApiToken):
        return request.auth.scopes
    if isinstance(request.user, User) and request.user.is_authenticated:
        return [Scope.WRITE, Scope.ADMIN] if request.user.is_staff else [Scope.WRITE]
    return []


def signed_in_user(request: Request) -> User:
    """Who is asking, for a service's ``by``; behind HasScope there always is somebody."""
    if not isinstance(request.user, User):
        raise TypeError("a view without HasScope asked who is signed in")
    return request.user
