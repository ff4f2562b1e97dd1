"""Streamed responses: time to first token, and usage that the router requests for clients that do not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from routing.http.usage import MAX_PRELUDE_BYTES
from routing.schema import ConcurrencyConfig, Limits, LowestCostSettings, RouterConfig, StreamUsage
from routing.types import ReplicaId
from tests.fakes.replica import (
    LAST_CHUNK,
    STREAM_HEAD,
    Call,
    FakeReplica,
    answering,
    chunk,
    plain_answer,
    sse,
    streaming,
)
from tests.routing.proxy.harness import BODY, CHAT, DEADLINE_S, Harness, config, post, routed, samples

STREAM = json.dumps({**json.loads(BODY), "stream": True}).encode()
USAGE = b'{"choices":[],"usage":{"prompt_tokens":4310,"prompt_tokens_details":{"cached_tokens":16}}}'
EVENT = b"data: " + USAGE + b"\n\n"
LONG = {"model": "tiny", "messages": [{"role": "user", "content": "Say something. " * 2000}]}
CREATED = b'event: response.created\ndata: {"type":"response.created","response":{"instructions":"\\"type\\""}}\n\n'
IN_PROGRESS = b'event: response.in_progress\ndata: {"type":"response.in_progress"}\n\n'
DELTA = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"x"}\n\n'


async def counts(harness: Harness, name: str) -> dict[str, float]:
    """Observations of a histogram, by the kind of response."""
    _, text = await harness.admin("GET", "/metrics")
    return {labels.get("response", ""): n for labels, n in samples(text).get(f"warmpath_router_{name}_count", [])}


async def test_a_plain_response_has_a_latency_and_no_ttft(replica):
    replica.script = answering(USAGE)
    async with routed(config([replica])) as harness:
        await harness.chat()
        (decision,) = harness.decisions

        assert (decision["streamed"], decision["ttft_s"]) == (False, None)
        assert decision["latency_s"] is not None
        assert await counts(harness, "latency_seconds") == {"plain": 1}
        assert await counts(harness, "ttft_seconds") == await counts(harness, "reuse_ttft_seconds") == {}


async def test_a_streamed_response_has_both(replica):
    released = asyncio.Event()

    async def slow(call: Call) -> None:
        await call.begin_stream(b"data: {}\n\n")
        await released.wait()
        await call.end_stream(EVENT)

    replica.script = slow
    async with routed(config([replica])) as harness:
        task = asyncio.create_task(harness.chat(STREAM))
        load = harness.loads.load("replica-0")
        await harness.until(lambda: load.running and not load.waiting, "the first token")
        later = asyncio.get_running_loop().call_later(0.1, released.set)
        await task
        (decision,) = harness.decisions
        later.cancel()

        assert decision["streamed"] is True
        assert decision["latency_s"] >= decision["ttft_s"] + 0.09  # a timer may be early by the loop's resolution
        assert await counts(harness, "latency_seconds") == {"streamed": 1}
        assert await counts(harness, "ttft_seconds") == await counts(harness, "reuse_ttft_seconds") == {"": 1}


async def test_prefill_rates_are_learned_from_streamed_responses_only(replica):
    async with routed(config([replica], settings=LowestCostSettings())) as harness:
        prefill = harness.loads.load("replica-0").prefill
        replica.script = answering(USAGE)
        await harness.chat(json.dumps(LONG).encode())
        assert prefill.samples == 0

        replica.script = streaming(EVENT)
        await harness.chat(json.dumps({**LONG, "stream": True}).encode())
        assert prefill.samples == 1


async def test_a_prefill_rate_is_without_the_wait_in_the_admission_queue(replica):
    async def engine(call: Call) -> None:
        await asyncio.sleep(0.1)
        await call.stream(delta(content="x"), EVENT)

    replica.script = engine
    queue, body = ConcurrencyConfig(max_running=1), json.dumps({**LONG, "stream": True}).encode()
    async with routed(config([replica], settings=LowestCostSettings(), concurrency=queue)) as harness:
        await asyncio.gather(*(harness.chat(body) for _ in range(4)))
        mean_ttft_s = sum(record["ttft_s"] for record in harness.decisions) / 4  # 1, 2, 3 and 4 times the engine's
        prefill = harness.loads.load("replica-0").prefill

    assert prefill.samples == 4
    assert prefill.tokens_per_s > 1.5 * 4294 / mean_ttft_s


async def test_a_prefill_rate_is_learned_from_a_retry_without_the_failed_attempt(two):
    async def fails_once(call: Call) -> None:
        if len(two[0].calls) + len(two[1].calls) == 1:
            await asyncio.sleep(0.3)
            call.reset()
        else:
            await streaming(delta(content="x"), EVENT)(call)

    two[0].script = two[1].script = fails_once
    async with routed(config(two)) as harness:
        response = await harness.chat(json.dumps({**LONG, "stream": True}).encode())
        (decision,) = harness.decisions
        prefill = harness.loads.load(response.replica).prefill

    assert (decision["retries"], prefill.samples) == (1, 1)
    assert decision["ttft_s"] >= 0.3
    assert prefill.tokens_per_s > 1.5 * 4294 / decision["ttft_s"]


def usage_event(prompt: int, cached: int | None) -> bytes:
    details = None if cached is None else {"cached_tokens": cached}
    usage = {"prompt_tokens": prompt, "completion_tokens": 5, "prompt_tokens_details": details}
    return sse({"choices": [], "usage": usage})


async def test_missing_details_are_zero_once_a_replica_has_sent_some(replica):
    async with routed(config([replica])) as harness:
        for cached in (None, 500, None, None, 1001):
            replica.script = streaming(delta(content="x"), usage_event(1000, cached))
            await harness.chat(STREAM)
        _, text = await harness.admin("GET", "/metrics")
        # More than the prompt has is no figure, and not 0 either.
        assert [record["cached_tokens"] for record in harness.decisions] == [None, 500, 0, 0, None]
        counted = samples(text)
        assert counted["warmpath_router_usage_without_details_total"][0][1] == 1
        assert counted["warmpath_router_cached_tokens_total"][0][1] == 500
        assert counted["warmpath_router_prompt_tokens_total"][0][1] == 3000

        harness.router.balancer.begin_slow_start(ReplicaId("replica-0"))  # it has returned, perhaps with other options
        await harness.chat(STREAM)
        assert harness.decisions[-1]["cached_tokens"] is None


async def test_details_of_the_responses_api_say_nothing_about_those_of_chats(replica):
    usage = {"input_tokens": 1000, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 0}}
    async with routed(config([replica])) as harness:
        replica.script = streaming(DELTA, sse({"type": "response.completed", "response": {"usage": usage}}))
        await harness.send(post(b"/v1/responses", json.dumps({"input": "x", "stream": True}).encode()))
        replica.script = streaming(delta(content="x"), usage_event(1000, None))
        await harness.chat(STREAM)

        assert [record["cached_tokens"] for record in harness.decisions] == [0, None]


ENDS = [
    (CHAT, sse("[DONE]")),
    (b"/v1/completions", sse("[DONE]")),
    (b"/v1/messages", sse({"type": "message_stop"})),
    (b"/v1/responses", sse({"response": {"usage": {"input_tokens": 4310}}, "type": "response.completed"})),
]


@pytest.mark.parametrize(("path", "end"), ENDS)
async def test_a_client_that_closes_after_the_last_event_has_a_complete_response(replica, path, end):
    async def engine(call: Call) -> None:
        await call.begin_stream(delta(content="x"), EVENT, end)
        await call.wait_gone()  # the last chunk never comes

    replica.script = engine
    messages = [{"role": "user", "content": "x"}]
    body = json.dumps({"prompt": "x", "input": "x", "messages": messages, "max_tokens": 9, "stream": True}).encode()
    async with routed(config([replica])) as harness:
        async with harness.connect() as client:
            await client.send(post(path, body))
            await client.read_until(end)
        await harness.at_rest()
        (decision,) = harness.decisions
        _, text = await harness.admin("GET", "/metrics")

    assert 'outcome="ok"} 1' in text
    assert 'outcome="cancelled"' not in text
    assert decision["prompt_tokens"] == 4310
    assert decision["latency_s"] is not None


async def test_a_client_that_closes_before_the_last_event_has_cancelled(replica):
    async def engine(call: Call) -> None:
        await call.begin_stream(delta(content="data: [DONE]"), EVENT)
        await call.wait_gone()

    replica.script = engine
    async with routed(config([replica])) as harness:
        async with harness.connect() as client:
            await client.send(post(CHAT, STREAM))
            await client.read_until(b"data: [DONE]")
        await harness.at_rest()
        _, text = await harness.admin("GET", "/metrics")

    assert 'outcome="cancelled"} 1' in text


async def test_embeddings_never_have_a_first_token(replica):
    replica.script = answering(USAGE)
    body = json.dumps({"model": "tiny", "input": "A text.", "stream": True}).encode()
    async with routed(config([replica])) as harness:
        await harness.send(post(b"/v1/embeddings", body))

        assert await counts(harness, "latency_seconds") == {"plain": 1}
        assert await counts(harness, "ttft_seconds") == {}


COMMENT = b": keep-alive\n\n"
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
STARTED = (
    b'event: message_start\ndata: {"type":"message_start","message":{"content":[],"usage":{"output_tokens":0}}}\n\n'
)


def block(kind: str, **fields: Any) -> bytes:
    """The start of a content block."""
    return sse({"type": "content_block_start", "content_block": {"type": kind, **fields}, "index": 0})


def delta(**fields: Any) -> bytes:
    """One event of a chat."""
    return sse({"choices": [{"index": 0, "delta": fields, "logprobs": None, "finish_reason": None}]})


def item(kind: str) -> bytes:
    """An output item of the responses API."""
    return sse({"type": "response.output_item.added", "item": {"type": kind, "status": "in_progress"}})


ROLE = delta(role="assistant", content="")
EMPTY_TEXT = sse({"choices": [{"index": 0, "text": "", "finish_reason": None}]})
PRELUDES = [
    (CHAT, [COMMENT], delta(content="x")),
    (CHAT, [ROLE], delta(content="x")),
    (CHAT, [COMMENT + COMMENT, b"\n\n", ROLE, COMMENT], delta(reasoning="x")),
    (CHAT, [delta(role="assistant", content=None, tool_calls=None)], delta(reasoning_content="x")),
    (CHAT, [ROLE], delta(tool_calls=[{"index": 0, "function": {"name": "f", "arguments": ""}}])),
    (CHAT, [sse({"choices": [], "prompt_filter_results": []}), ROLE], delta(refusal="x")),
    (CHAT, [ROLE], sse({"choices": [{"delta": {"content": ""}, "token_ids": [5], "finish_reason": None}]})),
    (CHAT, [ROLE], sse({"choices": [{"delta": {"content": ""}, "finish_reason": "stop"}]})),
    (b"/v1/completions", [COMMENT, EMPTY_TEXT], sse({"choices": [{"index": 0, "text": "x"}]})),
    (b"/v1/messages", [PING, STARTED, block("text", text="")], sse({"type": "content_block_delta"})),
    (b"/v1/messages", [STARTED, block("thinking", thinking="")], sse({"type": "content_block_delta"})),
    (b"/v1/messages", [STARTED], block("tool_use", name="f", input={})),
    (b"/v1/responses", [CREATED, IN_PROGRESS], DELTA),
    (b"/v1/responses", [CREATED + IN_PROGRESS, item("reasoning"), item("message")], DELTA),
    (b"/v1/responses", [CREATED, COMMENT], item("function_call")),
]


@pytest.mark.parametrize(("path", "prelude", "token"), PRELUDES)
@pytest.mark.parametrize("piece_bytes", [None, 7])
async def test_the_ttft_ends_at_the_first_token(replica, path, prelude, token, piece_bytes):
    released = asyncio.Event()
    if piece_bytes is not None:
        whole = b"".join(prelude)
        prelude = [whole[at : at + piece_bytes] for at in range(0, len(whole), piece_bytes)]

    async def slow(call: Call) -> None:
        await call.begin_stream()
        for events in prelude:
            await call.send(chunk(events))
        await released.wait()
        await call.end_stream(token, COMMENT)

    replica.script = slow
    body = json.dumps({"model": "tiny", "input": "x", "prompt": "x", "messages": [], "stream": True}).encode()
    async with routed(config([replica])) as harness, harness.connect() as client, asyncio.timeout(DEADLINE_S):
        await client.send(post(path, body))
        call = await replica.wait_calls(1)
        later = asyncio.get_running_loop().call_later(0.1, released.set)
        response = await client.read_response()
        later.cancel()
        await harness.at_rest()
        (decision,) = harness.decisions

        assert response.body == b"".join(prelude) + token + COMMENT
        assert 0.09 <= decision["ttft_s"] <= decision["latency_s"]  # a timer may be early by the loop's resolution
        assert await counts(harness, "ttft_seconds") == {"": 1}
        assert call.header(b"accept-encoding") == [b"identity"]


async def test_a_stream_without_a_token_has_no_ttft(replica):
    async with routed(config([replica])) as harness:
        for events in ([COMMENT, ROLE], [sse({"error": {"message": "EngineCore died", "code": 500}})]):
            replica.script = streaming(*events)
            assert (await harness.chat(STREAM)).body == b"".join(events)

        assert [record["ttft_s"] for record in harness.decisions] == [None, None]
        assert await counts(harness, "ttft_seconds") == {}


async def test_a_long_prelude_is_relayed_before_the_first_token(replica):
    created = sse({"type": "response.created", "response": {"instructions": "x" * MAX_PRELUDE_BYTES}})

    async def slow(call: Call) -> None:
        await call.begin_stream(created)
        await call.wait_gone()

    replica.script = slow
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(post(b"/v1/responses", json.dumps({"input": "x", "stream": True}).encode()))
        await client.read_until(created[-64:])


async def test_a_waiting_plain_request_counts_as_prefilled_at_a_later_first_token(replica):
    released = asyncio.Event()

    async def engine(call: Call) -> None:
        if json.loads(call.body).get("stream"):
            await call.stream(EVENT)
        else:
            await released.wait()
            await answering(USAGE)(call)

    replica.script = engine
    async with routed(config([replica])) as harness:
        load = harness.loads.load("replica-0")
        load.prefill.learn(1000, 10.0)  # 100 tokens/s: it is not done by estimate
        plain = asyncio.create_task(harness.chat(json.dumps(LONG).encode()))
        await replica.wait_calls(1)
        assert load.waiting_tokens > 5000

        await harness.chat(STREAM)
        assert (load.running, load.waiting_tokens) == (1, 0)
        released.set()
        await plain
        await harness.at_rest()


TOKEN = sse({"choices": [{"index": 0, "delta": {"content": "a"}}]})
USAGE_USAGE_REQUESTS = sse(
    {
        "choices": [],
        "usage": {"prompt_tokens": 50, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 32}},
    }
)
DONE = sse("[DONE]")
REFUSAL = b"{\"error\":{\"message\":\"[{'type': 'extra_forbidden', 'loc': ('body', 'stream_options')}]\",\"code\":400}}"


async def like_vllm(call: Call) -> None:
    """Report usage if it is requested."""
    options = json.loads(call.body).get("stream_options") or {}
    events = [TOKEN, *([USAGE_USAGE_REQUESTS] if options.get("include_usage") else []), DONE]
    await call.stream(*events)


async def count(harness: Harness, name: str) -> float:
    _, text = await harness.admin("GET", "/metrics")
    return sum(value for _, value in samples(text).get(f"warmpath_router_{name}", []))


async def test_usage_of_a_stream_is_known_if_the_client_did_not_ask(replica):
    replica.script = like_vllm
    async with routed(config([replica])) as harness:
        response = await harness.chat(STREAM)

        assert response.body == TOKEN + DONE
        assert [it["cached_tokens"] for it in harness.decisions] == [32]
        (call,) = replica.calls
        assert call.body == STREAM[:-1] + b',"stream_options":{"include_usage":true}}'
        assert call.header(b"content-length") == [b"%d" % len(call.body)]


async def test_a_pool_may_leave_requests_unmodified(replica):
    replica.script = like_vllm
    async with routed(config([replica], stream_usage=StreamUsage.AS_SENT)) as harness:
        response = await harness.chat(STREAM)

        assert response.body == TOKEN + DONE
        assert replica.calls[0].body == STREAM
        assert [it["cached_tokens"] for it in harness.decisions] == [None]


def as_length(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def until_close(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + body


@pytest.mark.parametrize("framing", [as_length, until_close])
@pytest.mark.parametrize("halves", [True, False])
async def test_a_stream_of_any_framing_stays_readable(replica, framing, halves):
    wire = framing(TOKEN + USAGE_USAGE_REQUESTS + DONE)

    async def script(call: Call) -> None:
        cut = wire.index(TOKEN) + len(TOKEN) if halves else len(wire)
        await call.send(wire[:cut])
        if halves:
            await harness.until(lambda: harness.loads.load("replica-0").running, "the first event to arrive")
            await call.send(wire[cut:])
        call.close()

    replica.script = script
    async with routed(config([replica])) as harness:
        response = await harness.chat(STREAM)

        assert response.body == TOKEN + DONE
        assert [it["cached_tokens"] for it in harness.decisions] == [32]


async def test_a_compressed_stream_passes_unchanged(replica):
    head = STREAM_HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")
    replica.script = lambda call: call.send(head, chunk(b"\x1f\x8bnot events"), LAST_CHUNK)
    async with routed(config([replica])) as harness:
        assert (await harness.chat(STREAM)).body == b"\x1f\x8bnot events"


async def test_a_broken_filtered_stream_ends_with_a_whole_error_event(replica):
    async def broken(call: Call) -> None:
        await call.begin_stream(TOKEN, TOKEN[:10])
        await harness.until(lambda: harness.loads.load("replica-0").running, "the first event to arrive")
        call.reset()

    replica.script = broken
    async with routed(config([replica])) as harness:
        body = (await harness.chat(STREAM)).body

        assert body.startswith(TOKEN + b'data: {"error":')
        assert body.endswith(b"\n\n")


# --- engines that refuse to be asked ------------------------------------------------------------------
def rejecting(status: int) -> Callable[[Call], Any]:
    async def script(call: Call) -> None:
        if b"stream_options" in call.body:
            await call.send(plain_answer(REFUSAL, status=status))
        else:
            await call.stream(TOKEN, DONE)

    return script


@pytest.mark.parametrize("status", [400, 422])
async def test_an_engine_that_rejects_usage_requests_gets_the_clients_request(replica, status):
    replica.script = rejecting(status)
    async with routed(config([replica])) as harness:
        responses = [await harness.chat(STREAM) for _ in range(3)]

        assert [(it.status, it.body) for it in responses] == [(200, TOKEN + DONE)] * 3
        has_options = [b"stream_options" in call.body for call in replica.calls]
        assert has_options == [True, False, False, False]  # the rejection is remembered
        assert replica.calls[1].body == STREAM
        assert await count(harness, "requests_total") == 3
        assert not harness.breakers.not_closed


async def test_an_invalid_request_does_not_stop_usage_requests(replica):
    replica.script = lambda call: call.send(
        plain_answer(b'{"error":{"message":%b}}' % msgspec.json.encode(call.body.decode()), status=400)
    )
    async with routed(config([replica])) as harness:
        response = await harness.chat(STREAM)
        assert (response.status, response.error["message"]) == (400, STREAM.decode())  # nothing of the router's

        replica.script = like_vllm
        await harness.chat(STREAM)
        assert harness.decisions[-1]["cached_tokens"] == 32


# --- Comments to clients that stream and wait for their first token ---


STREAMED = {"model": "tiny", "messages": [], "prompt": "x", "input": "x", "max_tokens": 9, "stream": True}


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
        await client.send(post(path, json.dumps(STREAMED).encode()))
        head = await client.read_until(b"\r\n\r\n")
        await client.read_until(COMMENT)
        released.set()
        rest = await client.read_until(b"0\r\n\r\n")
        await client.send(post(path, json.dumps(STREAMED).encode()))  # the connection stays open
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
        await client.send(post(path, json.dumps(STREAMED).encode()))
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
        response = await harness.send(post(path, json.dumps({**STREAMED, "stream": is_stream}).encode()))
    assert (response.status, response.body) == (200, b"{}")
