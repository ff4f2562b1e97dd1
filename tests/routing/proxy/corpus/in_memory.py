"""A router without sockets that records the requests it reads, and random damage to raw messages."""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import dataclass
from typing import Any

from routing.http.request import Request
from routing.http.response import LocalResponse
from routing.proxy.client_connection import ClientConnection
from routing.proxy.router import Router
from routing.schema import Limits
from tests.pace import examples
from tests.routing.proxy.corpus.requests import MAX_BODY_BYTES, MAX_HEADER_BYTES


class RecordingRouter(Router):
    """A router that responds to everything and records the requests."""

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
    """A transport that records what is written."""

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


async def feed(client: ClientConnection, data: bytes) -> None:
    """Have a connection read some bytes, also those that it puts off while the event loop is busy."""
    client.data_received(data)
    while client.is_deferred:
        await asyncio.sleep(0)


Outcome = tuple[list[tuple[Any, ...]], list[bytes], bool]


async def outcome(router: RecordingRouter, *pieces: bytes) -> Outcome:
    """The requests that the router reads, the status lines of its responses, and whether the connection stays open."""
    router.heard, wire = [], Wire()
    client = ClientConnection(router)
    client.connection_made(wire)  # type: ignore[arg-type]
    for piece in pieces:
        await feed(client, piece)
    await asyncio.sleep(0)  # coalesced writes leave at the end of the iteration
    client.connection_lost(None)
    lines = [line for line in wire.written.split(b"\r\n") if line.startswith(b"HTTP/1.1 ") and b" 100 " not in line]
    assert not any(line.startswith(b"HTTP/1.1 500 ") for line in lines)
    return router.heard, lines, wire.is_open


ROUNDS = int(os.environ.get("WARMPATH_FUZZ_ROUNDS", examples(200)))  # for each of ten seeds
PIECES = (
    *(b"\r\n", b"\n", b"\r", b" ", b"\t", b"\0", b":", b",", b";", b"0", b"1", b"7", b"a", b"\xff", b"\x0b", b"\r\n "),
    *(b"chunked", b"Content-Length: 3\r\n", b"Content-Length: 7\r\n", b"Transfer-Encoding: chunked\r\n", b"\r\n\r\n"),
    *(b"0\r\n\r\n", b"3\r\nabc\r\n", b"Connection: close\r\n", b"Host: a\r\n", b"HTTP/1.0", b"GET / HTTP/1.1\r\n"),
    *(
        b"Connection: upgrade\r\nUpgrade: x\r\n",
        b"Expect: 100-continue\r\n",
        b"identity",
        b"http://router",
        b"0x",
        b"+",
    ),
)


def in_pieces(raw: bytes, chance: random.Random) -> list[list[bytes]]:
    """Some bytes whole, one by one if they are few, and cut at random twice."""
    ways = [[raw]]
    if len(raw) < 1000:
        ways.append([raw[at : at + 1] for at in range(len(raw))])
    for _ in range(2 if len(raw) > 1 else 0):
        cuts = sorted(chance.sample(range(1, len(raw)), min(len(raw) - 1, chance.randrange(1, 9))))
        ways.append([raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)])
    return ways


def damaged(raw: bytes, chance: random.Random) -> bytes:
    """The same bytes with a few pieces inserted, removed, doubled or changed."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        at, end = sorted(chance.randrange(len(raw) + 1) for _ in range(2))
        end = min(end, at + chance.choice((0, 1, 1, 2, 20)))
        piece = chance.choice((b"", chance.choice(PIECES), chance.choice(PIECES), raw[at:end] * 2))
        raw = raw[:at] + piece + raw[end:]
    return raw
