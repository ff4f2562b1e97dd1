"""Headers that every answer of the web application carries."""

import re
import secrets
from collections.abc import Callable

from django.conf import settings
from django.http import HttpRequest, HttpResponse

from controlplane.origin import Origin, set_origin

Handler = Callable[[HttpRequest], HttpResponse]
_acceptable = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RequestIdMiddleware:
    """Give each request an id, the client's own where it is well formed, and answer it in ``X-Request-Id``."""

    def __init__(self, get_response: Handler) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Set ``request.id`` and the header."""
        given = request.headers.get("X-Request-Id", "")
        request.id = given if _acceptable.fullmatch(given) else secrets.token_hex(12)  # type: ignore[attr-defined]
        set_origin(Origin(client_address(request), request.id))  # type: ignore[attr-defined]
        response = self.get_response(request)
        response["X-Request-Id"] = request.id  # type: ignore[attr-defined]
        return response


def client_address(request: HttpRequest) -> str:
    """Where a request came from: the peer, or what the proxy in front says if there is one to be believed."""
    if settings.BEHIND_TLS_PROXY:
        named = request.headers.get("X-Forwarded-For", "").rpartition(",")[2].strip()
        if named:
            return named[:45]
    return str(request.META.get("REMOTE_ADDR") or "")[:45]


class ContentSecurityPolicyMiddleware:
    """Let pages load scripts, styles, images and data from this site only."""

    def __init__(self, get_response: Handler) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Add the policy unless the view set one of its own."""
        response = self.get_response(request)
        response.headers.setdefault("Content-Security-Policy", settings.CONTENT_SECURITY_POLICY)
        response.headers.setdefault("Permissions-Policy", "camera=(), geolocation=(), microphone=()")
        return response
