"""Each raw request of the corpus cut in two at every byte: what the router makes of it never changes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from routing.proxy.clients.client import Client
from routing.proxy.clients.request import Request
from routing.proxy.errors import LocalAnswer
from routing.proxy.router import Router
from routing.schema import Limits
from tests.routing.proxy.corpus.requests import (
    CHUNKED,
    END,
    FOLLOWER,
    HOST,
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    START,
    VECTORS,
    Vector,
)

pytestmark = pytest.mark.plain_python(reason="Their router is of a class of their own.")

CUTS = 400  # at most, of a long one


class Listening(Router):
    """A router that answers by itself, and keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__("listening")
        self.limits = Limits(max_header_bytes=MAX_HEADER_BYTES, max_body_bytes=MAX_BODY_BYTES)
        self.heard: list[tuple[Any, ...]] = []

    def open(self, client: Client, request: Request) -> LocalAnswer:  # noqa: ARG002 - a router's signature
        head = request.head
        self.heard.append((head.method, head.target, head.forwarded, request.body, head.keep_alive))
        return LocalAnswer(200, b"{}")


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
    client = Client(router)
    client.connection_made(wire)  # type: ignore[arg-type]
    for piece in pieces:
        client.data_received(piece)
    await asyncio.sleep(0)  # what is written in one turn leaves at its end
    client.connection_lost(None)
    lines = [one for one in wire.written.split(b"\r\n") if one.startswith(b"HTTP/1.1 ") and b" 100 " not in one]
    assert not any(one.startswith(b"HTTP/1.1 500 ") for one in lines)
    return router.heard, lines, wire.is_open


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector.name)
async def test_where_a_request_is_cut_makes_no_difference(vector: Vector) -> None:
    raw = vector.raw + FOLLOWER * vector.has_end
    router = Listening()
    whole = await outcome(router, raw)
    sound = 0 if vector.is_refused else len(vector.statuses)
    assert len(whole[0]) == sound + (vector.has_end and not vector.closes)
    for cut in range(1, len(raw), 1 + len(raw) // CUTS):
        assert await outcome(router, raw[:cut], raw[cut:]) == whole, raw[:cut]
    router.deadlines.close()


async def test_what_was_asked_before_makes_no_difference() -> None:
    cold, warm = Listening(), Listening()
    raws = [vector.raw + FOLLOWER * vector.has_end for vector in VECTORS]
    first = [await outcome(warm, raw) for raw in raws]
    for raw, before in zip(reversed(raws), reversed(first), strict=True):
        assert await outcome(warm, FOLLOWER) == await outcome(cold, FOLLOWER)
        assert await outcome(warm, raw) == before
    cold.deadlines.close()
    warm.deadlines.close()


@pytest.mark.parametrize("size", [1, 2, 3, 100, 5000])
async def test_a_body_in_tiny_reads_and_chunks_is_kept_in_few_pieces(size: int) -> None:
    router = Listening()
    client = Client(router)
    client.connection_made(Wire())  # type: ignore[arg-type]
    body = bytes(range(256)) * 120
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    sent = START + HOST + CHUNKED + END + chunks + b"0\r\n\r\n"
    most = 0
    for start in range(0, len(sent), size):
        client.data_received(sent[start : start + size])
        most = max(most, len(client._parts))
    client.connection_lost(None)
    assert [heard[3] for heard in router.heard] == [body]
    assert most <= 2 + len(body) // 2048
    router.deadlines.close()
