"""Which headers go on, to a replica and back to a client."""

from __future__ import annotations

import pytest

from tests.fakes.replica import FakeReplica, answering
from tests.routing.proxy.harness import config, routed

OURS = {b"host", b"content-length", b"x-request-id"}
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


async def sent_on(replica: FakeReplica, *lines: bytes) -> set[bytes]:
    """The names of the headers that a replica gets, beside our own."""
    async with routed(config([replica])) as harness:
        assert (await harness.chat(headers=lines)).status == 200
    return {name for name, _ in replica.calls[-1].headers} - OURS


@pytest.mark.parametrize("spelt", [bytes, bytes.lower, bytes.upper, lambda line: line.replace(b"-", b"_")])
async def test_what_is_for_this_hop_or_for_trusted_ones_stays_here(spelt, replica: FakeReplica) -> None:
    names = [spelt(line.partition(b":")[0]) + b":" + line.partition(b":")[2] for line in HOP_BY_HOP + FOR_TRUSTED_HOPS]
    assert await sent_on(replica, *names) == set()


async def test_the_rest_goes_on_as_it_came(replica: FakeReplica) -> None:
    assert await sent_on(replica, *END_TO_END) == set(map(name_of, END_TO_END))
    for line in END_TO_END:
        assert replica.calls[0].header(name_of(line)) == [line.partition(b": ")[2]]


@pytest.mark.parametrize("name", [b"Content_Length: 3", b"Transfer_Encoding: chunked", b"Host_: a", b"Expect_: x"])
async def test_a_name_that_looks_like_framing_is_none(name: bytes, replica: FakeReplica) -> None:
    assert await sent_on(replica, name) <= {b"host_", b"expect_"}


NAMED = (
    *(b"X-A", b"x-a", b" X-A ", b"keep-alive, X-A", b"X-A,", b",,X-A", b"X-A ,close-not", b"X-A\t", b"X-B, X-A"),
    b"keep-alive,x-A,X-b",
)


@pytest.mark.parametrize("named", NAMED)
async def test_what_connection_names_stays_here(named: bytes, replica: FakeReplica) -> None:
    lines = (b"X-A: 1", b"x-a: 2", b"Connection: " + named, b"X-A: 3", b"X-AB: 4")
    assert await sent_on(replica, *lines) == {b"x-ab"}


async def test_every_connection_header_counts(replica: FakeReplica) -> None:
    lines = (b"Connection: X-A", b"X-A: 1", b"X-B: 2", b"connection: X-B", b"X-C: 3")
    assert await sent_on(replica, *lines) == {b"x-c"}


async def test_connection_cannot_take_away_what_is_ours(replica: FakeReplica) -> None:
    ours = b"Connection: host, content-length, x-request-id, transfer-encoding"
    assert await sent_on(replica, ours) == set()
    (call,) = replica.calls
    assert all(len(call.header(name)) == 1 for name in OURS)


@pytest.mark.parametrize("spelt", [bytes, bytes.lower, bytes.upper])
async def test_what_an_answer_says_to_this_hop_stays_here(spelt, replica: FakeReplica) -> None:
    stays = (*HOP_BY_HOP, b"X-Named: 1", b"Connection: keep-alive, X-Named", b"X-Request-Id: theirs")
    stays += (b"X-Warmpath-Replica: theirs", b"X-Warmpath-Reason: theirs", b"X-Warmpath-: theirs")
    goes = (b"Server: uvicorn", b"Set-Cookie: a=b", b"Set-Cookie: c=d", b"X-Warm: x")
    extra = b"".join(spelt(name_of(line)) + b":" + line.partition(b":")[2] + b"\r\n" for line in (*stays, *goes))
    replica.script = answering(extra=extra)
    async with routed(config([replica])) as harness:
        for _ in range(2):  # a head read, and the same one remembered
            answer = await harness.chat(headers=[b"X-Request-Id: mine"])
            known = {"content-type", "content-length", "x-request-id", "x-warmpath-replica", "x-warmpath-reason"}
            assert set(answer.headers) == known | {name_of(line).decode() for line in goes}
            assert (answer.headers["x-request-id"], answer.replica) == ("mine", "replica-0")
            assert answer.head.lower().count(b"set-cookie: ") == 2
            assert b"theirs" not in answer.head


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        *((value, True) for value in (b"my-id_1.2", b"a", b"A" * 64, b"...", b"0")),
        *(
            (value, False)
            for value in (b"a" * 65, b"a b", b"a/b", b"", b"\xe9", b"a\tb", b'"a"', b"a;b", b"a,b", b"{}")
        ),
        *((value, False) for value in (b"<script>", b"a%0d%0ab", b"a:b", b"$(id)", b"a\\b", b"\xd9\xa1")),
    ],
)
async def test_a_request_id_is_kept_if_it_is_harmless(given: bytes, kept: bool, replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness:
        answer = await harness.chat(headers=[b"X-Request-Id: " + given])
    (sent,) = replica.calls[0].header(b"x-request-id")
    assert answer.headers["x-request-id"] == sent.decode()
    assert (sent == given) is kept
    assert 1 <= len(sent) <= 64
