"""Anthropic's messages API: placement, sessions, token usage, TTFT and errors, as its clients see them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from routing.schema import Caps, LowestCostSettings, SessionAffinitySettings
from tests.fakes.replica import (
    STREAM_HEAD,
    Call,
    answering,
    chunk,
    plain_answer,
    raw,
    streaming,
)
from tests.routing.proxy.harness import (
    KEY,
    OTHER,
    Harness,
    Response,
    api_key,
    config,
    post,
    routed,
    samples,
    with_keys,
)

CAPTURES = Path(__file__).parents[2] / "data" / "vllm" / "vllm-http-0.32.0-ok.jsonl"
MESSAGES, COUNT = b"/v1/messages", b"/v1/messages/count_tokens"
USAGE = {"input_tokens": 20, "output_tokens": 3, "cache_read_input_tokens": 64, "cache_creation_input_tokens": 16}
MESSAGE = {"id": "m", "type": "message", "role": "assistant", "content": [], "stop_reason": "end_turn", "usage": USAGE}
SYSTEM = "Instructions of one agent. " * 200
SESSION = "user_1f_account_5b1ad4ad-8f6c-4b3a-9f52-0f6f2f0d9d11_session_0c9bd1a0-1fb2-4b0f-9d37-5b7d3f2a8e10"


def captured_events() -> list[bytes]:
    """The reads of vLLM's stream of three tokens."""
    cases = [json.loads(line) for line in CAPTURES.read_text().splitlines()]
    case = next(case for case in cases if case["case"] == "messages-stream")
    return [text.encode() for _, text in case["response"]["reads"]]


def body(text: str = "Hi", system: Any = SYSTEM, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": text}]
    return json.dumps({"model": "tiny", "max_tokens": 5, "system": system, "messages": messages, **fields}).encode()


async def ask(harness: Harness, data: bytes, *headers: bytes, path: bytes = MESSAGES) -> Response:
    return await harness.send(post(path, data, headers))


def error_of(response: Response) -> tuple[int, str]:
    document = json.loads(response.body)
    assert set(document) == {"type", "error"}
    assert document["type"] == "error"
    assert set(document["error"]) == {"type", "message"}
    return response.status, document["error"]["type"]


async def test_a_response_passes_unchanged_and_its_usage_is_accounted_for(replica):
    replica.script = answering(json.dumps(MESSAGE).encode())
    async with routed(config([replica])) as harness:
        sent = body()
        response = await ask(harness, sent)
        decision = harness.decisions[-1]
        _, text = await harness.admin("GET", "/metrics")

    assert json.loads(response.body) == MESSAGE
    assert replica.calls[0].body == sent
    assert (decision["prompt_tokens"], decision["cached_tokens"]) == (100, 64)
    assert samples(text)["warmpath_router_prompt_tokens_total"][0][1] == 100


async def test_a_response_without_cache_fields_reports_no_cached_tokens(replica):
    usage = {"input_tokens": 20, "output_tokens": 3}
    replica.script = answering(json.dumps({**MESSAGE, "usage": usage}).encode())
    async with routed(config([replica])) as harness:
        await ask(harness, body())
        decision = harness.decisions[-1]

    assert (decision["prompt_tokens"], decision["cached_tokens"]) == (20, None)


async def test_a_stream_passes_unchanged_with_usage_and_a_time_to_first_token(replica):
    events = captured_events()
    replica.script = streaming(*events)
    async with routed(config([replica])) as harness:
        response = await ask(harness, body(stream=True))
        decision = harness.decisions[-1]

    assert response.body == b"".join(events)
    assert (decision["prompt_tokens"], decision["cached_tokens"], decision["streamed"]) == (11, 0, True)
    assert decision["ttft_s"] is not None


@pytest.mark.parametrize("path", [COUNT, b"/tokenize", b"/detokenize"])
async def test_counting_tokens_claims_no_cached_prefix(path, two):
    for replica in two:
        replica.script = answering(b'{"input_tokens":5}')
    async with routed(config(two, settings=LowestCostSettings())) as harness:
        await ask(harness, body(), path=path)
        counted = harness.decisions[-1]
        await ask(harness, body())
        generated = harness.decisions[-1]

    assert (counted["prefix"], counted["hit_tokens"] or 0) == (None, 0)
    assert not generated["hit_tokens"]


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ([b"X-Session-ID: one"], {}),
        ([b"X-Claude-Code-Session-Id: one"], {}),
        ([b"session-id: one"], {}),
        ([b"session_id: one"], {}),
        ([b"X-Session-Affinity: one"], {}),
        ([], {"metadata": {"user_id": SESSION}}),
    ],
)
async def test_a_session_stays_on_one_replica(headers, fields, three):
    async with routed(config(three, settings=SessionAffinitySettings(slack_s=60))) as harness:
        for number in range(4):
            await ask(harness, body(system=f"Another prompt {number}.", **fields), *headers)
        decisions = harness.decisions

    assert {decision["reason"] for decision in decisions} == {"affinity"}
    assert len({decision["replica"] for decision in decisions}) == 1
    assert sorted(len(replica.calls) for replica in three) == [0, 0, 4]


@pytest.mark.parametrize(
    "headers",
    [[], [b"X-Request-Id: one"], [b"X-Client-Request-Id: one"], [b"X-Session-ID:"], [b"x_session_id: one"]],
)
async def test_a_request_without_a_session_has_no_key(headers, three):
    async with routed(config(three, settings=SessionAffinitySettings(slack_s=60))) as harness:
        await ask(harness, body(metadata={"user_id": "user_1f_account_2b"}), *headers)
        assert harness.decisions[-1]["reason"] == "no_key"


# --- errors ---


async def test_errors_of_the_router_have_anthropics_form(replica):
    limited = config([replica], models=("tiny",))
    async with routed(limited) as harness:
        assert error_of(await ask(harness, b"{")) == (400, "invalid_request_error")
        assert error_of(await ask(harness, body(model="other"))) == (404, "not_found_error")
        assert error_of(await ask(harness, body(), path=MESSAGES + b"/nothing")) == (404, "not_found_error")
        assert error_of(await ask(harness, body(), path=MESSAGES + b"/../models")) == (404, "not_found_error")
        assert (await ask(harness, b"{", path=b"/v1/chat/completions")).error["code"] == 400
    assert replica.calls == []


async def test_a_replica_that_cannot_be_reached_is_an_api_error(replica):
    async with routed(config([replica])) as harness:
        replica.kill()
        assert error_of(await ask(harness, body())) == (502, "api_error")


async def test_a_broken_stream_ends_with_an_error_event(replica):
    replica.script = raw(STREAM_HEAD + b"".join(map(chunk, captured_events()[:3])), then_close=True)
    async with routed(config([replica])) as harness:
        response = await ask(harness, body(stream=True))

    last = response.body.removesuffix(b"\n\n").split(b"\n\n")[-1].split(b"\n")
    assert last[0] == b"event: error"
    assert json.loads(last[1].removeprefix(b"data: "))["error"]["type"] == "api_error"


@pytest.mark.parametrize(
    "last",
    [
        b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"EngineCore died"}}\n\n',
        b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":null,"stop_sequence":null}}\n\n',
    ],
)
async def test_a_stream_that_its_engine_ended_is_a_replica_error(last, replica):
    replica.script = streaming(*captured_events()[:4], last)
    async with routed(config([replica])) as harness:
        await ask(harness, body(stream=True))
        _, text = await harness.admin("GET", "/metrics")

    assert 'outcome="replica_error"} 1' in text


async def test_a_response_that_its_engine_aborted_is_generated_by_another_replica(two):
    aborted = {name: value for name, value in MESSAGE.items() if name != "stop_reason"}
    calls: list[Call] = []

    async def script(call: Call) -> None:
        calls.append(call)
        await call.send(plain_answer(json.dumps(aborted if len(calls) == 1 else MESSAGE).encode()))

    for replica in two:
        replica.script = script
    async with routed(config(two)) as harness:
        response = await ask(harness, body())

    assert json.loads(response.body) == MESSAGE
    assert [len(replica.calls) for replica in two] == [1, 1]


# --- keys and caps ---


async def test_x_api_key_authenticates(replica):
    async with routed(with_keys([replica], api_key())) as harness:
        key = b"x-api-key: " + KEY.encode()
        assert (await ask(harness, body(), key)).status == 200
        assert replica.calls[0].header(b"x-api-key") == []
        for headers in (
            [],
            [b"x-api-key: " + OTHER.encode()],
            [key, key],
            [b"Authorization: Bearer " + OTHER.encode(), key],
            [b"x_api_key: " + KEY.encode()],
        ):
            response = await ask(harness, body(), *headers)
            assert error_of(response) == (401, "authentication_error")
    assert len(replica.calls) == 1


async def test_x_api_key_is_forwarded_where_the_router_needs_no_key(replica):
    async with routed(config([replica])) as harness:
        await ask(harness, body(), b"x-api-key: secret")
    assert replica.calls[0].header(b"x-api-key") == [b"secret"]


async def test_caps_and_tenants_apply(replica):
    whole = with_keys([replica], api_key(tenant="red"))
    (pool,) = whole.pools
    capped = msgspec.structs.replace(pool, caps=Caps(max_tokens=10, media_hosts=()))
    async with routed(msgspec.structs.replace(whole, pools=(capped,))) as harness:
        key = b"x-api-key: " + KEY.encode()
        image = {"type": "image", "source": {"type": "url", "url": "http://10.0.0.1/a.png"}}
        result = {"type": "tool_result", "tool_use_id": "c", "content": [image]}
        assert (await ask(harness, body(), key)).status == 200
        assert error_of(await ask(harness, body(max_tokens=11), key)) == (400, "invalid_request_error")
        for block in (image, result):
            messages = [{"role": "user", "content": [block]}]
            for path in (MESSAGES, COUNT):
                assert (await ask(harness, body(messages=messages), key, path=path)).status == 400
    (call,) = replica.calls
    assert len(json.loads(call.body)["cache_salt"]) == 32
