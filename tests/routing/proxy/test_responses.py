"""Responses of replicas, also those of a real engine, pass byte for byte, or clients see that they are incomplete."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from routing.schema import Limits
from tests.fakes.replica import LAST_CHUNK, STREAM_HEAD, Call, chunk, plain_answer, raw, sse
from tests.routing.proxy.harness import CHAT, Harness, config, get, post, routed

OK = b"HTTP/1.1 200 OK\r\n"
JSON = b"Content-Type: application/json\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"


async def test_an_incomplete_response_is_a_replica_error_and_not_retried(two):
    for replica in two:
        replica.script = raw(OK + JSON + CHUNKED + b"\r\n" + chunk(b"hello"), then_close=True)
    async with routed(config(two)) as harness:
        with pytest.raises(asyncio.IncompleteReadError):
            await harness.chat()
        await harness.at_rest()
        _, text = await harness.admin("GET", "/metrics")
    assert 'outcome="replica_error"} 1' in text
    assert sum(len(replica.calls) for replica in two) == 1


async def test_an_incomplete_response_without_length_ends_with_a_reset(replica):
    async def script(call: Call) -> None:
        await call.send(OK + JSON + b"\r\nhel")
        await call.reader.read(1)  # until the client has the first bytes
        call.reset()

    replica.script = script
    async with routed(config([replica], limits=Limits(idle_timeout_s=0.2))) as harness, harness.connect() as client:
        await client.send(post(CHAT))
        await client.read_until(b"\r\n\r\nhel")
        with pytest.raises(ConnectionResetError):
            async with asyncio.timeout(10):
                await client.reader.read()


@pytest.mark.parametrize("is_inside_event", [False, True])
async def test_a_broken_stream_ends_with_one_error_event(is_inside_event, two):
    events = sse({"n": 1}) + (b'data: {"n": ' if is_inside_event else b"")
    for replica in two:
        replica.script = raw(STREAM_HEAD + chunk(events), then_close=True)
    async with routed(config(two)) as harness, harness.connect() as client:
        response = await client.ask(post(CHAT))
        assert await client.read_all() == b""
    assert response.status == 200
    assert response.body.startswith(events)
    last = response.body[len(events) :].strip().split(b"\n\n")
    assert len(last) == 1
    error = json.loads(last[0].removeprefix(b"data: "))["error"]
    assert (error["code"], response.replica in error["message"]) == (502, True)
    assert response.body.endswith(b"\n\n")
    assert sum(len(replica.calls) for replica in two) == 1


async def test_chunks_of_one_read_leave_as_one(replica):
    chunks = [chunk(sse({"n": n})) for n in range(50)]
    replica.script = raw(STREAM_HEAD + b"".join(chunks) + LAST_CHUNK)
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(post(CHAT))
        head = await client.read_until(b"\r\n\r\n")
        body = b"".join(sse({"n": n}) for n in range(50))
        assert await client.read_until(b"0\r\n\r\n") == chunk(body) + LAST_CHUNK
    assert b"Transfer-Encoding: chunked" in head


async def test_the_head_is_held_until_the_first_byte_of_the_body(replica):
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await call.begin_stream()
        await go.wait()
        await call.end_stream(sse({"n": 1}))

    replica.script = script
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(post(CHAT))
        await replica.wait_calls(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await client.reader.read(1)
        go.set()
        assert (await client.read_response()).body == sse({"n": 1})


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_single_events_are_relayed_one_by_one(version, replica):
    events = [sse({"n": n, "text": "x" * (n * 40)}) for n in range(40)]  # up to 1.6 KB
    received = asyncio.Semaphore(1)

    async def script(call: Call) -> None:
        await call.begin_stream()
        for event in events:
            await received.acquire()
            await call.send(chunk(event))
        await call.end_stream()

    replica.script = script
    request = b"POST /v1/completions HTTP/%b\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}" % version
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(request)
        await client.read_until(b"\r\n\r\n")
        for event in events:
            framed = event if version == b"1.0" else chunk(event)
            assert await client.reader.readexactly(len(framed)) == framed
            received.release()
        rest = await client.reader.readexactly(0 if version == b"1.0" else len(LAST_CHUNK))
    assert rest == (b"" if version == b"1.0" else LAST_CHUNK)


async def test_endless_trailers_are_not_stored(replica):
    async def script(call: Call) -> None:
        await call.send(STREAM_HEAD, chunk(b"data: hello\n\n"), b"0\r\n")
        for _ in range(200):
            await call.send(b"X-More: of the same\r\n" * 100)
        await call.wait_gone()

    replica.script = script
    async with routed(config([replica], limits=Limits(idle_timeout_s=0.3))) as harness, harness.connect() as client:
        await client.send(post(CHAT))
        await client.read_until(b"hello")
        (upstream,) = harness.router.active.connection_pools["replica-0"]._open
        await client.read_all()  # trailers are no progress
        await harness.at_rest()
    assert len(upstream._headers) == 0


async def test_head_requests_get_a_head_of_the_routers_own_because_engines_have_none(replica):
    async with routed(config([replica])) as harness, harness.connect() as client:
        for path in (b"/v1/models", b"/v1/models/org/other", b"/health"):
            await client.send(get(path, method=b"HEAD"))
            assert (await client.read_response(bodyless=True)).status == 200
    assert replica.calls == []


async def test_a_slash_after_the_path_makes_no_difference(replica):
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(post(CHAT + b"/"), post(CHAT + b"/?a=/"), post(CHAT + b"//"), post(b"/"))
        statuses = [(await client.read_response()).status for _ in range(4)]
    assert statuses == [200, 200, 404, 404]
    assert [call.line for call in replica.calls] == [b"POST " + CHAT + end + b" HTTP/1.1" for end in (b"", b"?a=/")]


USAGE = {"prompt_tokens": 431, "total_tokens": 443, "prompt_tokens_details": {"cached_tokens": 416}}
SPEECH = {
    "choices": [{"message": {"content": '"usage":{"prompt_tokens":1,"prompt_tokens_details":{"cached_tokens":1}}'}}]
}
RESPONSES = {"usage": {"input_tokens": 431, "input_tokens_details": {"cached_tokens": 416}, "output_tokens": 3}}


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (plain_answer(json.dumps({**SPEECH, "usage": USAGE, "prompt_logprobs": None}).encode()), (431, 416)),
        (plain_answer(json.dumps({"choices": ["x" * 100_000], "usage": USAGE}).encode()), (431, 416)),
        (plain_answer(json.dumps(RESPONSES).encode()), (431, 416)),
        (plain_answer(json.dumps({"usage": {"prompt_tokens": 5}}).encode()), (5, None)),
        (plain_answer(json.dumps({"usage": {"prompt_tokens": 5, "prompt_tokens_details": None}}).encode()), (5, None)),
        (plain_answer(json.dumps(SPEECH).encode()), (None, None)),
        (plain_answer(b'{"usage":{"prompt_tokens":"x"}}'), (None, None)),
        (plain_answer(b'{"usage":null}'), (None, None)),
        (plain_answer(b'{"usage":{"prompt_tokens":-5,"prompt_tokens_details":{"cached_tokens":1}}}'), (None, None)),
        (plain_answer(b'{"usage":{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":-1}}}'), (None, None)),
        (plain_answer(b'{"usage":{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":6}}}'), (5, None)),
        (plain_answer(b'{"usage":{"prompt_tokens":9000000000000000000}}'), (None, None)),
        (plain_answer(json.dumps({"usage": USAGE}).encode(), status=400), (None, None)),
        (
            STREAM_HEAD
            + b"".join(chunk(sse({"choices": [n], "usage": {"prompt_tokens": 431}})) for n in range(20))
            + chunk(sse({"choices": [], "usage": USAGE}))
            + chunk(sse("[DONE]"))
            + LAST_CHUNK,
            (431, 416),
        ),
    ],
)
async def test_usage_is_read_from_the_response(sent, expected, replica):
    replica.script = raw(sent)
    async with routed(config([replica])) as harness:
        await harness.chat()
        (record,) = harness.decisions
    assert (record["prompt_tokens"], record["cached_tokens"]) == expected


# --- Responses of a real engine reach clients byte for byte, at every path and in both forms ---


CAPTURES = Path(__file__).parents[2] / "data" / "vllm"
LOCAL = {  # the router responds itself, with an error that names the field
    *("/health", "/ping", "/version", "/load", "/v1/models", "/kv_event_sources", "/is_sleeping", "/v1/nothing"),
    *("bad-json", "empty-body", "json-not-object", "wrong-method"),
}
CAPTURED_USAGE = {
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
    usage = {**head, "choices": [], "usage": CAPTURED_USAGE, "system_fingerprint": fingerprint}
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
async def test_a_response_reaches_the_client_as_the_engine_sent_it(replica, case):
    expected = case["response"]

    async def engine(call: Call) -> None:
        if "reads" in expected:
            await call.begin_stream()
            for read in reads_of(case):
                await call.send(chunk(read))
            await call.end_stream()
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
async def test_several_choices_are_the_same_as_well(replica, case, asks):
    """The fingerprint is known from an earlier stream; a client that closes at the end has it all."""
    closes = False

    async def engine(call: Call) -> None:
        await call.begin_stream(*with_usage(reads_of(case)))
        if closes:
            await call.wait_gone()
        await call.end_stream()

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
        decisions = harness.decisions
        _, text = await harness.admin("GET", "/metrics")

    assert second.body == b"".join(with_usage(reads_of(case)) if asks else reads_of(case))
    assert [decision["prompt_tokens"] for decision in decisions] == [20] * 3
    assert 'outcome="ok"} 3' in text


@pytest.mark.parametrize("case", [case for case in captured("ok") if case.id.endswith("-stream")])
@pytest.mark.parametrize("pieces", ["events", "together", "cut"])
async def test_a_stream_is_the_same_if_the_router_asks_for_its_usage(replica, case, pieces):
    requested = []

    async def engine(call: Call) -> None:
        options = json.loads(call.body).get("stream_options") or {}
        requested.append(options.get("include_usage", False))
        reads = with_usage(reads_of(case)) if requested[-1] and not is_asked else reads_of(case)
        if pieces != "events":
            whole, size = b"".join(reads), 1 << 20 if pieces == "together" else 37
            reads = [whole[at : at + size] for at in range(0, len(whole), size)]
        await call.stream(*reads)

    replica.script = engine
    is_asked = bool((case["request"]["body"].get("stream_options") or {}).get("include_usage"))
    async with routed(config([replica])) as harness:
        response = await send(harness, case)
        (decision,) = harness.decisions

    assert requested == [case["request"]["path"] in ("/v1/chat/completions", "/v1/completions")]
    assert response.body == b"".join(reads_of(case))
    assert decision["prompt_tokens"] is not None
