"""Streams that another replica continues after theirs has failed: the client sees the stream that nothing disturbed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web

from routing.schema import BreakerConfig, Limits
from routing.standin.errors import CrashAfterChunks, NoFault
from routing.standin.replica import Replica, parse_settings
from routing.standin.responses import replica_key
from routing.standin.server import make_app
from tests.routing.proxy.harness import CHAT, Harness, config, post, routed, samples

COMPLETIONS = b"/v1/completions"
FAST = ("--port", "0", "--step-s", "0.001", "--decode-s", "0", "--prefill-rate", "1000000")
QUESTION = {"messages": [{"role": "user", "content": "What is a prefix cache, and why does it matter?"}]}
PROMPT = {"prompt": "A prefix cache is"}


@dataclass
class StandIn:
    """A stand-in replica in this process."""

    name: str
    url: str
    replica: Replica


@asynccontextmanager
async def stand_ins(count: int, *arguments: str) -> AsyncIterator[list[StandIn]]:
    async with AsyncExitStack() as stack:
        started = []
        for number in range(count):
            app = make_app(parse_settings([*FAST, *arguments]))
            runner = web.AppRunner(app)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            started.append(StandIn(f"replica-{number}", f"http://{host}:{port}", app[replica_key]))
        yield started


@dataclass
class Stream:
    """The events of a stream, as its client reads them."""

    chunks: list[dict[str, Any]]
    is_done: bool

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [chunk["choices"][0] for chunk in self.chunks if chunk.get("choices")]

    @property
    def text(self) -> str:
        return "".join(
            choice["delta"].get("content") or "" if "delta" in choice else choice["text"] for choice in self.choices
        )

    @property
    def usage(self) -> dict[str, Any] | None:
        return next((chunk["usage"] for chunk in self.chunks if chunk.get("usage")), None)

    @property
    def finish_reasons(self) -> list[str]:
        return [choice["finish_reason"] for choice in self.choices if choice["finish_reason"] is not None]

    @property
    def errors(self) -> list[Any]:
        return [chunk["error"] for chunk in self.chunks if "error" in chunk]


async def stream(harness: Harness, path: bytes, body: dict[str, Any]) -> Stream:
    whole = json.dumps({"model": "warmpath-demo", "stream": True, **body}).encode()
    response = await harness.send(post(path, whole, [b"Content-Type: application/json"]))
    assert response.status == 200, response.body
    events = [event.removeprefix(b"data: ") for event in response.body.split(b"\n\n") if event]
    return Stream([json.loads(event) for event in events if event != b"[DONE]"], events[-1] == b"[DONE]")


async def results(harness: Harness) -> dict[str, float]:
    _, text = await harness.admin("GET", "/metrics")
    rows = samples(text).get("warmpath_router_stream_failures_total", [])
    return {labels["result"]: value for labels, value in rows}


def crash(replica: StandIn, chunks: int, how: str) -> None:
    replica.replica.set_fault(CrashAfterChunks(chunks=chunks, how=how))


def with_usage(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "stream_options": {"include_usage": True}}


PATIENT = BreakerConfig(failures=1000)
GENEROUS = Limits(retry_floor_per_s=10_000)


def assert_same(disturbed: Stream, whole: Stream) -> None:
    """The client sees one stream, with the text and the sums of the undisturbed one."""
    assert disturbed.errors == []
    assert disturbed.text == whole.text
    assert disturbed.finish_reasons == whole.finish_reasons
    assert disturbed.is_done
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in disturbed.chunks}) == 1
    assert sum("role" in choice.get("delta", {}) for choice in disturbed.choices) == ("delta" in whole.choices[0])
    if whole.usage is None:
        assert disturbed.usage is None
    else:
        counted = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert [disturbed.usage[name] for name in counted] == [whole.usage[name] for name in counted]


@pytest.mark.parametrize("how", ["connection", "engine"])
@pytest.mark.parametrize("body", [QUESTION, PROMPT, with_usage(QUESTION), with_usage(PROMPT)])
async def test_a_stream_goes_on_as_if_nothing_had_happened(body: dict[str, Any], how: str) -> None:
    path = CHAT if "messages" in body else COMPLETIONS
    async with stand_ins(2) as replicas, routed(config(replicas, breaker=PATIENT, limits=GENEROUS)) as harness:
        whole = await stream(harness, path, {**body, "max_tokens": 24})
        for chunks in range(2, 24):
            broken = replicas[chunks % 2]
            crash(broken, chunks, how)
            for _ in replicas:  # at least one of them is placed there
                assert_same(await stream(harness, path, {**body, "max_tokens": 24}), whole)
            broken.replica.set_fault(NoFault())
        counts = await results(harness)
        await harness.at_rest()
    assert counts.pop("continued") >= 3
    assert counts == {}
