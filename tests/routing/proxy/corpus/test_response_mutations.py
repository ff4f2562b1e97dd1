"""Raw responses with random damage: the router and h11 agree on where a response ends."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import h11
import pytest

from routing.http.loop import Deadlines, WriteBuffer
from routing.http.response import VARYING_RESPONSE_HEADERS, HeaderCache, ResponseHead
from routing.upstream.connection import Failure, UpstreamConnection
from tests.routing.proxy.corpus.in_memory import ROUNDS, Wire, damaged
from tests.routing.proxy.corpus.responses import VECTORS, Fate

pytestmark = pytest.mark.plain_python(reason="Their link is of a class of their own.")
SHORT = [vector for vector in VECTORS if len(vector.raw) < 400]
SEEDS = [vector.raw for vector in SHORT] + 3 * [it.raw for it in SHORT if it.fate in {Fate.KEPT, Fate.CLOSED}]
Read = tuple[int, bytes] | None  # status and body of a complete response


class Pool:
    """A connection pool that reuses nothing."""

    name = "replica"
    address = SimpleNamespace(ssl_context=None)  # no TLS

    def return_idle(self, upstream: UpstreamConnection) -> None:
        """Accept a connection."""

    on_closed = return_idle


@dataclass
class RecordingListener:
    """Records a response; pipes its body as a relay does."""

    upstream: UpstreamConnection
    status: int = 0
    body: bytes = b""
    is_complete: bool = False

    def on_response(self, head: ResponseHead, data: bytes, last: bool) -> None:
        assert not self.is_complete
        self.status, self.is_complete = head.status, last
        self.sink(data, 0)
        if not last:
            self.upstream.pipe_to(self.sink)

    def sink(self, data: bytes, start: int) -> None:
        self.body += data[start:-2] if start else data

    def on_upstream_failed(self, failure: Failure, *, is_stale: bool) -> None:  # noqa: ARG002 - a listener's signature
        assert not self.is_complete


class ResponseReader:
    """Reads responses as the router does, one connection each, with one header cache."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.deadlines = Deadlines(loop)
        self.write_buffer = WriteBuffer(loop)
        self.cache: HeaderCache[ResponseHead] = HeaderCache(VARYING_RESPONSE_HEADERS)

    def read(self, *pieces: bytes) -> Read:
        pool: Any = Pool()
        wire: Any = Wire()
        upstream = UpstreamConnection(pool, self.deadlines, self.write_buffer, self.cache)
        listener = RecordingListener(upstream)
        upstream.connection_made(wire)
        upstream.send(listener, b"", b"", first_byte_s=9, idle_s=9, bodyless=False)
        for piece in pieces:
            if piece and wire.is_open:
                upstream.data_received(piece)
        if wire.is_open:
            upstream.eof_received()
        return (listener.status, listener.body) if listener.is_complete else None


def by_h11(raw: bytes) -> Read:
    """The response as h11 reads it for httpx; None if it is invalid or incomplete."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="GET", target="/", headers=[("Host", "a")]))
    connection.send(h11.EndOfMessage())
    status, body = 0, b""
    try:
        connection.receive_data(raw)
        connection.receive_data(b"")
        while not isinstance(event := connection.next_event(), h11.EndOfMessage | h11.ConnectionClosed):
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
    except h11.RemoteProtocolError:
        return None
    return (status, body) if isinstance(event, h11.EndOfMessage) else None


@pytest.mark.generated
@pytest.mark.parametrize("seed", range(10))
async def test_damage_never_moves_the_end_of_a_response(seed):
    chance, reader = random.Random(seed), ResponseReader()
    complete = 0
    for _ in range(ROUNDS):
        raw = damaged(chance.choice(SEEDS), chance)
        read, expected = reader.read(raw), by_h11(raw)
        assert read is None or expected is None or read == expected, raw
        cut = chance.randrange(len(raw) + 1)
        assert reader.read(raw[:cut], raw[cut:]) == read, (raw[:cut], raw[cut:])
        complete += read is not None
    assert complete > ROUNDS // 10
    reader.deadlines.close()


def chunks(chance: random.Random) -> list[bytes]:
    """Chunks whose bytes look like chunks, most of them written as engines write them."""
    bodies = [chance.choice((b"5\r\nhello\r\n", b"0\r\n\r\n", b"\r\n", b"a", b"1", b"x" * 300)) for _ in range(12)]
    sizes = [chance.choice((*8 * ("%x",), "%X", "%03x", "%x;a=b")) % len(body) for body in bodies]
    return [size.encode() + b"\r\n" + body + b"\r\n" for size, body in zip(sizes, bodies, strict=True)]


def cut(pieces: list[bytes], chance: random.Random) -> list[bytes]:
    """One read for each piece; some pieces are cut in two."""
    reads = []
    for piece in pieces:
        at = chance.choice((0, 0, 0, 1, 2, len(piece) - 1, chance.randrange(len(piece))))
        reads += [piece[:at], piece[at:]]
    return reads


@pytest.mark.generated
@pytest.mark.parametrize("seed", range(10))
async def test_a_chunked_stream_is_read_the_same_way_however_it_is_cut(seed):
    chance, reader = random.Random(seed), ResponseReader()
    for _ in range(ROUNDS):
        pieces = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *chunks(chance), b"0\r\n\r\n"]
        expected = reader.read(b"".join(pieces))
        assert expected is not None
        assert reader.read(*pieces) == reader.read(*cut(pieces, chance)) == expected

        damaged_index = chance.randrange(1, len(pieces))
        pieces[damaged_index] = damaged(pieces[damaged_index], chance) or b"\r\n"
        raw = b"".join(pieces)
        assert reader.read(*pieces) == reader.read(raw), pieces
    reader.deadlines.close()
