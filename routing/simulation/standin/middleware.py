"""What every exchange has in common: authentication, the errors' shapes, headers, and its place in the metrics."""

from __future__ import annotations

import hmac
import secrets
import time

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from routing.simulation.standin.errors import ApiError, error_body
from routing.simulation.standin.state import replica_key, settings_key

GUARDED = ("/v1", "/v2", "/inference", "/cohere")  # what --api-key guards; /health and /metrics stay open


async def set_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Headers as vLLM's: the request's id is echoed, or a random one set, but not on a 500."""
    headers = response.headers
    headers["Server"] = "uvicorn"
    if response.status not in {401, 500}:
        headers["Vary"] = "Origin"
    if response.status != 500:
        headers["X-Request-Id"] = request.headers.get("X-Request-Id") or secrets.token_hex(16)


@web.middleware
async def answer_every_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer with one of vLLM's shapes whatever happens, and count it."""
    started_s = time.perf_counter()
    response = await _shaped(request, handler)
    resource = request.match_info.route.resource
    path = resource.canonical if resource is not None and response.status != 405 else "none"
    request.app[replica_key].http.observe(
        path,
        request.method,
        response.status,
        seconds=time.perf_counter() - started_s,
        received_bytes=request.content_length or 0,
        sent_bytes=response.content_length or 0,
    )
    return response


async def _shaped(request: web.Request, handler: Handler) -> web.StreamResponse:
    if not _is_allowed(request):
        return _json(b'{"error":"Unauthorized"}', 401)
    try:
        return await handler(request)
    except ApiError as error:
        return _json(error.body(), error.status)
    except web.HTTPRequestEntityTooLarge as error:
        return _json(error_body(413, "Request Entity Too Large", error.reason), 413)
    except web.HTTPException as error:
        response = _json(msgspec.json.encode({"detail": error.reason}), error.status)
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response


def _is_allowed(request: web.Request) -> bool:
    key = request.app[settings_key].api_key
    if key is None or not request.path.startswith(GUARDED):
        return True
    given = request.headers.get("Authorization", "")
    return hmac.compare_digest(given.encode(errors="surrogateescape"), f"Bearer {key}".encode())


def _json(body: bytes, status: int) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")
