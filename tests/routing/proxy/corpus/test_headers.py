"""Which headers are forwarded to a replica and to a client."""

from __future__ import annotations

import pytest

from tests.fakes.replica import FakeReplica, answering
from tests.routing.proxy.harness import config, routed

OURS = {b"accept-encoding", b"host", b"content-length", b"x-request-id"}
HOP_BY_HOP = (
    *(b"Keep-Alive: 5", b"TE: trailers", b"Trailer: X-A", b"Proxy-Authorization: x", b"Proxy-Authenticate: Basic"),
    *(b"Proxy-Connection: keep-alive", b"Upgrade: x"),
)
FOR_TRUSTED_HOPS = (
    *(b"Forwarded: for=x", b"X-Real-IP: 1.2.3.4", b"X-Forwarded-For: 1.2.3.4", b"X-Forwarded-Host: a"),
    *(b"X-Forwarded-Proto: https", b"X-Forwarded-Prefix: /admin", b"X-Forwarded-: x", b"X-User-Id: 1", b"X-User-: x"),
    *(b"X-User-Role: admin", b"X-Warmpath-Replica: other", b"X-Warmpath-Anything: x", b"X-Warmpath-: x"),
)
END_TO_END = (
    *(b"Authorization: Bearer key", b"Cookie: a=b", b"X-Session-ID: s", b"X-Task-Group: g", b"Accept: */*"),
    *(b"X-Forward: x", b"X-Users: x", b"X-Warm: x", b"X_Session_Id: s", b"Traceparent: 00-a-b-01"),
)


def name_of(line: bytes) -> bytes:
    return line.partition(b":")[0].lower()


async def forwarded_names(replica: FakeReplica, *lines: bytes) -> set[bytes]:
    """The names of the headers that a replica gets, except the router's own."""
    async with routed(config([replica])) as harness:
        assert (await harness.chat(headers=lines)).status == 200
    return {name for name, _ in replica.calls[-1].headers} - OURS


@pytest.mark.parametrize("spelling", [bytes, bytes.lower, bytes.upper, lambda line: line.replace(b"-", b"_")])
async def test_hop_by_hop_and_trusted_headers_are_not_forwarded(spelling, replica):
    names = [
        spelling(line.partition(b":")[0]) + b":" + line.partition(b":")[2] for line in HOP_BY_HOP + FOR_TRUSTED_HOPS
    ]
    assert await forwarded_names(replica, *names) == set()


async def test_end_to_end_headers_are_forwarded_unchanged(replica):
    assert await forwarded_names(replica, *END_TO_END) == set(map(name_of, END_TO_END))
    for line in END_TO_END:
        assert replica.calls[0].header(name_of(line)) == [line.partition(b": ")[2]]


@pytest.mark.parametrize("name", [b"Content_Length: 3", b"Transfer_Encoding: chunked", b"Host_: a", b"Expect_: x"])
async def test_header_names_with_underscores_are_not_framing(name, replica):
    assert await forwarded_names(replica, name) <= {b"host_", b"expect_"}


NAMED = (
    *(b"X-A", b"x-a", b" X-A ", b"keep-alive, X-A", b"X-A,", b",,X-A", b"X-A ,close-not", b"X-A\t", b"X-B, X-A"),
    b"keep-alive,x-A,X-b",
)


@pytest.mark.parametrize("connection", NAMED)
async def test_headers_named_by_connection_are_not_forwarded(connection, replica):
    lines = (b"X-A: 1", b"x-a: 2", b"Connection: " + connection, b"X-A: 3", b"X-AB: 4")
    assert await forwarded_names(replica, *lines) == {b"x-ab"}


async def test_connection_cannot_remove_the_routers_headers(replica):
    connection_line = b"Connection: host, content-length, x-request-id, transfer-encoding"
    assert await forwarded_names(replica, connection_line) == set()
    (call,) = replica.calls
    assert all(len(call.header(name)) == 1 for name in OURS)


@pytest.mark.parametrize("spelling", [bytes, bytes.lower, bytes.upper])
async def test_hop_by_hop_headers_of_a_response_are_not_forwarded(spelling, replica):
    stays = (*HOP_BY_HOP, b"X-Named: 1", b"Connection: keep-alive, X-Named", b"X-Request-Id: theirs")
    stays += (b"X-Warmpath-Replica: theirs", b"X-Warmpath-Reason: theirs", b"X-Warmpath-: theirs")
    goes = (b"Server: uvicorn", b"Set-Cookie: a=b", b"Set-Cookie: c=d", b"X-Warm: x")
    extra = b"".join(spelling(name_of(line)) + b":" + line.partition(b":")[2] + b"\r\n" for line in (*stays, *goes))
    replica.script = answering(extra=extra)
    async with routed(config([replica])) as harness:
        for _ in range(2):  # a parsed head, then a cached one
            response = await harness.chat(headers=[b"X-Request-Id: mine"])
            added = {"content-type", "content-length", "x-request-id", "x-warmpath-replica", "x-warmpath-reason"}
            assert set(response.headers) == added | {name_of(line).decode() for line in goes}
            assert (response.headers["x-request-id"], response.replica) == ("mine", "replica-0")
            assert response.head.lower().count(b"set-cookie: ") == 2
            assert b"theirs" not in response.head


@pytest.mark.parametrize(
    ("request_id", "is_forwarded"),
    [
        *((value, True) for value in (b"my-id_1.2", b"a", b"A" * 64, b"...", b"0")),
        *(
            (value, False)
            for value in (b"a" * 65, b"a b", b"a/b", b"", b"\xe9", b"a\tb", b'"a"', b"a;b", b"a,b", b"{}")
        ),
        *((value, False) for value in (b"<script>", b"a%0d%0ab", b"a:b", b"$(id)", b"a\\b", b"\xd9\xa1")),
    ],
)
async def test_request_ids_are_forwarded_only_if_harmless(request_id, is_forwarded, replica):
    async with routed(config([replica])) as harness:
        response = await harness.chat(headers=[b"X-Request-Id: " + request_id])
    (sent,) = replica.calls[0].header(b"x-request-id")
    assert response.headers["x-request-id"] == sent.decode()
    assert (sent == request_id) is is_forwarded
    assert 1 <= len(sent) <= 64
