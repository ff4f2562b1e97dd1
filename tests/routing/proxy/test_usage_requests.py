"""The router asks engines for the usage of streams, and clients that did not ask see none of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from routing.schema import StreamUsage
from tests.fakes.replica import (
    LAST_CHUNK,
    STREAM_HEAD,
    Call,
    FakeReplica,
    chunk,
    plain_answer,
    sse,
    streaming,
)
from tests.routing.proxy.harness import BODY, Harness, config, post, routed
from tests.routing.proxy.records import told
from tests.routing.proxy.scraped import samples

STREAM = json.dumps({**json.loads(BODY), "stream": True}).encode()
ASKING = json.dumps({**json.loads(STREAM), "stream_options": {"include_usage": True}}).encode()
TOKEN = sse({"choices": [{"index": 0, "delta": {"content": "a"}}]})
USAGE = sse(
    {
        "choices": [],
        "usage": {"prompt_tokens": 50, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 32}},
    }
)
WITHOUT_DETAILS = sse({"choices": [], "usage": {"prompt_tokens": 50, "completion_tokens": 1}})
DONE = sse("[DONE]")
REFUSAL = b"{\"error\":{\"message\":\"[{'type': 'extra_forbidden', 'loc': ('body', 'stream_options')}]\",\"code\":400}}"


async def like_vllm(call: Call) -> None:
    """Report usage where it was asked for."""
    options = json.loads(call.body).get("stream_options") or {}
    events = [TOKEN, *([USAGE] if options.get("include_usage") else []), DONE]
    await call.send(STREAM_HEAD, *map(chunk, events), LAST_CHUNK)


def cached(harness: Harness) -> list[int | None]:
    return [it["cached_tokens"] for it in told(harness.router.services.decisions, 0, 9)["decisions"]]


async def count(harness: Harness, name: str) -> float:
    _, text = await harness.admin("GET", "/metrics")
    return sum(value for _, value in samples(text).get(f"warmpath_router_{name}", []))


async def test_usage_of_a_stream_is_known_though_its_client_did_not_ask(replica: FakeReplica) -> None:
    replica.script = like_vllm
    async with routed(config([replica])) as harness:
        answer = await harness.chat(STREAM)

        assert answer.body == TOKEN + DONE
        assert cached(harness) == [32]
        (call,) = replica.calls
        assert call.body == STREAM[:-1] + b',"stream_options":{"include_usage":true}}'
        assert call.header(b"content-length") == [b"%d" % len(call.body)]


async def test_a_client_that_asked_gets_every_byte(replica: FakeReplica) -> None:
    replica.script = like_vllm
    async with routed(config([replica])) as harness:
        answer = await harness.chat(ASKING)

        assert answer.body == TOKEN + USAGE + DONE
        assert replica.calls[0].body == ASKING
        assert cached(harness) == [32]


async def test_a_pool_may_leave_requests_as_they_were_sent(replica: FakeReplica) -> None:
    replica.script = like_vllm
    async with routed(config([replica], stream_usage=StreamUsage.AS_SENT)) as harness:
        answer = await harness.chat(STREAM)

        assert answer.body == TOKEN + DONE
        assert replica.calls[0].body == STREAM
        assert cached(harness) == [None]


@pytest.mark.parametrize("path", [b"/v1/responses", b"/v1/embeddings"])
async def test_other_endpoints_are_left_alone(replica: FakeReplica, path: bytes) -> None:
    body = b'{"model":"tiny","input":"x","stream":true}'
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(post(path, body))
        await client.answer()

        assert replica.calls[0].body == body


@pytest.mark.parametrize("size", [1, 7, 100])
async def test_the_chunk_is_removed_wherever_reads_end(replica: FakeReplica, size: int) -> None:
    stream = TOKEN * 3 + USAGE + DONE

    async def in_pieces(call: Call) -> None:
        await call.send(STREAM_HEAD, *(chunk(stream[at : at + size]) for at in range(0, len(stream), size)), LAST_CHUNK)

    replica.script = in_pieces
    async with routed(config([replica])) as harness:
        answer = await harness.chat(STREAM)

        assert answer.body == TOKEN * 3 + DONE
        assert cached(harness) == [32]


def as_length(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def until_close(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + body


@pytest.mark.parametrize("framed", [as_length, until_close])
@pytest.mark.parametrize("halves", [True, False])
async def test_a_stream_of_any_framing_stays_readable(
    replica: FakeReplica, framed: Callable[[bytes], bytes], halves: bool
) -> None:
    wire = framed(TOKEN + USAGE + DONE)

    async def script(call: Call) -> None:
        cut = wire.index(TOKEN) + len(TOKEN) if halves else len(wire)
        await call.send(wire[:cut])
        if halves:
            await harness.until(
                lambda: harness.router.balancer.loads.load("replica-0").running, "the first event to arrive"
            )
            await call.send(wire[cut:])
        call.close()

    replica.script = script
    async with routed(config([replica])) as harness:
        answer = await harness.chat(STREAM)

        assert answer.body == TOKEN + DONE
        assert cached(harness) == [32]


async def test_a_compressed_stream_passes_as_it_is(replica: FakeReplica) -> None:
    head = STREAM_HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")
    replica.script = lambda call: call.send(head, chunk(b"\x1f\x8bnot events"), LAST_CHUNK)
    async with routed(config([replica])) as harness:
        assert (await harness.chat(STREAM)).body == b"\x1f\x8bnot events"


async def test_a_stream_that_breaks_off_ends_with_a_whole_error_event(replica: FakeReplica) -> None:
    async def torn(call: Call) -> None:
        await call.send(STREAM_HEAD, chunk(TOKEN), chunk(TOKEN[:10]))
        await harness.until(
            lambda: harness.router.balancer.loads.load("replica-0").running, "the first event to arrive"
        )
        call.reset()

    replica.script = torn
    async with routed(config([replica])) as harness:
        body = (await harness.chat(STREAM)).body

        assert body.startswith(TOKEN + b'data: {"error":')
        assert body.endswith(b"\n\n")


# --- engines that refuse to be asked ------------------------------------------------------------------


def refusing(status: int) -> Callable[[Call], Any]:
    async def script(call: Call) -> None:
        if b"stream_options" in call.body:
            await call.send(plain_answer(REFUSAL, status=status))
        else:
            await call.send(STREAM_HEAD, chunk(TOKEN), chunk(DONE), LAST_CHUNK)

    return script


@pytest.mark.parametrize("status", [400, 422])
async def test_an_engine_that_refuses_gets_the_clients_own_request(replica: FakeReplica, status: int) -> None:
    replica.script = refusing(status)
    async with routed(config([replica])) as harness:
        answers = [await harness.chat(STREAM) for _ in range(3)]

        assert [(it.status, it.body) for it in answers] == [(200, TOKEN + DONE)] * 3
        asked = [b"stream_options" in call.body for call in replica.calls]
        assert asked == [True, False, False, False]  # it is remembered
        assert replica.calls[1].body == STREAM
        assert await count(harness, "requests_total") == 3
        assert not harness.router.balancer.breakers.not_closed


async def test_a_request_that_is_wrong_by_itself_does_not_stop_the_asking(replica: FakeReplica) -> None:
    replica.script = lambda call: call.send(
        plain_answer(b'{"error":{"message":%b}}' % msgspec.json.encode(call.body.decode()), status=400)
    )
    async with routed(config([replica])) as harness:
        answer = await harness.chat(STREAM)
        assert (answer.status, answer.error["message"]) == (400, STREAM.decode())  # without a word of ours

        replica.script = like_vllm
        await harness.chat(STREAM)
        assert cached(harness)[-1] == 32


async def test_an_error_that_is_about_something_else_is_not_sent_again(replica: FakeReplica) -> None:
    replica.script = lambda call: call.send(plain_answer(b'{"error":"max_tokens"}', status=400))
    async with routed(config([replica])) as harness:
        answer = await harness.chat(STREAM)

        assert (answer.status, answer.body, len(replica.calls)) == (400, b'{"error":"max_tokens"}', 1)


# --- what is reported ---------------------------------------------------------------------------------


async def test_usage_without_cached_tokens_is_counted(replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness:
        for usage in (WITHOUT_DETAILS, WITHOUT_DETAILS, USAGE):
            replica.script = streaming(TOKEN, usage, DONE)
            await harness.chat(STREAM)

        assert await count(harness, "usage_without_details_total") == 2
        assert await count(harness, "usage_reported_total") == 1


async def test_embeddings_report_no_cached_tokens_by_nature(replica: FakeReplica) -> None:
    replica.script = lambda call: call.send(plain_answer(b'{"usage":{"prompt_tokens":5,"completion_tokens":0}}'))
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(post(b"/v1/embeddings", b'{"input":"x"}'))
        await client.answer()

        assert await count(harness, "usage_without_details_total") == 0
