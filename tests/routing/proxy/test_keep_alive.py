"""Comments to clients that stream and wait for their first token."""

from __future__ import annotations

import asyncio
import json

import pytest
from msgspec.structs import replace

from routing.schema import Limits, RouterConfig
from tests.fakes.replica import Call, FakeReplica, plain_answer, sse
from tests.routing.proxy.harness import CHAT, config, post, routed

COMMENT = b": keep-alive\n\n"
TOKEN = sse({"choices": [{"index": 0, "delta": {"content": "a"}}]})
DONE = sse("[DONE]")
BODY = {"model": "tiny", "messages": [], "prompt": "x", "input": "x", "max_tokens": 9, "stream": True}


def with_comments(replicas: list[FakeReplica], **limits: float) -> RouterConfig:
    whole = config(replicas, limits=Limits(**limits))
    return replace(whole, pools=(replace(whole.pools[0], keep_alive_s=1.0),))


@pytest.mark.parametrize("path", [CHAT, b"/v1/completions", b"/v1/messages", b"/v1/responses"])
async def test_a_silent_stream_gets_comments_and_may_still_be_retried(two, path):
    released = asyncio.Event()

    async def engine(call: Call) -> None:
        await released.wait()
        if sum(len(replica.calls) for replica in two) == 1:
            call.reset()
        else:
            await call.stream(TOKEN, DONE)

    for replica in two:
        replica.script = engine
    async with routed(with_comments(two)) as harness, harness.connect() as client:
        await client.send(post(path, json.dumps(BODY).encode()))
        head = await client.read_until(b"\r\n\r\n")
        await client.read_until(COMMENT)
        released.set()
        rest = await client.read_until(b"0\r\n\r\n")
        await client.send(post(path, json.dumps(BODY).encode()))  # the connection stays open
        second = await client.read_response()
        await harness.at_rest()
        record, next_record = harness.decisions
    assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n")
    assert record["request_id"].encode() in head
    assert (rest.count(b"HTTP/1.1"), rest.count(TOKEN), rest.count(DONE)) == (0, 1, 1)
    assert (record["retries"], record["outcome"], record["status"]) == (1, "ok", 200)
    assert record["ttft_s"] > 0.9 > next_record["ttft_s"]
    assert (second.body, "x-warmpath-replica" in second.headers) == (TOKEN + DONE, True)


ERROR = plain_answer(b'{"error":{"message":"the prompt is too long"}}', status=400)


@pytest.mark.parametrize("path", [CHAT, b"/v1/messages"])
@pytest.mark.parametrize("is_hung", [True, False])
async def test_an_error_after_the_head_is_an_event(replica, path, is_hung):
    released = asyncio.Event()

    async def engine(call: Call) -> None:
        await released.wait()
        await (call.wait_gone() if is_hung else call.send(ERROR))

    replica.script = engine
    limits = {"first_byte_timeout_s": 1.5}
    async with routed(with_comments([replica], **limits)) as harness, harness.connect() as client:
        await client.send(post(path, json.dumps(BODY).encode()))
        await client.read_until(COMMENT)
        released.set()
        rest = await client.read_all()
        await harness.at_rest()
        (record,) = harness.decisions
    status, kind, text = (504, "replica_error", b"in time") if is_hung else (400, "client_error", b"too long")
    assert text in rest
    assert (b"event: error" in rest) is (path != CHAT)
    assert rest.endswith(b"0\r\n\r\n")
    assert (record["status"], record["outcome"], record["ttft_s"]) == (status, kind, None)


@pytest.mark.parametrize(("path", "is_stream"), [(CHAT, False), (b"/v1/embeddings", True), (b"/tokenize", True)])
async def test_who_gets_no_stream_gets_no_comment(replica, path, is_stream):
    async def slow(call: Call) -> None:
        await asyncio.sleep(1.3)
        await call.send(plain_answer(b"{}"))

    replica.script = slow
    async with routed(with_comments([replica])) as harness:
        response = await harness.send(post(path, json.dumps({**BODY, "stream": is_stream}).encode()))
    assert (response.status, response.body) == (200, b"{}")
