"""Middleware of every request: request ids, metrics, caching and security headers, and streaming under ASGI.

Theory of operation of streaming. Views yield exports and files as plain iterators. Under ASGI, Django would collect
such a response in memory before it sends the first byte. ``StreamingMiddleware`` wraps the iterator in an asynchronous
one; each step runs the view's iterator in the request's thread, with the view's database connection.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import cast

from asgiref.sync import sync_to_async
from django.conf import settings
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from prometheus_client import Counter

from controlplane.request_origin import Origin, client_address, set_origin

Handler = Callable[[HttpRequest], HttpResponse]
CHUNK_BYTES = 65_536  # a smaller chunk is not worth a thread switch
REQUESTS = Counter(
    "warmpath_controlplane_requests", "Responses of the web process.", ["route", "method", "status", "process"]
)
REQUEST_SECONDS = Counter("warmpath_controlplane_request_seconds", "Duration of requests.", ["route", "process"])
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_VALID_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class StreamingMiddleware:
    """Streams plain iterators under ASGI. Outermost, because the middleware inside may wrap the iterator."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        response = self.get_response(request)
        if isinstance(request, ASGIRequest) and isinstance(response, StreamingHttpResponse) and not response.is_async:
            response.streaming_content = _read_chunks(cast("Iterator[bytes]", response.streaming_content))
        return response


class RequestCountMiddleware:
    """Counts requests and their duration by route name, because paths are unbounded."""

    def __init__(self, get_response: Handler) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        started_at_s = time.perf_counter()
        response = self.get_response(request)
        route = request.resolver_match.view_name if request.resolver_match else ""
        method = request.method if request.method in _METHODS else "other"
        REQUESTS.labels(route, method, str(response.status_code), str(os.getpid())).inc()
        REQUEST_SECONDS.labels(route, str(os.getpid())).inc(time.perf_counter() - started_at_s)
        return response


class RequestIdMiddleware:
    """Sets ``request.id``, the client's own ``X-Request-Id`` where it is well formed, and returns it in that header."""

    def __init__(self, get_response: Handler) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        request_id = request.headers.get("X-Request-Id", "")
        if not _VALID_REQUEST_ID.fullmatch(request_id):
            request_id = secrets.token_hex(12)
        request.id = request_id  # type: ignore[attr-defined]
        set_origin(Origin(client_address(request), request_id))
        response = self.get_response(request)
        response["X-Request-Id"] = request_id
        return response


class CacheControlMiddleware:
    """Keeps responses out of proxies' and browsers' caches unless a view sets ``Cache-Control`` itself.

    Static files do not pass through here.
    """

    def __init__(self, get_response: Handler) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        response = self.get_response(request)
        if response.headers.get("Cache-Control", "no-store") == "no-store":
            response.headers["Cache-Control"] = "private, no-store"
        return response


class ContentSecurityPolicyMiddleware:
    """Lets pages load scripts, styles, images and data from this site only, unless a view sets its own policy."""

    def __init__(self, get_response: Handler) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        response = self.get_response(request)
        response.headers.setdefault("Content-Security-Policy", settings.CONTENT_SECURITY_POLICY)
        response.headers.setdefault("Permissions-Policy", "camera=(), geolocation=(), microphone=()")
        return response


async def _read_chunks(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    """The same bytes in chunks of at least ``CHUNK_BYTES``, except the last."""
    next_chunk = sync_to_async(_next_chunk)
    while chunk := await next_chunk(parts):
        yield chunk


def _next_chunk(parts: Iterator[bytes]) -> bytes:
    chunk, size = [], 0
    for part in parts:
        chunk.append(part)
        size += len(part)
        if size >= CHUNK_BYTES:
            break
    return b"".join(chunk)
