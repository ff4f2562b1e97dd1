"""Each raw request of the corpus, whole and in pieces, followed by a request that must never be smuggled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from routing.schema import HealthCheck, Limits
from tests.routing.proxy.corpus.in_memory import in_pieces
from tests.routing.proxy.corpus.readers import PARSERS, PROBE_PATH, Recorder, recording
from tests.routing.proxy.corpus.requests import (
    FOLLOWER,
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    VECTORS,
    Vector,
)
from tests.routing.proxy.harness import Harness, RawClient, config, routed

on_one_loop = pytest.mark.asyncio(loop_scope="module")
LIMITS = Limits(max_header_bytes=MAX_HEADER_BYTES, max_body_bytes=MAX_BODY_BYTES)
HEALTH = HealthCheck(path=PROBE_PATH, interval_s=3600)


@dataclass
class Edge:
    """A router and its recording replica. All vectors share them, so heads are cached."""

    harness: Harness
    recorder: Recorder

    async def reached(self) -> list[bytes]:
        """The bodies that the replica got, once no request is in flight."""
        await self.harness.at_rest()
        assert self.recorder.violations == []
        received = self.recorder.take()
        assert all(
            request.values(b"host") == [self.recorder.url.removeprefix("http://").encode()] for request in received
        )
        for name, parse in PARSERS.items():
            assert parse(b"".join(request.raw for request in received)) == [
                (request.method, request.target, request.body) for request in received
            ], name
        return [request.body for request in received]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def edge() -> AsyncIterator[Edge]:
    async with recording() as recorder, routed(config([recorder], limits=LIMITS, health=HEALTH)) as harness:
        yield Edge(harness, recorder)


def ways_to_send(vector: Vector) -> list[list[bytes]]:
    """A vector and a following request: whole, byte by byte if short, and cut at random."""
    follower = FOLLOWER if vector.has_end else b""
    # Closing may reset a client that goes on sending, so bytes to be ignored come with the last byte.
    glued = follower if vector.closes and not vector.is_refused else b""
    raw = vector.raw if glued else vector.raw + follower
    return [[*way[:-1], way[-1] + glued] for way in in_pieces(raw, random.Random(vector.name))]


async def send(client: RawClient, pieces: list[bytes]) -> None:
    """Send pieces so that they are probably read one by one."""
    try:
        for piece in pieces:
            if client.writer.transport.is_closing():
                return  # rejected before its end
            client.writer.write(piece)
            await asyncio.sleep(0)
        await client.writer.drain()
    except ConnectionError:
        return


async def expect(client: RawClient, statuses: tuple[int, ...], *, closes: bool) -> None:
    for number, status in enumerate(statuses, start=1):
        response = await client.read_response()
        while response.status == 100:
            response = await client.read_response()
        assert response.status == status
        assert status < 400 or response.error["code"] == status
        is_last = closes and number == len(statuses)
        assert (response.headers.get("connection") == "close") is is_last
    if closes:
        assert await client.read_all() == b""


def test_the_corpus_has_enough_vectors():
    names = [vector.name for vector in VECTORS]
    assert len(names) == len(set(names))
    assert sum(vector.is_refused for vector in VECTORS) >= 80


@on_one_loop
@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector.name)
async def test_each_request_is_read_the_same_way_however_it_is_cut(vector, edge):
    follows = vector.has_end and not vector.closes
    edge.recorder.take()
    for pieces in ways_to_send(vector):
        async with edge.harness.connect() as client:
            await send(client, pieces)
            await expect(client, vector.statuses + (200,) * follows, closes=vector.closes)
            if not vector.statuses:
                client.writer.write_eof()
                assert await client.read_all() == b""
        assert await edge.reached() == [*vector.bodies, *[b'{"n":2}'] * follows]


@on_one_loop
@pytest.mark.parametrize("vector", [request for request in VECTORS if request.has_end], ids=lambda vector: vector.name)
async def test_a_request_after_valid_ones_is_read_the_same_way(vector, edge):
    follows = not vector.closes
    edge.recorder.take()
    async with edge.harness.connect() as client:
        await send(client, [FOLLOWER * 2 + vector.raw + FOLLOWER])
        await expect(client, (200, 200, *vector.statuses, *[200] * follows), closes=vector.closes)
    assert await edge.reached() == [*[b'{"n":2}'] * 2, *vector.bodies, *[b'{"n":2}'] * follows]
