"""Large bodies are read by another process, treated like small ones, and delay no other request."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections import Counter, deque
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from routing.balancing.request import read_body
from routing.http.response import RejectedRequestError
from routing.paths import BODIES
from routing.prompt import parsing
from routing.prompt.parsing import LARGE_BYTES
from routing.proxy import large_bodies
from routing.proxy.client_connection import READ_BYTES, ClientConnection
from routing.proxy.large_bodies import LargeBodies, read_in_process, unpack_result
from routing.schema import Alias, Caps, LowestCostSettings
from routing.types import BodyError
from tests.fakes.replica import Call, answering, plain_answer
from tests.routing.proxy.harness import CHAT, Harness, api_key, bearer, config, post, routed, with_keys

USAGE = b'{"usage":{"prompt_tokens":9000,"prompt_tokens_details":{"cached_tokens":0}}}'
FACTS = ("data", "ids", "is_text", "message_ends", "reads_cache", "rendering", "salt", "system_end", "tools_end")
SMALL = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Go on."}]}).encode()


def large(text: str = 'a \\ b " c é ', size: int = LARGE_BYTES, **members: Any) -> bytes:
    """A chat of more than ``size`` bytes."""
    content = text * (size // len(text) + 1)
    return json.dumps({"model": "tiny", "messages": [{"role": "user", "content": content}], **members}).encode()


def process_of(harness: Harness) -> subprocess.Popen[bytes]:
    process = harness.router.services.large_bodies._process
    assert process is not None
    return process


@pytest.mark.parametrize("path", sorted(BODIES))
def test_the_process_reads_bodies_as_the_router_does(path):
    members = {"prompt": [1, 2], "input": "a", "instructions": "b", "tools": [{"name": "f"}], "cache_salt": "salt"}
    members["prompt_logprobs"] = 1
    body = large("text ", 10, stream=True, session_id="s", reasoning_effort="high", **members)
    in_router, in_process = read_body(path, body), unpack_result(*read_in_process(path, body))

    assert (in_process.session_key, in_process.is_plain, in_process.omits_usage) == ("s", False, in_router.omits_usage)
    assert {name: getattr(in_process.prompt, name) for name in FACTS} == {
        name: getattr(in_router.prompt, name) for name in FACTS
    }


async def test_a_large_body_is_forwarded_byte_by_byte_and_placed_by_its_prefix(two):
    bodies = []

    async def script(call: Call) -> None:
        bodies.append(call.body)
        await call.send(plain_answer(USAGE))

    for replica in two:
        replica.script = script
    whole = config(two, settings=LowestCostSettings())
    async with routed(whole) as harness:
        responses = [await harness.chat(large(user="somebody")) for _ in range(3)]
        placed = harness.decisions
        assert process_of(harness).poll() is None
        await harness.at_rest()

    assert bodies == [large(user="somebody")] * 3
    assert len({response.replica for response in responses}) == 1
    assert [decision["hit_tokens"] > 0 for decision in placed] == [False, True, True]


async def test_other_connections_are_read_after_each_large_read(replica, monkeypatch):
    replica.script = answering(USAGE)
    loop, read = asyncio.get_running_loop(), ClientConnection.data_received
    turns, reads = [0], Counter[int]()

    def count_turn() -> None:
        turns[0] += 1
        ticks.append(loop.call_soon(count_turn))

    def count_read(self: ClientConnection, data: bytes) -> None:
        reads[turns[0]] += len(data) >= READ_BYTES
        read(self, data)

    monkeypatch.setattr(ClientConnection, "data_received", count_read)
    ticks: deque[asyncio.Handle] = deque(maxlen=1)
    async with routed(config([replica])) as harness:
        count_turn()
        response = await harness.chat(large("text ", 6 << 20))
        ticks[-1].cancel()

    assert response.status == 200
    assert reads.total() >= 20
    assert max(reads.values()) == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[" + b"1," * LARGE_BYTES + b"1]", "must be a JSON object"),
        (large() + b"}", "not valid JSON"),
        (b'{"messages":[' + b"{}," * 300_000 + b"{}]}", "lists and objects"),
        (large(n=129), "at most 128"),
    ],
)
async def test_an_invalid_large_body_is_rejected_as_a_small_one(replica, body, message):
    async with routed(config([replica])) as harness:
        response = await harness.chat(body)
        assert (response.status, message in response.error["message"]) == (400, True), response.error
        assert (await harness.chat(SMALL)).status == 200
        await harness.at_rest()


async def test_the_event_loop_decodes_no_large_body_to_set_members(replica, monkeypatch):
    whole = with_keys([replica], api_key(tenant="a"))
    pool = msgspec.structs.replace(whole.pools[0], aliases=(Alias("gpt", "tiny"),), caps=Caps(max_tokens=7))
    bodies: list[dict[str, Any]] = []
    sizes: list[int] = []
    decoded = parsing._members_of

    async def script(call: Call) -> None:
        bodies.append(json.loads(call.body))
        await call.send(plain_answer(USAGE))

    def sized(body: bytes) -> dict[str, msgspec.Raw]:
        sizes.append(len(body))
        return decoded(body)

    monkeypatch.setattr(parsing, "_members_of", sized)
    replica.script = script
    members = {"model": "gpt", "stream": True, "stream_options": {"include_obfuscation": False}, "cache_salt": "mine"}
    sent = large(**members)
    async with routed(msgspec.structs.replace(whole, pools=(pool,))) as harness:
        assert (await harness.chat(sent, [bearer()])).status == 200
        twice = await harness.chat(b'{"model":"gpt",' + sent[1:], [bearer()])
        assert (twice.status, "the same name" in twice.error["message"]) == (400, True)

    (body,) = bodies
    assert len(body.pop("cache_salt")) == 32
    assert body.pop("stream_options") == {"include_obfuscation": False, "include_usage": True}
    rest = {name: value for name, value in json.loads(sent).items() if name not in {"cache_salt", "stream_options"}}
    assert body == rest | {"model": "tiny", "max_tokens": 7}
    assert max(sizes, default=0) < 100


async def test_a_killed_process_costs_one_body_and_is_replaced(replica):
    replica.script = answering(USAGE)
    async with routed(config([replica])) as harness:
        assert (await harness.chat(large())).status == 200
        first = process_of(harness)
        os.kill(first.pid, signal.SIGSTOP)
        pending = [asyncio.ensure_future(harness.chat(large())) for _ in range(3)]
        await harness.until(lambda: harness.router.services.in_flight == 3, "all to wait")
        assert (await harness.chat(SMALL)).status == 200, "who has a small one does not wait"
        os.kill(first.pid, signal.SIGKILL)
        assert sorted([(await it).status for it in pending]) == [200, 200, 503]
        assert process_of(harness).pid != first.pid
        await harness.at_rest()


async def test_a_process_that_ended_between_two_bodies_costs_none(replica):
    replica.script = answering(USAGE)
    async with routed(config([replica])) as harness:
        assert (await harness.chat(large())).status == 200
        first = process_of(harness)
        first.kill()
        await asyncio.to_thread(first.wait)
        assert (await harness.chat(large())).status == 200
        assert process_of(harness).pid != first.pid


async def test_the_process_ends_with_its_router(replica):
    replica.script = answering(USAGE)
    async with routed(config([replica])) as harness:
        await harness.chat(large())
        process, streams = process_of(harness), harness.router.services.large_bodies._streams
        assert streams is not None
        streams[1].transport.abort()  # as the kernel does for a killed process
        assert await asyncio.to_thread(process.wait, 10) == 0


async def test_a_process_that_hangs_is_killed(replica, monkeypatch):
    replica.script = answering(USAGE)
    async with routed(config([replica])) as harness:
        await harness.chat(large())
        monkeypatch.setattr(large_bodies, "READ_S", 0.3)
        os.kill(process_of(harness).pid, signal.SIGSTOP)
        assert (await harness.chat(large())).status == 503
        monkeypatch.setattr(large_bodies, "READ_S", 10.0)
        assert (await harness.chat(large())).status == 200


# --- the queue ---


class Queue:
    """A queue of large bodies without a router; ``ended`` names those that were read or rejected, in this order."""

    def __init__(self) -> None:
        self.bodies = LargeBodies()
        self.ended: list[str] = []
        self.rejections: dict[str, BodyError | RejectedRequestError] = {}
        self._has_changed = asyncio.Event()

    def put(self, name: str, body: bytes, owner: str | None) -> None:
        def on_rejected(error: BodyError | RejectedRequestError) -> None:
            self.rejections[name] = error
            self._end(name)

        self.bodies.read("/v1/chat/completions", body, lambda _: self._end(name), on_rejected, owner=owner)

    async def wait_ended(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.ended) < count:
                self._has_changed.clear()
                await self._has_changed.wait()

    def _end(self, name: str) -> None:
        self.ended.append(name)
        self._has_changed.set()


@pytest.fixture
async def queue() -> AsyncIterator[Queue]:
    found = Queue()
    yield found
    found.bodies.close()


async def test_many_large_bodies_of_one_key_do_not_delay_a_small_one_of_another(queue):
    body, small = large("word ", 8 << 20), large("word ", 300_000)
    for number in range(20):
        queue.put(f"red {number}", body, "red")
    await queue.wait_ended(1)
    queue.put("blue", small, "blue")
    await queue.wait_ended(21)

    order = [name for name in queue.ended if name != "blue"]
    assert order == [f"red {number}" for number in range(20)]
    assert queue.ended.index("blue") <= 2  # after the one that was being read
    assert queue.rejections == {}


async def test_a_large_body_has_its_turn_among_many_smaller_ones_of_another_key(queue):
    small = large("word ", 300_000)
    for number in range(10):
        queue.put(f"red {number}", small, "red")
    queue.put("blue", large("word ", 4 * 300_000), "blue")
    await queue.wait_ended(11)

    assert queue.ended.index("blue") <= 4  # as many bytes were read before it


async def test_a_key_has_at_most_half_of_the_queue(queue):
    body = large("word ", 300_000)
    for number in range(large_bodies.MAX_WAITING_OF_ONE):
        queue.put(f"red {number}", body, "red")
    with pytest.raises(RejectedRequestError, match="too many large bodies wait") as raised:
        queue.put("red", body, "red")
    for number in range(large_bodies.MAX_WAITING // 2):
        queue.put(f"blue {number}", body, f"blue {number}")
    with pytest.raises(RejectedRequestError, match="too many large bodies wait"):
        queue.put("green", body, "green")

    assert (raised.value.status, raised.value.retry_after_s) == (503, 1)


async def test_a_body_that_has_waited_for_30_s_is_rejected(queue, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(large_bodies, "monotonic", lambda: clock[0])
    body = large("word ", 300_000)
    for name in ("first", "second", "third"):
        queue.put(name, body, "red")
    clock[0] += 20.0
    queue.put("late", body, "red")
    clock[0] += 10.1
    await queue.wait_ended(4)

    assert queue.ended == ["first", "second", "third", "late"]
    assert set(queue.rejections) == {"second", "third"}
    rejection = queue.rejections["second"]
    assert isinstance(rejection, RejectedRequestError)
    assert (rejection.status, rejection.message) == (503, "the body has waited 30 s to be read")


async def test_cancelled_bodies_are_dropped_and_the_queue_is_bounded(replica, monkeypatch):
    monkeypatch.setattr(large_bodies, "MAX_WAITING", 2)
    monkeypatch.setattr(large_bodies, "READ_S", 600.0)  # a slow machine: the process is stopped for longer than usual
    replica.script = answering(USAGE)
    async with routed(config([replica])) as harness:
        assert (await harness.chat(large())).status == 200
        os.kill(process_of(harness).pid, signal.SIGSTOP)
        async with harness.connect() as client:
            await client.send(post(CHAT, large()))
            await harness.until(lambda: harness.router.services.in_flight == 1, "it to be taken")
        await harness.until(lambda: harness.router.services.in_flight == 0, "it to be given up")
        pending = [asyncio.ensure_future(harness.chat(large())) for _ in range(2)]
        await harness.until(lambda: harness.router.services.in_flight == 2, "both to wait")
        rejected = await harness.chat(large())
        assert (rejected.status, rejected.headers["retry-after"]) == (503, "1")
        os.kill(process_of(harness).pid, signal.SIGCONT)
        assert [(await it).status for it in pending] == [200, 200]
        await harness.at_rest()
