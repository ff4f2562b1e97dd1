"""A router without sockets, which tells what it hears in some bytes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from routing.http.request import Request
from routing.http.response import LocalResponse
from routing.proxy.client_connection import ClientConnection
from routing.proxy.router import Router
from routing.schema import Limits
from tests.routing.proxy.corpus.requests import MAX_BODY_BYTES, MAX_HEADER_BYTES


class Listening(Router):
    """A router that answers by itself, and keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__("listening")
        self.limits = Limits(max_header_bytes=MAX_HEADER_BYTES, max_body_bytes=MAX_BODY_BYTES)
        self.heard: list[tuple[Any, ...]] = []

    def open(self, client: ClientConnection, request: Request) -> LocalResponse:  # noqa: ARG002 - a router's signature
        head = request.head
        lines = head.lines_with(request.values, anonymous=False)
        self.heard.append((head.method, head.target, lines, request.body, head.keep_alive))
        return LocalResponse(200, b"{}")


@dataclass
class Wire:
    """A connection that keeps what is written to it."""

    written: bytes = b""
    is_open: bool = True

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.is_open = False

    abort = write_eof = close

    def can_write_eof(self) -> bool:
        return True

    def is_closing(self) -> bool:
        return not self.is_open

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading

    def get_extra_info(self, name: str) -> None:  # noqa: ARG002 - a transport's signature
        return None


Outcome = tuple[list[tuple[Any, ...]], list[bytes], bool]


async def outcome(router: Listening, *pieces: bytes) -> Outcome:
    """What the router hears in these pieces, the first lines of its answers, and whether the connection stays."""
    router.heard, wire = [], Wire()
    client = ClientConnection(router)
    client.connection_made(wire)  # type: ignore[arg-type]
    for piece in pieces:
        client.data_received(piece)
    await asyncio.sleep(0)  # what is written in one turn leaves at its end
    client.connection_lost(None)
    lines = [one for one in wire.written.split(b"\r\n") if one.startswith(b"HTTP/1.1 ") and b" 100 " not in one]
    assert not any(one.startswith(b"HTTP/1.1 500 ") for one in lines)
    return router.heard, lines, wire.is_open
