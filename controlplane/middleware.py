"""Headers that every answer of the web application carries."""

import os
import re
import secrets
import time
from collections.abc import Callable

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from prometheus_client import Counter

from controlplane.request_origin import Origin, client_address, set_origin

Handler = Callable[[HttpRequest], HttpResponse]
REQUESTS = Counter(
    "warmpath_controlplane_requests", "Answers of the web process.", ["route", "method", "status", "process"]
)
SECONDS = Counter("warmpath_controlplane_request_seconds", "Time that answers took.", ["route", "process"])
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_acceptable = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RequestCountMiddleware:
    """Count answers by route, method and status. A route, unlike an address, is one of a known number."""

    def __init__(self, get_response: Handler) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Count what was answered, and how long that took."""
        begun_s = time.perf_counter()
        response = self.get_response(request)
        route = request.resolver_match.view_name if request.resolver_match else ""
        method = request.method if request.method in _METHODS else "other"
        REQUESTS.labels(route, method, str(response.status_code), str(os.getpid())).inc()
        SECONDS.labels(route, str(os.getpid())).inc(time.perf_counter() - begun_s)
        return response


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


class CacheControlMiddleware:
    """Keep answers out of every cache, unless a view says how its own may be kept. Static files never come here."""

    def __init__(self, get_response: Handler) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Add the header: what one person may see is for no proxy, and for no disk of a shared computer."""
        response = self.get_response(request)
        if response.headers.get("Cache-Control", "no-store") == "no-store":
            response.headers["Cache-Control"] = "private, no-store"
        return response


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
