"""What goes on to a replica, and what a client is told that sent something else. Framing: ``corpus/``."""

from __future__ import annotations

import json

import pytest

from routing.schema import Limits
from tests.fakes.replica import FakeReplica
from tests.routing.proxy.harness import BODY, CHAT, Answer, config, get, post, routed

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
    b"/v1/chat/completions/",
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
async def test_a_path_written_otherwise_is_another_path(path: bytes, method: bytes, replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(b"%b %b HTTP/1.1\r\nHost: router\r\nContent-Length: 2\r\n\r\n{}" % (method, path))
        assert (await client.answer()).status == 404
        await client.send(get(b"/health"))
        assert (await client.answer()).status == 200
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
async def test_a_wrong_method_is_told_the_right_ones(
    method: bytes, path: bytes, allowed: str, replica: FakeReplica
) -> None:
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(b"%b %b HTTP/1.1\r\nHost: router\r\nContent-Length: 0\r\n\r\n" % (method, path))
        answer = await client.answer()
    assert (answer.status, answer.headers["allow"]) == (405, allowed)


async def test_trailers_never_become_headers(replica: FakeReplica) -> None:
    trailers = b"0\r\nX-Sneaky: 1\r\nAuthorization: Bearer x\r\n\r\n"
    request = START + HOST + CHUNKED + b"Trailer: X-Sneaky\r\n" + END + CHUNKS.replace(b"0\r\n\r\n", trailers)
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(request)
        assert (await client.answer()).status == 200
        await client.send(post(CHAT))
        assert (await client.answer()).status == 200
    for call in replica.calls:
        assert call.header(b"x-sneaky") == call.header(b"authorization") == call.header(b"trailer") == []


async def test_expect_100_continue_gets_its_go_ahead_before_the_body(replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(START + HOST + LENGTH + b"Expect: 100-continue\r\n" + END)
        assert await client.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(BODY)
        assert (await client.answer()).status == 200
    assert replica.calls[0].header(b"expect") == []


async def test_the_go_ahead_comes_behind_the_answers_to_what_was_asked_before(replica: FakeReplica) -> None:
    before = get(b"/health") * 200  # more than are answered in a turn of the loop
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(before + START + HOST + LENGTH + b"Expect: 100-continue\r\n" + END)
        assert [(await client.answer()).status for _ in range(201)] == [200] * 200 + [100]
        await client.send(BODY)
        assert (await client.answer()).status == 200


async def test_expect_100_continue_with_too_large_a_body_is_refused_without_it(replica: FakeReplica) -> None:
    async with routed(config([replica], limits=LIMITS)) as harness, harness.connect() as client:
        await client.send(START + HOST + b"Content-Length: 99999\r\nExpect: 100-continue\r\n" + END)
        assert (await client.answer()).status == 413


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
async def test_a_body_that_cannot_be_placed_is_refused(body: bytes, param: str | None, replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness:
        answer = await harness.chat(body)
        await harness.at_rest()
    assert (answer.status, answer.error["param"]) == (400, param)
    assert replica.calls == []


async def test_a_refused_client_can_read_the_refusal_while_it_still_sends(replica: FakeReplica) -> None:
    limits = Limits(max_body_bytes=1024)
    async with routed(config([replica], limits=limits)) as harness, harness.connect() as client:
        await client.send(START + HOST + b"Content-Length: 4000000\r\n" + END, b"x" * 1_000_000)
        assert (await client.answer()).status == 413


async def test_an_error_is_openais_error_object(replica: FakeReplica) -> None:
    async with routed(config([replica], models=("tiny",))) as harness:
        answer = await harness.chat(json.dumps({"model": "other", "messages": []}).encode())
    assert answer.status == 404
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert (answer.error["param"], answer.error["code"]) == ("model", 404)


def test_an_answer_reads_its_own_headers() -> None:
    assert Answer(b"HTTP/1.1 200 OK\r\nA: b\r\n\r\n", b"", b"").headers == {"a": "b"}
