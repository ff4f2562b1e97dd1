"""TTFT is of streamed responses: the first byte of any other comes with its last token."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from routing.schema import LowestCostSettings
from tests.fakes.replica import LAST_CHUNK, STREAM_HEAD, Call, FakeReplica, answering, chunk, streaming
from tests.routing.proxy.harness import BODY, DEADLINE_S, Harness, config, post, routed
from tests.routing.proxy.records import told
from tests.routing.proxy.scraped import samples

STREAM = json.dumps({**json.loads(BODY), "stream": True}).encode()
USAGE = b'{"choices":[],"usage":{"prompt_tokens":4310,"prompt_tokens_details":{"cached_tokens":16}}}'
EVENT = b"data: " + USAGE + b"\n\n"
LONG = {"model": "tiny", "messages": [{"role": "user", "content": "Say something. " * 2000}]}
CREATED = b'event: response.created\ndata: {"type":"response.created","response":{"instructions":"\\"type\\""}}\n\n'
IN_PROGRESS = b'event: response.in_progress\ndata: {"type":"response.in_progress"}\n\n'
OUTPUT = b'event: response.output_item.added\ndata: {"type": "response.output_item.added"}\n\n'
DELTA = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"x"}\n\n'


def records(harness: Harness) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = told(harness.router.services.decisions, 0, 9)["decisions"]
    return found


async def counts(harness: Harness, name: str) -> dict[str, float]:
    """Observations of a histogram, by the kind of response."""
    _, text = await harness.admin("GET", "/metrics")
    return {labels.get("response", ""): n for labels, n in samples(text).get(f"warmpath_router_{name}_count", [])}


async def test_a_plain_response_has_a_latency_and_no_ttft(replica: FakeReplica) -> None:
    replica.script = answering(USAGE)
    async with routed(config([replica])) as harness:
        await harness.chat()
        (one,) = records(harness)

        assert (one["streamed"], one["ttft_s"]) == (False, None)
        assert one["latency_s"] is not None
        assert await counts(harness, "latency_seconds") == {"plain": 1}
        assert await counts(harness, "ttft_seconds") == await counts(harness, "reuse_ttft_seconds") == {}


async def test_a_streamed_response_has_both(replica: FakeReplica) -> None:
    released = asyncio.Event()

    async def slow(call: Call) -> None:
        await call.send(STREAM_HEAD, chunk(b"data: {}\n\n"))
        await released.wait()
        await call.send(chunk(EVENT), LAST_CHUNK)

    replica.script = slow
    async with routed(config([replica])) as harness:
        task = asyncio.create_task(harness.chat(STREAM))
        load = harness.router.balancer.loads.load("replica-0")
        await harness.until(lambda: load.running and not load.waiting, "the first token")
        later = asyncio.get_running_loop().call_later(0.1, released.set)
        await task
        (one,) = records(harness)
        later.cancel()

        assert one["streamed"] is True
        assert one["latency_s"] >= one["ttft_s"] + 0.1
        assert await counts(harness, "latency_seconds") == {"streamed": 1}
        assert await counts(harness, "ttft_seconds") == await counts(harness, "reuse_ttft_seconds") == {"": 1}


async def test_prefill_rates_are_learnt_from_streamed_responses_only(replica: FakeReplica) -> None:
    async with routed(config([replica], settings=LowestCostSettings())) as harness:
        prefill = harness.router.balancer.loads.load("replica-0").prefill
        replica.script = answering(USAGE)
        await harness.chat(json.dumps(LONG).encode())
        assert prefill.samples == 0

        replica.script = streaming(EVENT)
        await harness.chat(json.dumps({**LONG, "stream": True}).encode())
        assert prefill.samples == 1


async def test_embeddings_never_have_a_first_token(replica: FakeReplica) -> None:
    replica.script = answering(USAGE)
    body = json.dumps({"model": "tiny", "input": "A text.", "stream": True}).encode()
    async with routed(config([replica])) as harness:
        async with harness.connect() as client:
            await client.send(post(b"/v1/embeddings", body))
            await client.answer()

        assert await counts(harness, "latency_seconds") == {"plain": 1}
        assert await counts(harness, "ttft_seconds") == {}


@pytest.mark.parametrize("together", [False, True])
async def test_events_of_the_responses_api_that_precede_the_first_token_are_not_it(
    replica: FakeReplica, together: bool
) -> None:
    released = asyncio.Event()
    before = [CREATED + IN_PROGRESS] if together else [CREATED, IN_PROGRESS]

    async def slow(call: Call) -> None:
        await call.send(STREAM_HEAD)
        for events in before:
            await call.send(chunk(events))
        await released.wait()
        await call.send(chunk(OUTPUT), chunk(DELTA), LAST_CHUNK)

    replica.script = slow
    body = json.dumps({"model": "tiny", "input": "Say something.", "stream": True}).encode()
    async with routed(config([replica])) as harness, harness.connect() as client, asyncio.timeout(DEADLINE_S):
        await client.send(post(b"/v1/responses", body))
        seen = await client.read_until(IN_PROGRESS)
        assert harness.router.balancer.loads.load("replica-0").waiting_tokens > 0
        asyncio.get_running_loop().call_later(0.1, released.set)
        seen += await client.read_until(LAST_CHUNK)
        await harness.at_rest()
        (one,) = records(harness)

        assert [event in seen for event in (CREATED, IN_PROGRESS, OUTPUT, DELTA)] == [True] * 4
        assert 0.1 <= one["ttft_s"] <= one["latency_s"]
        assert await counts(harness, "ttft_seconds") == {"": 1}


async def test_what_waits_of_a_plain_request_goes_when_a_later_stream_has_its_first_token(replica: FakeReplica) -> None:
    released = asyncio.Event()

    async def engine(call: Call) -> None:
        if json.loads(call.body).get("stream"):
            await call.send(STREAM_HEAD, chunk(EVENT), LAST_CHUNK)
        else:
            await released.wait()
            await answering(USAGE)(call)

    replica.script = engine
    async with routed(config([replica])) as harness:
        load = harness.router.balancer.loads.load("replica-0")
        load.prefill.learn(1000, 10.0)  # 100 tokens/s: no clock will have it done before
        plain = asyncio.create_task(harness.chat(json.dumps(LONG).encode()))
        await replica.wait_calls(1)
        assert load.waiting_tokens > 5000

        await harness.chat(STREAM)
        assert (load.running, load.waiting_tokens) == (1, 0)
        released.set()
        await plain
        await harness.at_rest()
