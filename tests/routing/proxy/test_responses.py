"""Responses of replicas pass byte for byte, or clients see that they are incomplete."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from routing.schema import Limits
from tests.fakes.replica import LAST_CHUNK, STREAM_HEAD, Call, FakeReplica, chunk, plain_answer, raw, sse
from tests.routing.proxy.harness import BODY, CHAT, config, decision_page, get, post, routed

OK = b"HTTP/1.1 200 OK\r\n"
JSON = b"Content-Type: application/json\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"


async def test_an_incomplete_response_is_a_replica_error_and_not_retried(two: list[FakeReplica]) -> None:
    for replica in two:
        replica.script = raw(OK + JSON + CHUNKED + b"\r\n" + chunk(b"hello"), then_close=True)
    async with routed(config(two)) as harness:
        with pytest.raises(asyncio.IncompleteReadError):
            await harness.chat()
        await harness.at_rest()
        _, text = await harness.admin("GET", "/metrics")
    assert 'outcome="replica_error"} 1' in text
    assert sum(len(replica.calls) for replica in two) == 1


async def test_an_incomplete_response_without_length_ends_with_a_reset(replica: FakeReplica) -> None:
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
async def test_a_broken_stream_ends_with_one_error_event(is_inside_event: bool, two: list[FakeReplica]) -> None:
    events = sse({"n": 1}) + (b'data: {"n": ' if is_inside_event else b"")
    for replica in two:
        replica.script = raw(STREAM_HEAD + chunk(events), then_close=True)
    async with routed(config(two)) as harness, harness.connect() as client:
        await client.send(post(CHAT))
        response = await client.read_response()
        assert await client.read_all() == b""
    assert response.status == 200
    assert response.body.startswith(events)
    last = response.body[len(events) :].strip().split(b"\n\n")
    assert len(last) == 1
    error = json.loads(last[0].removeprefix(b"data: "))["error"]
    assert (error["code"], response.replica in error["message"]) == (502, True)
    assert response.body.endswith(b"\n\n")
    assert sum(len(replica.calls) for replica in two) == 1


async def test_a_stream_is_relayed_byte_for_byte_however_it_is_cut(replica: FakeReplica) -> None:
    chance = random.Random(7)
    body = b"".join(sse({"n": n, "text": "é" * chance.randrange(40)}) for n in range(300)) + sse("[DONE]")
    cuts = sorted(chance.sample(range(1, len(body)), 200))
    chunks = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    framed = STREAM_HEAD + b"".join(map(chunk, chunks)) + LAST_CHUNK
    breaks = sorted(chance.sample(range(1, len(framed)), 60))
    replica.script = raw(*(framed[a:b] for a, b in zip([0, *breaks], [*breaks, len(framed)], strict=True)))
    async with routed(config([replica])) as harness:
        response = await harness.chat()
    assert response.body == body
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"


async def test_chunks_of_one_read_leave_as_one(replica: FakeReplica) -> None:
    chunks = [chunk(sse({"n": n})) for n in range(50)]
    replica.script = raw(STREAM_HEAD + b"".join(chunks) + LAST_CHUNK)
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(post(CHAT))
        head = await client.read_until(b"\r\n\r\n")
        body = b"".join(sse({"n": n}) for n in range(50))
        assert await client.read_until(b"0\r\n\r\n") == chunk(body) + LAST_CHUNK
    assert b"Transfer-Encoding: chunked" in head


async def test_the_head_is_held_until_the_first_byte_of_the_body(replica: FakeReplica) -> None:
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await call.send(STREAM_HEAD)
        await go.wait()
        await call.send(chunk(sse({"n": 1})), LAST_CHUNK)

    replica.script = script
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(post(CHAT))
        await replica.wait_calls(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await client.reader.read(1)
        go.set()
        assert (await client.read_response()).body == sse({"n": 1})


async def test_a_response_to_http_1_0_is_not_chunked(replica: FakeReplica) -> None:
    replica.script = raw(STREAM_HEAD, chunk(b"hel"), chunk(b"lo"), LAST_CHUNK)
    request = b"POST /v1/completions HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\n{}"
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(request)
        response = await client.read_response()
    assert "transfer-encoding" not in response.headers
    assert response.headers["connection"] == "close"
    assert response.raw_body == b"hello"


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_single_events_are_relayed_one_by_one(version: bytes, replica: FakeReplica) -> None:
    events = [sse({"n": n, "text": "x" * (n * 40)}) for n in range(40)]  # up to 1.6 KB
    received = asyncio.Semaphore(1)

    async def script(call: Call) -> None:
        await call.send(STREAM_HEAD)
        for event in events:
            await received.acquire()
            await call.send(chunk(event))
        await call.send(LAST_CHUNK)

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


async def test_http_1_0_connections_stay_open_if_a_length_is_known(replica: FakeReplica) -> None:
    request = b"POST /v1/completions HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\n{}"
    async with routed(config([replica])) as harness, harness.connect() as client:
        for _ in range(2):
            await client.send(request)
            assert (await client.read_response()).headers["connection"] == "keep-alive"


async def test_an_interim_response_never_gets_into_another_response(two: list[FakeReplica]) -> None:
    two[0].script = raw(b"HTTP/1.1 150 Soon\r\nContent-Length: 6\r\n\r\nstolen")
    two[1].script = raw(OK + JSON + b"Content-Length: 5\r\n", b"\r\nhel", b"lo")
    async with routed(config(two, limits=Limits(retries=0, first_byte_timeout_s=5))) as harness:
        responses = await asyncio.gather(*(harness.chat() for _ in range(4)))
        await harness.at_rest()
    assert (
        sorted((response.status, response.body[:5]) for response in responses)
        == [(200, b"hello")] * 2 + [(502, b'{"err')] * 2
    )


async def test_endless_trailers_are_not_stored(replica: FakeReplica) -> None:
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


async def test_head_requests_get_a_head_of_the_routers_own_because_engines_have_none(replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness, harness.connect() as client:
        for path in (b"/v1/models", b"/v1/models/org/other", b"/health"):
            await client.send(get(path, method=b"HEAD"))
            assert (await client.read_response(bodyless=True)).status == 200
    assert replica.calls == []


async def test_a_slash_after_the_path_makes_no_difference(replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(post(CHAT + b"/"), post(CHAT + b"/?a=/"), post(CHAT + b"//"), post(b"/"))
        statuses = [(await client.read_response()).status for _ in range(4)]
    assert statuses == [200, 200, 404, 404]
    assert [call.line for call in replica.calls] == [b"POST " + CHAT + end + b" HTTP/1.1" for end in (b"", b"?a=/")]


async def test_models_are_a_replicas_if_a_pool_accepts_any_model(replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(get(b"/v1/models"))
        assert (await client.read_response()).replica == "replica-0"
    assert replica.calls[0].line == b"GET /v1/models HTTP/1.1"


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
async def test_usage_is_read_from_the_response(
    sent: bytes, expected: tuple[int | None, int | None], replica: FakeReplica
) -> None:
    replica.script = raw(sent)
    async with routed(config([replica])) as harness:
        await harness.chat()
        (record,) = decision_page(harness.router.services.decisions, 0, 10)["decisions"]
    assert (record["prompt_tokens"], record["cached_tokens"]) == expected


async def test_an_error_inside_a_stream_counts_as_a_replica_error(replica: FakeReplica) -> None:
    error = {"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 500}}
    replica.script = raw(STREAM_HEAD + chunk(sse({"n": 1})), chunk(sse(error)), chunk(sse("[DONE]")), LAST_CHUNK)
    async with routed(config([replica])) as harness:
        response = await harness.chat()
        _, text = await harness.admin("GET", "/metrics")
    assert response.body == sse({"n": 1}) + sse(error) + sse("[DONE]")
    assert 'outcome="replica_error"} 1' in text


async def test_all_four_prompt_paths_are_served(replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness, harness.connect() as client:
        for path in (CHAT, b"/v1/completions", b"/v1/embeddings", b"/v1/responses"):
            await client.send(post(path, BODY))
            assert (await client.read_response()).status == 200
    assert [call.line.split()[1] for call in replica.calls] == [
        CHAT,
        b"/v1/completions",
        b"/v1/embeddings",
        b"/v1/responses",
    ]
