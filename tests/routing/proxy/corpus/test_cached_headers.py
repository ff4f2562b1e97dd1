"""A router that remembers heads takes hostile ones as a router does that reads every head anew."""

from __future__ import annotations

import random

import pytest

from routing.http.headers import VARYING_REQUEST_HEADERS, CachedHead, HeaderCache
from routing.http.request import Request, RequestHead
from routing.http.response import LocalResponse
from routing.proxy.client_connection import ClientConnection
from tests.routing.proxy.corpus.damage import ROUNDS, damaged
from tests.routing.proxy.corpus.listening import Listening, outcome
from tests.routing.proxy.corpus.requests import MAX_HEADER_BYTES

pytestmark = pytest.mark.plain_python(reason="Their router is of a class of their own.")

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


class Hearing(Listening):
    """A router that also keeps what it found out about a head, and counts the heads that it recognised."""

    recognised = 0

    def request(self, head: RequestHead, body: bytes, values: list[bytes] | None = None) -> Request:
        self.recognised += values is not None
        return super().request(head, body, values)

    def open(self, client: ClientConnection, request: Request) -> LocalResponse:
        answer = super().open(client, request)
        head = request.head
        given = "" if request.request_id.startswith(self.boot) else request.request_id
        lines = head.lines_with(request.values, anonymous=True)
        self.heard[-1] += (given, lines, head.authorization, head.session_id, head.task_group)
        return answer


class Forgetful(HeaderCache[RequestHead]):
    """Heads of which none is ever recognised."""

    def find(self, data: bytes, latest: CachedHead[RequestHead] | None = None) -> None:  # noqa: ARG002 - its signature
        return None


def variants(chance: random.Random) -> list[bytes]:
    """A few requests whose headers are alike, with values that differ."""
    starts = [chance.choice(NAMES) + chance.choice(GAPS) for _ in range(chance.randrange(1, 4))]
    others = chance.sample(OTHERS, chance.choice((0, 0, 1, 2)))
    where = chance.randrange(len(starts) + 2)
    length = chance.choice((*(b"Content-Length: 7",) * 5, b"content-length:7", b"Content-Length: 07"))
    requests = []
    for _ in range(6):
        values = [chance.choice(VALUES if chance.random() < 0.3 else SOUND) for _ in starts]
        lines = [b"Host: router", *(start + value for start, value in zip(starts, values, strict=True)), length]
        lines[where:where] = others
        raw = b"POST /v1/completions HTTP/1.1\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + BODY
        requests.append(damaged(raw, chance) if chance.random() < 0.1 else raw)
    return requests


@pytest.mark.parametrize("seed", range(10))
async def test_what_is_recognised_is_what_would_be_read(seed: int) -> None:
    chance, warm, cold = random.Random(seed), Hearing(), Hearing()
    warm.request_head_cache.reset(MAX_HEADER_BYTES)
    cold.request_head_cache = Forgetful(VARYING_REQUEST_HEADERS)
    for _ in range(ROUNDS):
        together = variants(chance)
        for raw in together:
            assert await outcome(warm, raw) == await outcome(cold, raw), raw
        # On one connection, where the layout of the latest is tried first.
        sound = [raw for raw in together if (await outcome(cold, raw))[2]]
        assert await outcome(warm, *sound) == await outcome(cold, *sound), sound
    assert warm.recognised > ROUNDS
    warm.deadlines.close()
    cold.deadlines.close()
