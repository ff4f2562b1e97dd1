"""Responses of a real engine reach clients byte for byte, at every path and in both forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.replica import LAST_CHUNK, STREAM_HEAD, Call, FakeReplica, chunk, sse
from tests.routing.proxy.harness import Harness, config, decision_page, get, post, routed

CAPTURES = Path(__file__).parents[2] / "data" / "vllm"
LOCAL = {  # the router responds itself, with an error that names the field
    *("/health", "/ping", "/version", "/load", "/v1/models", "/kv_event_sources", "/is_sleeping", "/v1/nothing"),
    *("bad-json", "empty-body", "json-not-object", "wrong-method"),
}
USAGE = {
    "prompt_tokens": 20,
    "total_tokens": 26,
    "completion_tokens": 6,
    "prompt_tokens_details": {"cached_tokens": 16},
}


def captured(*names: str) -> list[Any]:
    lines = [line for name in names for line in (CAPTURES / f"vllm-http-0.32.0-{name}.jsonl").read_text().splitlines()]
    cases = [json.loads(line) for line in lines]
    return [
        pytest.param(case, id=case["case"])
        for case in cases
        if case["case"] not in LOCAL and case["request"]["path"] not in LOCAL
    ]


def reads_of(case: dict[str, Any]) -> list[bytes]:
    return [text.encode() for _, text in case["response"]["reads"]]


def with_usage(reads: list[bytes]) -> list[bytes]:
    """The same stream as vLLM sends it with ``include_usage``: the fingerprint is in the usage chunk."""
    moved, fingerprint = [], None
    for read in reads:
        event = json.loads(read[6:]) if b"system_fingerprint" in read else {}
        fingerprint = event.get("system_fingerprint", fingerprint)
        moved.append(read.replace(b',"system_fingerprint":' + json.dumps(fingerprint).encode(), b""))
    head = {name: json.loads(reads[0][6:])[name] for name in ("id", "object", "created", "model")}
    usage = {**head, "choices": [], "usage": USAGE, "system_fingerprint": fingerprint}
    return [*moved[:-1], sse(usage), moved[-1]]


async def send(harness: Harness, case: dict[str, Any]) -> Any:
    request = case["request"]
    body = request["body"] if isinstance(request["body"], str) else json.dumps(request["body"])
    headers = [f"{name}: {value}".encode() for name, value in request["headers"].items()]
    async with harness.connect() as client:
        if request["method"] == "POST":
            await client.send(post(request["path"].encode(), body.encode(), headers))
        else:
            await client.send(get(request["path"].encode(), headers, request["method"].encode()))
        return await client.read_response()


@pytest.mark.parametrize("case", captured("ok", "errors", "auth-queue-drain"))
async def test_a_response_reaches_the_client_as_the_engine_sent_it(replica: FakeReplica, case: dict[str, Any]) -> None:
    expected = case["response"]

    async def engine(call: Call) -> None:
        if "reads" in expected:
            await call.send(STREAM_HEAD)
            for read in reads_of(case):
                await call.send(chunk(read))
            await call.send(LAST_CHUNK)
            return
        content, head = expected["body"].encode(), b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n"
        lines = [b"%b: %b\r\n" % (name.encode(), expected["headers"][name].encode()) for name in ("content-type",)]
        await call.send(head % (expected["status"], len(content)) + b"".join(lines) + b"\r\n" + content)

    replica.script = replica.on_token_probe = engine
    async with routed(config([replica])) as harness:
        response = await send(harness, case)

    whole = b"".join(reads_of(case)) if "reads" in expected else expected["body"].encode()
    assert (response.status, response.body) == (expected["status"], whole)
    assert response.headers["content-type"] == expected["headers"]["content-type"]


def of_completions(case: dict[str, Any]) -> dict[str, Any]:
    """A captured chat as vLLM sends it at the other path: text instead of deltas."""
    body = {name: value for name, value in case["request"]["body"].items() if name != "messages"} | {"prompt": "hi"}
    reads = []
    for at, text in case["response"]["reads"]:
        event = json.loads(text[6:]) if "choices" in text else None
        for choice in event["choices"] if event else ():
            choice["text"] = choice.pop("delta").get("content", "")
        reads.append([at, text if event is None else f"data: {json.dumps(event, separators=(',', ':'))}\n\n"])
    request = case["request"] | {"path": "/v1/completions", "body": body}
    return {"request": request, "response": case["response"] | {"reads": reads}}


SEVERAL = next(case.values[0] for case in captured("ok") if case.id == "chat-stream-n2")


@pytest.mark.parametrize("case", [SEVERAL, of_completions(SEVERAL)], ids=["chat", "completions"])
@pytest.mark.parametrize("asks", [False, True])
async def test_several_choices_are_the_same_as_well(replica: FakeReplica, case: dict[str, Any], asks: bool) -> None:
    """The fingerprint is known from an earlier stream; a client that closes at the end has it all."""
    closes = False

    async def engine(call: Call) -> None:
        await call.send(STREAM_HEAD, *map(chunk, with_usage(reads_of(case))))
        if closes:
            await call.wait_gone()
        await call.send(LAST_CHUNK)

    replica.script = engine
    body = case["request"]["body"] | ({"stream_options": {"include_usage": True}} if asks else {})
    case = case | {"request": case["request"] | {"body": body}}
    async with routed(config([replica])) as harness:
        _, second = [await send(harness, case) for _ in range(2)]
        closes = True
        async with harness.connect() as client:
            await client.send(post(case["request"]["path"].encode(), json.dumps(body).encode()))
            await client.read_until(sse("[DONE]"))
        await harness.at_rest()
        decisions = decision_page(harness.router.services.decisions, 0, 9)["decisions"]
        _, text = await harness.admin("GET", "/metrics")

    assert second.body == b"".join(with_usage(reads_of(case)) if asks else reads_of(case))
    assert [decision["prompt_tokens"] for decision in decisions] == [20] * 3
    assert 'outcome="ok"} 3' in text


@pytest.mark.parametrize("case", [case for case in captured("ok") if case.id.endswith("-stream")])
@pytest.mark.parametrize("pieces", ["events", "together", "cut"])
async def test_a_stream_is_the_same_if_the_router_asks_for_its_usage(
    replica: FakeReplica, case: dict[str, Any], pieces: str
) -> None:
    requested = []

    async def engine(call: Call) -> None:
        options = json.loads(call.body).get("stream_options") or {}
        requested.append(options.get("include_usage", False))
        reads = with_usage(reads_of(case)) if requested[-1] and not is_asked else reads_of(case)
        if pieces != "events":
            whole, size = b"".join(reads), 1 << 20 if pieces == "together" else 37
            reads = [whole[at : at + size] for at in range(0, len(whole), size)]
        await call.send(STREAM_HEAD, *map(chunk, reads), LAST_CHUNK)

    replica.script = engine
    is_asked = bool((case["request"]["body"].get("stream_options") or {}).get("include_usage"))
    async with routed(config([replica])) as harness:
        response = await send(harness, case)
        (decision,) = decision_page(harness.router.services.decisions, 0, 9)["decisions"]

    assert requested == [case["request"]["path"] in ("/v1/chat/completions", "/v1/completions")]
    assert response.body == b"".join(reads_of(case))
    assert decision["prompt_tokens"] is not None
