"""Streams that another replica continues after theirs has failed: the client sees the stream that nothing disturbed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from routing.health.circuit_breaker import Cause
from routing.proxy.continuation import (
    DONE_EVENT,
    MAX_HELD_BYTES,
    MAX_STREAM_BYTES,
    RESERVED_BYTES,
    TURN_S,
    KeptStream,
    NotContinuableError,
    Splice,
    StreamBudget,
)
from routing.schema import BreakerConfig, Limits, StreamFailure
from routing.standin.errors import CrashAfterChunks, NoFault
from routing.standin.replica import Replica, parse_settings
from routing.standin.responses import replica_key
from routing.standin.server import make_app
from routing.types import ReplicaId
from tests.fakes.replica import Call, FakeReplica, Script, answering, plain_answer
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

    @classmethod
    def of(cls, body: bytes) -> Stream:
        events = [event.removeprefix(b"data: ") for event in body.split(b"\n\n") if event]
        return cls([json.loads(event) for event in events if event != b"[DONE]"], events[-1] == b"[DONE]")

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
    return Stream.of(response.body)


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
async def test_a_stream_goes_on_as_if_nothing_had_happened(body, how):
    path = CHAT if "messages" in body else COMPLETIONS
    async with (
        stand_ins(2, "--step-s", "0.005") as replicas,
        routed(config(replicas, breaker=PATIENT, limits=GENEROUS)) as harness,
    ):
        whole = await stream(harness, path, {**body, "max_tokens": 24})
        for chunks in range(2, 24, 3):
            broken = replicas[chunks % 2]
            crash(broken, chunks, how)
            for _ in replicas:  # at least one of them is placed there
                assert_same(await stream(harness, path, {**body, "max_tokens": 24}), whole)
            broken.replica.set_fault(NoFault())
        counts = await results(harness)
        await harness.at_rest()
    assert counts.pop("continued") >= 1  # a slow machine sends many tokens in one event, and few streams break
    assert counts == {}


# --- what is kept, and the seam ---

HEAD = {"id": "chatcmpl-1", "created": 1, "model": "tiny"}


def events_of(pieces: Iterable[str], *, is_chat: bool, head: dict[str, Any] = HEAD, reason: str | None = None) -> bytes:
    """An engine's events: the role first in a chat, one event for each piece, and the finish reason with the last."""
    texts = list(pieces)
    ends = [None] * (len(texts) - 1) + [reason]
    parts = [{"delta": {"content": text}} if is_chat else {"text": text} for text in texts]
    choices = [{"index": 0, **part, "finish_reason": end} for part, end in zip(parts, ends, strict=True)]
    if is_chat:
        choices.insert(0, {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})
    return b"".join(b"data: %b\n\n" % json.dumps({**head, "choices": [choice]}).encode() for choice in choices)


def kept_stream(body: dict[str, Any], events: bytes, *, is_chat: bool = True, wants_usage: bool = False) -> KeptStream:
    request = {**(QUESTION if is_chat else PROMPT), **body}
    kept = KeptStream(StreamBudget(), json.dumps(request).encode(), is_chat=is_chat, wants_usage=wants_usage)
    kept.add(events)
    return kept


def cut_up(data: Any, draw: Callable[[], int]) -> list[Any]:
    """A text or bytes in pieces of drawn lengths."""
    pieces = []
    while data:
        size = draw()
        pieces.append(data[:size])
        data = data[size:]
    return pieces


@given(st.data(), st.booleans(), st.text(st.sampled_from("ab \n\u00e9\u4e16\U0001f600"), min_size=1, max_size=40))
def test_no_character_is_lost_or_doubled_at_the_seam(data, is_chat, text):
    sizes = st.integers(1, 7)
    pieces = cut_up(text, lambda: data.draw(sizes))
    cut = data.draw(st.integers(0, len(pieces)))
    kept = kept_stream({}, events_of(pieces[:cut] or [""], is_chat=is_chat), is_chat=is_chat)
    sent = kept.read()
    assert sent.text == "".join(pieces[:cut])

    seen, reads = sent, []
    for number in (2, 3):  # the second replica fails too, within an event, and the third ends the text
        rest = text[len(kept.context(seen)) :]  # what an engine generates after that text
        further = cut_up(rest, lambda: data.draw(sizes)) or [""]
        splice = Splice(kept, seen, tokens=cut)
        head = {**HEAD, "id": f"chatcmpl-{number}", "created": number}
        events = events_of(further, is_chat=is_chat, head=head, reason="stop") + DONE_EVENT
        kept.settle()
        if number == 2:
            events = events[: data.draw(st.integers(0, events.index(b'"stop"')))]
        reads += map(splice.feed, cut_up(events, lambda: data.draw(st.integers(1, 99))))
        seen = kept.read()
    shown = Stream.of(b"".join(reads))
    assert sent.text + shown.text == seen.text == text
    assert shown.finish_reasons == ["stop"]
    assert shown.is_done
    assert {chunk["id"] for chunk in shown.chunks} == {"chatcmpl-1"}
    assert not any("role" in choice.get("delta", {}) for choice in shown.choices)


@pytest.mark.parametrize(
    ("sent_text", "rest", "shown"),
    [
        ("one EN", ["D two"], ""),  # the first engine sent the beginning of the stop string
        ("one E", ["N", "D two"], "N"),
        ("one EN", ["E", "ND two"], "END two"),  # the second engine looks for those in its own text
        ("one", [" two"], " two"),
        ("END one", [" two"], " two"),  # not at the seam
    ],
)
def test_a_stop_string_across_the_seam_ends_the_text(sent_text, rest, shown):
    kept = kept_stream({"stop": ["END", "unused"]}, events_of([sent_text], is_chat=True))
    splice = Splice(kept, kept.read(), tokens=2)
    seen = Stream.of(splice.feed(events_of(rest, is_chat=True, reason="length") + DONE_EVENT))
    assert seen.text == shown
    assert seen.finish_reasons == (["length"] if shown in {"END two", " two"} else ["stop"])
    assert seen.is_done


def test_limits_of_the_rest_are_what_is_left():
    body = {"max_tokens": 10, "min_tokens": 3, "max_completion_tokens": 9}
    kept = kept_stream(body, events_of(["Hello", " "], is_chat=True))
    sent = kept.read()
    rest = json.loads(kept.rest(sent, tokens=2) or b"")
    assert [rest[name] for name in body] == [8, 1, 7]
    assert rest["messages"][-1] == {"role": "assistant", "content": "Hello"}  # templates may strip the space
    assert (rest["continue_final_message"], rest["add_generation_prompt"]) == (True, False)
    assert kept.rest(sent, tokens=9) is None  # nothing is left
    kept = kept_stream({}, events_of(["Hello", " "], is_chat=False), is_chat=False)
    rest = json.loads(kept.rest(kept.read(), tokens=2) or b"")
    assert (rest["prompt"], rest["max_tokens"]) == (PROMPT["prompt"] + "Hello ", 14)  # 16 is the default of completions


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"n": 2}, "choices"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": 0}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "structured_output"),
        ({"structured_outputs": {"regex": "a"}}, "structured_output"),
        ({"tool_choice": "required"}, "structured_output"),
        ({"presence_penalty": 0.1}, "penalties"),
        ({"seed": 1}, "seed"),
        ({"store": True}, "parameters"),
        ({"stream_options": {"continuous_usage_stats": True}}, "parameters"),
        ({"continue_final_message": True}, "parameters"),
        ({"messages": "text"}, "prompt"),
        ({"regex": "a"}, "structured_output"),
        ({"include_reasoning": False}, "reasoning"),
        ({"extra": [[]] * 60_000}, "too_long"),
    ],
)
def test_a_request_whose_rest_would_be_another_is_not_continued(body, reason):
    with pytest.raises(NotContinuableError, match=f"^{reason}$"):
        kept_stream(body, events_of(["Hello"], is_chat=True)).read()


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"delta": {"tool_calls": [{"index": 0}]}}, "tools"),
        ({"delta": {"reasoning": "Hm"}}, "reasoning"),
        ({"delta": {"content": "a"}, "logprobs": {"content": []}}, "logprobs"),
        ({"delta": {"content": "<think>"}}, "reasoning"),
        ({"text": "a"}, "response"),
    ],
)
def test_a_response_whose_rest_would_be_another_is_not_continued(choice, reason):
    event = b"data: %b\n\n" % json.dumps({**HEAD, "choices": [{"index": 0, **choice}]}).encode()
    with pytest.raises(NotContinuableError, match=f"^{reason}$"):
        kept_stream({}, event).read()


def test_a_stream_whose_client_has_an_error_is_not_continued():
    with pytest.raises(NotContinuableError, match="response"):
        kept_stream({}, events_of(["Hello"], is_chat=True) + b'data: {"error":{"message":"gone"}}\n\n').read()


def test_an_endless_event_of_the_rest_is_refused():
    kept = kept_stream({}, events_of(["Hello"], is_chat=True))
    splice = Splice(kept, kept.read(), tokens=1)
    splice.feed(b"x" * MAX_HELD_BYTES)
    with pytest.raises(ValueError, match="bytes"):
        splice.feed(b"x")


def test_streams_of_a_dead_replica_are_read_one_by_one():
    budget = StreamBudget()
    assert [round(budget.turn_in_s(5.0), 3) for _ in range(3)] == [0.0, TURN_S, 2 * TURN_S]
    assert budget.turn_in_s(9.0) == 0.0


def test_a_seed_is_no_obstacle_where_nothing_is_drawn():
    kept = kept_stream({"seed": 1, "temperature": 0, "n": 1, "tools": []}, events_of(["Hello"], is_chat=True))
    assert kept.read().text == "Hello"


def test_kept_streams_are_bounded_one_by_one_and_together():
    budget = StreamBudget(max_bytes=3 * RESERVED_BYTES)
    event = events_of(["Hello"], is_chat=True)
    streams = [KeptStream(budget, b"{}", is_chat=True, wants_usage=False) for _ in range(4)]
    streams[0].add(event)
    assert budget.used_bytes == 3 * RESERVED_BYTES
    with pytest.raises(NotContinuableError, match="memory"):
        streams[3].read()
    for kept in streams:
        kept.close()
    assert budget.used_bytes == 0
    long = KeptStream(StreamBudget(), b"{}", is_chat=True, wants_usage=False)
    for _ in range(MAX_STREAM_BYTES // 64 + 1):
        long.add(b"")
    with pytest.raises(NotContinuableError, match="too_long"):
        long.read()


# --- engines that hang, reject, and requests that end ---


def says(*texts: str, ends: bool = True) -> Script:
    """An engine that streams these texts; ``ends``: and then the end, else nothing more."""

    async def script(call: Call) -> None:
        if call.line.startswith(b"POST /tokenize"):
            count = len(json.loads(call.body)["prompt"].split())
            await call.send(plain_answer(json.dumps({"count": count}).encode()))
            return
        events = events_of(texts, is_chat=True, reason="stop" if ends else None)
        await call.begin_stream(events)
        if ends:
            await call.end_stream(DONE_EVENT)
        else:
            await call.wait_gone()

    return script


CHATTING = {**QUESTION, "max_tokens": 50}


async def started_stream(
    harness: Harness, two: list[FakeReplica]
) -> tuple[asyncio.Task[Stream], FakeReplica, FakeReplica]:
    """A stream, its replica, and the other one."""
    task = asyncio.create_task(stream(harness, CHAT, CHATTING))
    await harness.until(lambda: sum(len(replica.calls) for replica in two), "the request")
    return task, *sorted(two, key=lambda replica: not replica.calls)


async def test_a_silent_stream_goes_on_elsewhere_and_the_record_says_so(two):
    for replica in two:
        replica.script = says("The prefix", " cache", ends=False)
    async with routed(config(two, limits=Limits(idle_timeout_s=0.3))) as harness:
        task, first, other = await started_stream(harness, two)
        other.script = says(" keeps blocks.")
        seen = await task
        (decision,) = harness.decisions
        counted = samples((await harness.admin("GET", "/metrics"))[1])["warmpath_router_stream_failures_total"]
        await harness.at_rest()
    assert (seen.text, seen.finish_reasons, seen.errors) == ("The prefix cache keeps blocks.", ["stop"], [])
    assert decision["continued_after"] == [{"replica": first.name, "tokens": 3}]
    assert counted == [({"pool": "chat", "replica": first.name, "result": "continued"}, 1.0)]
    assert decision["replica"] == other.name
    rest = json.loads(other.calls[-1].body)
    assert (rest["max_tokens"], rest["messages"][-1]["content"]) == (47, "The prefix cache")


async def test_the_streams_of_an_ejected_engine_go_on_elsewhere(two):
    for replica in two:
        replica.script = says("The prefix", " cache", ends=False)
    async with routed(config(two, breaker=BreakerConfig(stall_s=0.2))) as harness:
        task, first, other = await started_stream(harness, two)
        other.script = says(" keeps blocks.")
        harness.breakers.record_stall(ReplicaId(first.name), "silent", Cause.STALLED)
        assert (await task).text == "The prefix cache keeps blocks."


@pytest.mark.parametrize("status", [400, 500])
async def test_a_rest_that_is_rejected_ends_the_stream_with_an_error(two, status):
    for replica in two:
        replica.script = says("The prefix", ends=False)
    async with routed(config(two, limits=Limits(idle_timeout_s=0.3))) as harness:
        task, _, other = await started_stream(harness, two)
        other.script = answering(b"{}", status=status)
        seen = await task
        await harness.at_rest()
    assert seen.text == "The prefix"
    assert len(seen.errors) == 1
    assert not seen.is_done


async def test_a_client_that_leaves_while_tokens_are_counted_leaves_nothing_behind(two):
    for replica in two:
        replica.script = says("The prefix", ends=False)
    async with routed(config(two, limits=Limits(idle_timeout_s=0.2))) as harness, harness.connect() as client:
        await client.send(post(CHAT, json.dumps({**CHATTING, "model": "tiny", "stream": True}).encode()))
        await harness.until(lambda: sum(len(replica.calls) for replica in two), "the request")
        (other,) = [replica for replica in two if not replica.calls]

        async def silent(call: Call) -> None:
            await call.wait_gone()

        other.script = silent
        await other.wait_calls(1)
        client.writer.close()
        await harness.at_rest()
        assert harness.router.services.stream_budget.used_bytes == 0


async def test_a_pool_may_end_its_streams(two):
    for replica in two:
        replica.script = says("The prefix", ends=False)
    whole = config(two, limits=Limits(idle_timeout_s=0.2))
    ended = replace(whole, pools=(replace(whole.pools[0], on_stream_failure=StreamFailure.END),))
    async with routed(ended) as harness:
        seen = await stream(harness, CHAT, CHATTING)
        assert await results(harness) == {}
    assert (seen.text, len(seen.errors)) == ("The prefix", 1)
    assert sum(len(replica.calls) for replica in two) == 1
