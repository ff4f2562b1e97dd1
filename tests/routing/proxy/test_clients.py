"""Clients that disconnect, pipeline or exceed limits, and requests that the router rejects."""

from __future__ import annotations

import asyncio

import pytest

from routing.schema import Limits
from tests.fakes.replica import STREAM_HEAD, Call, FakeReplica, chunk, hanging, plain_answer, sse
from tests.routing.proxy.harness import BODY, CHAT, RawClient, config, get, post, routed


@pytest.mark.parametrize("has_started", [False, True])
async def test_a_client_that_disconnects_stops_its_replica_at_once(has_started: bool, replica: FakeReplica) -> None:
    async def script(call: Call) -> None:
        if has_started:
            await call.send(STREAM_HEAD, chunk(sse({"n": 1})))
        await call.wait_gone()

    replica.script = script
    async with routed(config([replica])) as harness:
        async with harness.connect() as client:
            await client.send(post(CHAT))
            call = await replica.wait_calls(1)
            if has_started:
                await client.read_until(b"\n\n")
        async with asyncio.timeout(1):
            await call.gone.wait()
        await harness.at_rest()
        _, text = await harness.admin("GET", "/metrics")
        assert 'outcome="cancelled"} 1' in text


async def test_pipelined_requests_are_answered_in_order(two: list[FakeReplica]) -> None:
    async def slow(call: Call) -> None:
        await asyncio.sleep(0.1)
        await call.send(plain_answer(b"slow " + call.body[-3:]))

    async def quick(call: Call) -> None:
        await call.send(plain_answer(b"quick " + call.body[-3:]))

    two[0].script, two[1].script = slow, quick
    bodies = [b'{"prompt":"%d"}' % number for number in range(8)]
    async with routed(config(two)) as harness, harness.connect() as client:
        requests = [post(b"/v1/completions", body) for body in bodies]
        await client.send(b"".join([*requests[:4], get(b"/health"), *requests[4:], get(b"/nowhere")]))
        responses = [await client.read_response() for _ in range(10)]
    assert [response.status for response in responses] == [200] * 9 + [404]
    assert [response.body[-3:] for response in responses[:4] + responses[5:9]] == [body[-3:] for body in bodies]


async def test_a_malformed_request_is_rejected_after_earlier_ones_are_answered(replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(post(CHAT) + post(CHAT) + b"GET / HTTP/1.1\r\n\r\n" + post(CHAT))
        assert [(await client.read_response()).status for _ in range(3)] == [200, 200, 400]
        assert await client.read_all() == b""
    assert len(replica.calls) == 2


async def test_nothing_after_connection_close_is_answered(replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(post(CHAT, headers=[b"Connection: close"]) + post(CHAT))
        response = await client.read_response()
        assert (response.status, response.headers["connection"]) == (200, "close")
        assert await client.read_all() == b""
    assert len(replica.calls) == 1


async def test_connections_are_limited_by_address(replica: FakeReplica) -> None:
    limits = Limits(max_connections_per_address=3)
    async with routed(config([replica])) as harness, harness.connect() as before:
        await before.send(post(CHAT))
        assert (await before.read_response()).status == 200
        await harness.push(config([replica], limits=limits), 2)
        async with harness.connect() as second, harness.connect() as third:
            await harness.until(lambda: len(harness.router.clients) == 3, "three connections")
            async with harness.connect() as fourth:
                assert await fourth.read_all() == b"", "and those who were there count too"
            reader, writer = await asyncio.open_connection("127.0.0.1", harness.port, local_addr=("127.0.0.2", 0))
            for client in (before, second, third, RawClient(reader, writer)):
                await client.send(post(CHAT))
                assert (await client.read_response()).status == 200
            writer.close()
        await harness.until(lambda: len(harness.router.clients) == 1, "two of them to end")
        async with harness.connect() as again:
            await again.send(post(CHAT))
            assert (await again.read_response()).status == 200
        _, text = await harness.admin("GET", "/metrics")
        assert 'connections_closed_total{reason="limit"} 1\n' in text
        await harness.push(config([replica]), 3)
        assert len(harness.router.connection_limit) == 0
        async with harness.connect(), harness.connect(), harness.connect(), harness.connect():
            await harness.until(lambda: len(harness.router.clients) == 5, "as many as like")


async def test_requests_over_the_limit_get_503_with_retry_after(replica: FakeReplica) -> None:
    replica.script = hanging
    async with routed(config([replica], limits=Limits(max_in_flight=2))) as harness:
        async with harness.connect() as first, harness.connect() as second, harness.connect() as third:
            await first.send(post(CHAT))
            await second.send(post(CHAT))
            await replica.wait_calls(2)
            await third.send(post(CHAT))
            response = await third.read_response()
            assert (response.status, response.headers["retry-after"]) == (503, "1")
        await harness.at_rest()


LENGTH = b"Content-Length: %d\r\n" % len(BODY)
START = b"POST /v1/chat/completions HTTP/1.1\r\n"
HOST = b"Host: router\r\n"
END = b"\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
ELSEWHERE = [
    b"/",
    b"*",
    b"/v1",
    b"/v1/",
    b"/v1/chat/completions//",
    b"//v1/chat/completions",
    b"/v1//chat/completions",
    b"/V1/chat/completions",
    b"/v1/chat/completions;a",
    b"/v1/chat/%63ompletions",
    b"/v1/chat/completions%2e",
    b"/v1/../v1/chat/completions",
    b"/v1/./chat/completions",
    b"/v1/x/%2e%2e/chat/completions",
]
LIMITS = Limits(max_header_bytes=4096, max_body_bytes=32_768, header_timeout_s=0.3, body_idle_timeout_s=0.3)


@pytest.mark.parametrize("path", ELSEWHERE)
@pytest.mark.parametrize("method", [b"POST", b"GET"])
async def test_differently_written_paths_get_404(path: bytes, method: bytes, replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(b"%b %b HTTP/1.1\r\nHost: router\r\nContent-Length: 2\r\n\r\n{}" % (method, path))
        assert (await client.read_response()).status == 404
        await client.send(get(b"/health"))
        assert (await client.read_response()).status == 200
    assert replica.calls == []


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        (b"GET", CHAT, "POST"),
        (b"PUT", b"/v1/completions", "POST"),
        (b"OPTIONS", b"/v1/embeddings", "POST"),
        (b"DELETE", b"/v1/models", "GET, HEAD"),
        (b"POST", b"/health", "GET, HEAD"),
    ],
)
async def test_a_wrong_method_gets_405_with_allow(
    method: bytes, path: bytes, allowed: str, replica: FakeReplica
) -> None:
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(b"%b %b HTTP/1.1\r\nHost: router\r\nContent-Length: 0\r\n\r\n" % (method, path))
        response = await client.read_response()
    assert (response.status, response.headers["allow"]) == (405, allowed)


async def test_trailers_never_become_headers(replica: FakeReplica) -> None:
    trailers = b"0\r\nX-Sneaky: 1\r\nAuthorization: Bearer x\r\n\r\n"
    request = START + HOST + CHUNKED + b"Trailer: X-Sneaky\r\n" + END + CHUNKS.replace(b"0\r\n\r\n", trailers)
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(request)
        assert (await client.read_response()).status == 200
        await client.send(post(CHAT))
        assert (await client.read_response()).status == 200
    for call in replica.calls:
        assert call.header(b"x-sneaky") == call.header(b"authorization") == call.header(b"trailer") == []


async def test_expect_100_continue_is_answered_before_the_body(replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(START + HOST + LENGTH + b"Expect: 100-continue\r\n" + END)
        assert await client.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(BODY)
        assert (await client.read_response()).status == 200
    assert replica.calls[0].header(b"expect") == []


async def test_the_100_continue_follows_the_responses_to_earlier_requests(replica: FakeReplica) -> None:
    before = get(b"/health") * 200  # more than are answered in one iteration
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(before + START + HOST + LENGTH + b"Expect: 100-continue\r\n" + END)
        assert [(await client.read_response()).status for _ in range(201)] == [200] * 200 + [100]
        await client.send(BODY)
        assert (await client.read_response()).status == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b'{"model":1}', "model"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, None),
        (b'{"a":' * 200_000, None),
        (b"\xff", None),
    ],
)
async def test_a_body_that_cannot_be_placed_is_rejected(body: bytes, param: str | None, replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness:
        response = await harness.chat(body)
        await harness.at_rest()
    assert (response.status, response.error["param"]) == (400, param)
    assert replica.calls == []


async def test_a_rejected_client_can_read_the_rejection_while_it_sends(replica: FakeReplica) -> None:
    limits = Limits(max_body_bytes=1024)
    async with routed(config([replica], limits=limits)) as harness, harness.connect() as client:
        await client.send(START + HOST + b"Content-Length: 4000000\r\n" + END, b"x" * 1_000_000)
        assert (await client.read_response()).status == 413
