"""Each raw response of the corpus, whole and in pieces: a client gets all of it, or sees that it did not."""

from __future__ import annotations

import asyncio
import random

import pytest

from routing.schema import HealthCheck
from tests.fakes.replica import Call, FakeReplica, Script
from tests.routing.proxy.corpus.in_memory import in_pieces
from tests.routing.proxy.corpus.responses import CHUNKS, VECTORS, Fate, Vector, chunks, head
from tests.routing.proxy.harness import CHAT, Harness, config, post, routed

NEVER_DOWN = HealthCheck(failures=100, interval_s=3600)
SOUND = (head(), chunks(CHUNKS), head(), chunks(CHUNKS))


def sending(pieces: list[bytes], *, ends: bool) -> Script:
    """Send pieces so that they are probably read one by one."""

    async def script(call: Call) -> None:
        for piece in pieces:
            call.writer.write(piece)
            await asyncio.sleep(0)
        if ends:
            call.close()

    return script


async def no_connections(harness: Harness) -> None:
    connection_pools = harness.router.active.connection_pools.values()
    await harness.until(lambda: not any(link.connections for link in connection_pools), "the connection to be closed")


async def expect_whole(vector: Vector, harness: Harness, replicas: list[FakeReplica]) -> None:
    """Three requests, so that left-over bytes would be part of the next response."""
    made = sum(replica.connections for replica in replicas)
    async with harness.connect() as client:
        for _ in range(3):
            response = await client.ask(post(CHAT))
            assert response.head.startswith(b"HTTP/1.1 ")  # not left-over bytes
            assert (response.status, response.body) == (vector.status, vector.body)
            assert "x-warmpath-replica" in response.headers
            assert vector.status != 204 or "content-length" not in response.headers  # RFC 9110, 8.6
            if vector.fate is Fate.CLOSED:
                await no_connections(harness)
            if response.headers.get("connection") == "close":
                assert await client.read_all() == b""
                return
    made = sum(replica.connections for replica in replicas) - made
    assert made == 3 if vector.fate is Fate.CLOSED else made <= len(replicas)


async def expect_502(vector: Vector, harness: Harness, replicas: list[FakeReplica]) -> None:
    calls = sum(len(replica.calls) for replica in replicas)
    response = await harness.chat()
    assert (response.status, response.error["code"]) == (502, 502)
    await harness.at_rest()
    calls = sum(len(replica.calls) for replica in replicas) - calls
    assert calls == (1 if vector.fate is Fate.BAD else len(replicas))


async def expect_torn(vector: Vector, harness: Harness, replicas: list[FakeReplica]) -> None:
    async with harness.connect() as client:
        await client.send(post(CHAT))
        head_bytes = await client.read_until(b"\r\n\r\n")
        rest = await client.read_all()
    assert head_bytes.startswith(b"HTTP/1.1 200 ")
    if b"Transfer-Encoding: chunked" in head_bytes:
        assert b"".join(rest.split(b"\r\n")[1::2]) == vector.body
        assert not rest.endswith(b"0\r\n\r\n")
    else:
        assert b"Content-Length: " in head_bytes
        assert rest == vector.body
    await harness.at_rest()


EXPECT = {
    Fate.KEPT: expect_whole,
    Fate.CLOSED: expect_whole,
    Fate.BAD: expect_502,
    Fate.LOST: expect_502,
    Fate.TORN: expect_torn,
}


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector.name)
async def test_each_response_is_read_the_same_way_however_it_is_cut(vector, two):
    async with routed(config(two, health=NEVER_DOWN)) as harness:
        for sound in SOUND:  # cached heads must make no difference
            two[0].script = two[1].script = sending([sound], ends=True)
            assert (await harness.chat()).body == b"hello"
        await no_connections(harness)
        for pieces in in_pieces(vector.raw, random.Random(len(vector.raw))):
            for replica in two:
                replica.script = sending(pieces, ends=vector.ends)
            await EXPECT[vector.fate](vector, harness, two)
