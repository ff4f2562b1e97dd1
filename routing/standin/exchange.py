"""What all handlers of the stand-in replica use: the replica, JSON bodies of requests, and JSON responses."""

from __future__ import annotations

import msgspec
from aiohttp import web

from routing.standin.replica import Replica
from routing.standin.requests import decode_body

replica_key: web.AppKey[Replica] = web.AppKey("replica", Replica)


def json_response(body: bytes, status: int = 200) -> web.Response:
    """A response with this JSON."""
    return web.Response(body=body, status=status, content_type="application/json")


def ok(value: object) -> web.Response:
    """A response with this value as JSON."""
    return json_response(msgspec.json.encode(value))


async def read_json(request: web.Request) -> dict[str, object]:
    """The request's body, a JSON object; ApiError otherwise."""
    return decode_body(await request.read(), request.headers.get("Content-Type", ""))
