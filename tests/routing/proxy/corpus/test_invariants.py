"""Raw requests cut anywhere, damaged at random, or with cached heads: the router reads the same requests."""

from __future__ import annotations

import random

import pytest

from routing.http.request import Request, RequestHead
from routing.http.response import VARYING_REQUEST_HEADERS, CachedHead, HeaderCache, LocalResponse
from routing.proxy.client_connection import ClientConnection
from tests.routing.proxy.corpus.in_memory import ROUNDS, RecordingRouter, Wire, damaged, feed, outcome
from tests.routing.proxy.corpus.readers import by_aiohttp, by_h11
from tests.routing.proxy.corpus.requests import (
    CHUNKED,
    END,
    FOLLOWER,
    HOST,
    MAX_HEADER_BYTES,
    START,
    VECTORS,
)

pytestmark = pytest.mark.plain_python(reason="Their router is of a class of their own.")
CUTS = 400  # at most, of a long one


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector.name)
async def test_cutting_a_request_in_two_changes_nothing(vector):
    raw = vector.raw + FOLLOWER * vector.has_end
    router = RecordingRouter()
    whole = await outcome(router, raw)
    sound = 0 if vector.is_refused else len(vector.statuses)
    assert len(whole[0]) == sound + (vector.has_end and not vector.closes)
    for cut in range(1, len(raw), 1 + len(raw) // CUTS):
        assert await outcome(router, raw[:cut], raw[cut:]) == whole, raw[:cut]
    router.deadlines.close()


async def test_earlier_requests_change_nothing():
    cold, warm = RecordingRouter(), RecordingRouter()
    raws = [vector.raw + FOLLOWER * vector.has_end for vector in VECTORS]
    first = [await outcome(warm, raw) for raw in raws]
    for raw, before in zip(reversed(raws), reversed(first), strict=True):
        assert await outcome(warm, FOLLOWER) == await outcome(cold, FOLLOWER)
        assert await outcome(warm, raw) == before
    cold.deadlines.close()
    warm.deadlines.close()


@pytest.mark.parametrize("size", [1, 2, 3, 100, 5000])
async def test_a_body_in_tiny_reads_is_stored_in_few_pieces(size):
    router = RecordingRouter()
    client = ClientConnection(router)
    client.connection_made(Wire())  # type: ignore[arg-type]
    body = bytes(range(256)) * 120
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    sent = START + HOST + CHUNKED + END + chunks + b"0\r\n\r\n"
    most = 0
    for start in range(0, len(sent), size):
        await feed(client, sent[start : start + size])
        most = max(most, len(client._reader._pieces))
    client.connection_lost(None)
    assert [heard[3] for heard in router.heard] == [body]
    assert most <= 2 + len(body) // 2048
    router.deadlines.close()


SHORT = [vector for vector in VECTORS if len(vector.raw) < 400]
SEEDS = [vector.raw for vector in SHORT] + 9 * [vector.raw for vector in SHORT if not vector.is_refused]


@pytest.mark.generated
@pytest.mark.parametrize("seed", range(10))
async def test_damage_never_makes_two_requests_of_one(seed):
    chance, router = random.Random(seed), RecordingRouter()
    for _ in range(ROUNDS):
        raw = damaged(chance.choice(SEEDS), chance) + FOLLOWER
        heard, _, _ = await outcome(router, raw)
        routed_requests = [(method, body) for method, _, _, body, _ in heard]
        for parse in (by_h11, by_aiohttp):
            read = [(method, body) for method, _, body in parse(raw)]
            shared = min(len(read), len(routed_requests))
            assert read[:shared] == routed_requests[:shared], (parse.__name__, raw)
        cut = chance.randrange(1, len(raw))
        assert (await outcome(router, raw[:cut], raw[cut:]))[0] == heard, raw
    router.deadlines.close()


NAMES = (b"traceparent", b"Tracestate", b"X-Request-ID", b"x-request-id", b"X_Request_Id", b"X-B3-TraceId", b"baggage")
VALUES = (
    *(
        b"",
        b"a",
        b"b",
        b"00-1-2-01",
        b"a, b",
        b"a  b",
        b"k=%b;p=%d",
        b"a\tb",
        b"a ",
        b"\xe9",
        b"\0",
        b"\x7f",
        b"a\r\n b",
    ),
    *(b"a\r\n\tb", b"a\rb", b"a\nb", b"x" * 512, b"x" * 513, b"a\r\nContent-Length: 7", b"a\r\nHost: b"),
    b"a\r\n\r\nb",
)
SOUND = (b"a", b"b", b"00-1-2-01", b"a, b", b"k=%b;p=%d", b"x" * 512)
GAPS = (*(b": ",) * 12, b":", b":  ", b":\t", b" : ", b":\r\n ")
OTHERS = (
    *(b"Accept: */*", b"Authorization: Bearer k", b"X-Session-ID: s", b"X-Task-Group: g", b"Connection: traceparent"),
    *(b"Connection: close", b"Connection: X-Request-ID, baggage", b"Content-Length: 7", b"Transfer-Encoding: chunked"),
    *(b"Expect: 100-continue", b"X-Percent: %d%b%%", b"Content-Encoding: identity"),
)
BODY = b'{"n":1}'


class RecordingHeads(RecordingRouter):
    """A router that also records parsed heads and counts cache matches."""

    matches = 0

    def request(self, head: RequestHead, body: bytes, values: list[bytes] | None = None) -> Request:
        self.matches += values is not None
        return super().request(head, body, values)

    def open(self, client: ClientConnection, request: Request) -> LocalResponse:
        response = super().open(client, request)
        head = request.head
        client_id = "" if request.request_id.startswith(self.boot) else request.request_id
        lines = head.lines_with(request.values, anonymous=True)
        self.heard[-1] += (client_id, lines, head.authorization, head.session_id, head.task_group)
        return response


class EmptyCache(HeaderCache[RequestHead]):
    """A cache without matches."""

    def find(self, data: bytes, latest: CachedHead[RequestHead] | None = None) -> None:  # noqa: ARG002 - its signature
        return None


def variants(chance: random.Random) -> list[bytes]:
    """A few requests with similar headers and different values."""
    starts = [chance.choice(NAMES) + chance.choice(GAPS) for _ in range(chance.randrange(1, 4))]
    other_lines = chance.sample(OTHERS, chance.choice((0, 0, 1, 2)))
    where = chance.randrange(len(starts) + 2)
    length = chance.choice((*(b"Content-Length: 7",) * 5, b"content-length:7", b"Content-Length: 07"))
    requests = []
    for _ in range(6):
        values = [chance.choice(VALUES if chance.random() < 0.3 else SOUND) for _ in starts]
        lines = [b"Host: router", *(start + value for start, value in zip(starts, values, strict=True)), length]
        lines[where:where] = other_lines
        raw = b"POST /v1/completions HTTP/1.1\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + BODY
        requests.append(damaged(raw, chance) if chance.random() < 0.1 else raw)
    return requests


@pytest.mark.generated
@pytest.mark.parametrize("seed", range(10))
async def test_cached_heads_are_read_as_uncached_ones(seed):
    chance, warm, cold = random.Random(seed), RecordingHeads(), RecordingHeads()
    warm.request_head_cache.reset(MAX_HEADER_BYTES)
    cold.request_head_cache = EmptyCache(VARYING_REQUEST_HEADERS)
    for _ in range(ROUNDS):
        variants_of_one = variants(chance)
        for raw in variants_of_one:
            assert await outcome(warm, raw) == await outcome(cold, raw), raw
        # On one connection, where the latest head is compared first.
        sound = [raw for raw in variants_of_one if (await outcome(cold, raw))[2]]
        assert await outcome(warm, *sound) == await outcome(cold, *sound), sound
    assert warm.matches > ROUNDS
    warm.deadlines.close()
    cold.deadlines.close()
