"""Each raw request of the corpus cut in two at every byte: what the router makes of it never changes."""

from __future__ import annotations

import pytest

from routing.proxy.client_connection import ClientConnection
from tests.routing.proxy.corpus.listening import Listening, Wire, outcome
from tests.routing.proxy.corpus.requests import (
    CHUNKED,
    END,
    FOLLOWER,
    HOST,
    START,
    VECTORS,
    Vector,
)

pytestmark = pytest.mark.plain_python(reason="Their router is of a class of their own.")

CUTS = 400  # at most, of a long one


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
    client = ClientConnection(router)
    client.connection_made(Wire())  # type: ignore[arg-type]
    body = bytes(range(256)) * 120
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    sent = START + HOST + CHUNKED + END + chunks + b"0\r\n\r\n"
    most = 0
    for start in range(0, len(sent), size):
        client.data_received(sent[start : start + size])
        most = max(most, len(client._reader._pieces))
    client.connection_lost(None)
    assert [heard[3] for heard in router.heard] == [body]
    assert most <= 2 + len(body) // 2048
    router.deadlines.close()
