"""Who is asking: a script with a token, a person with a session, or a router."""

from __future__ import annotations

import hmac
from dataclasses import replace

from django.conf import settings
from django.contrib.auth.models import AnonymousUser, User
from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request

from controlplane.models import ApiToken
from controlplane.request_origin import present_origin, set_origin
from controlplane.services.access.tokens import find_token, record_use

_SCHEME = "Bearer"


class TokenAuthentication(BaseAuthentication):
    """``Authorization: Bearer wp_<id>.<secret>``. Every refusal reads the same, whatever was wrong."""

    def authenticate(self, request: Request) -> tuple[User, ApiToken] | None:
        """The token's user and the token; None where no bearer token was sent."""
        text = bearer_text(request)
        if text is None:
            return None
        token = find_token(text)
        if token is None:
            raise AuthenticationFailed("The token is unknown, expired or revoked.")
        record_use(token)
        set_origin(replace(present_origin(), token=token.key_id))
        return token.user, token

    def authenticate_header(self, request: Request) -> str:  # noqa: ARG002 - the signature is DRF's
        """What a 401 asks for."""
        return _SCHEME


class RouterAuthentication(BaseAuthentication):
    """``Authorization: Bearer $WARMPATH_ROUTER_ADMIN_TOKEN``, the token that routers and control plane share.

    Without such a token nobody is a router. ``request.auth`` is then ``"router"`` and the user anonymous.
    """

    def authenticate(self, request: Request) -> tuple[AnonymousUser, str] | None:
        """The mark of a router; None where no bearer token was sent."""
        text = bearer_text(request)
        if text is None:
            return None
        expected = settings.ROUTER_ADMIN_TOKEN
        if not expected or not hmac.compare_digest(text.encode(), expected.encode()):
            raise AuthenticationFailed("This is not the routers' token.")
        return AnonymousUser(), "router"

    def authenticate_header(self, request: Request) -> str:  # noqa: ARG002 - the signature is DRF's
        """What a 401 asks for."""
        return _SCHEME


def bearer_text(request: Request) -> str | None:
    """The bearer token that was sent, None for none."""
    scheme, _, text = get_authorization_header(request).decode("latin-1").partition(" ")
    return text.strip() if scheme.lower() == _SCHEME.lower() else None
