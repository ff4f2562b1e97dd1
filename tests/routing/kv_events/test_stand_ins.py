"""A router that follows the KV events of stand-in replicas, beside requests that did not come through it.

Requests that are sent to a replica directly stand for those of other routers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from routing.kv_events.decoding import CLEARED, REMOVED, STORED, decode_batch
from routing.kv_events.engine_blocks import EngineBlocks
from routing.schema import KvEvents, LowestCostSettings, PolicyConfig, PoolConfig, ReplicaConfig, RouterConfig
from tests.routing.building import SECRET
from tests.routing.proxy.harness import Harness, routed
from tests.routing.standin.replica_process import DEADLINE_S, ReplicaProcess, replica_process

EVENTS = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}
CHAT = "/v1/chat/completions"
FAST = ("--prefill-rate", "1000000", "--step-s", "0.0005")


@contextmanager
def stand_ins(count: int, *options: str) -> Iterator[list[ReplicaProcess]]:
    with ExitStack() as stack:
        arguments = (*FAST, *options, "--kv-events-config", json.dumps(EVENTS))
        yield [stack.enter_context(replica_process(*arguments)) for _ in range(count)]


def source(replica: ReplicaProcess) -> dict[str, Any]:
    """Where a replica publishes, as vLLM shows it."""
    return replica.send("GET", "/kv_event_sources").json["0"]


@asynccontextmanager
async def router_before(replicas: list[ReplicaProcess], *, follows: bool = True) -> AsyncIterator[Harness]:
    """A router, which follows the events of all replicas, or estimates."""
    members = []
    for number, replica in enumerate(replicas):
        published = source(replica)
        events = KvEvents(endpoint=published["endpoint"], replay_endpoint=published["replay_endpoint"])
        name = f"replica-{number}"
        url = f"http://127.0.0.1:{replica.port}"
        members.append(ReplicaConfig(name=name, url=url, kv_events=events if follows else None))
    policy = PolicyConfig(name="everyday", revision=1, settings=LowestCostSettings())
    pool = PoolConfig(name="chat", policy=policy, replicas=tuple(members))
    async with routed(RouterConfig(hash_secret=SECRET, pools=(pool,))) as harness:
        if follows:
            await until(harness, lambda rows: all(row["kv_events"][0]["state"] == "following" for row in rows))
        yield harness


async def until(harness: Harness, is_met: Any) -> None:
    """Wait until the rows of /admin/replicas are as wanted."""
    async with asyncio.timeout(DEADLINE_S):
        while not is_met((await harness.admin("GET", "/admin/replicas"))[1]["replicas"]):
            await asyncio.sleep(0.01)


def body(text: str) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 40}


async def send(harness: Harness, text: str) -> dict[str, Any]:
    """Send a request through the router; its usage."""
    url = f"http://127.0.0.1:{harness.port}{CHAT}"
    async with harness.http.post(url, json=body(text)) as response:
        assert response.status == 200
        usage: dict[str, Any] = (await response.json())["usage"]
        return usage


async def send_directly(replica: ReplicaProcess, text: str) -> None:
    response = await asyncio.to_thread(replica.send, "POST", CHAT, body(text))
    assert response.status == 200


async def expected_hits(harness: Harness, text: str) -> list[int]:
    """The cached tokens that the router expects at each replica."""
    document = {"path": CHAT, "body": body(text)}
    _, decision = await harness.admin("POST", "/admin/explain", data=json.dumps(document))
    return [row["hit_tokens"] for row in sorted(decision["candidates"], key=lambda row: row["replica"])]


async def until_hits(harness: Harness, text: str, wanted: Any) -> None:
    """Wait until the expected cached tokens are as wanted."""
    hits: list[int] = []
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not wanted(hits := await expected_hits(harness, text)):
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"the router expects {hits}") from None


DOCUMENT = "some words of a document that everybody asks about " * 150


@pytest.mark.parametrize("follows", [True, False])
async def test_what_others_have_stored_elsewhere_is_found_if_events_are_followed(follows):
    with stand_ins(2) as replicas:
        async with router_before(replicas, follows=follows) as harness:
            for replica in replicas:
                await send_directly(replica, DOCUMENT + "Who wrote it?")
            await send(harness, DOCUMENT + "What is it about?")
            question = DOCUMENT + "When was it written?"
            if follows:
                await until_hits(harness, question, lambda hits: min(hits) > 1500)
            else:
                assert min(await expected_hits(harness, question)) == 0
                assert {row["kv_events"] for row in (await harness.admin("GET", "/admin/replicas"))[1]["replicas"]} == {
                    None
                }


@pytest.mark.parametrize("follows", [True, False])
async def test_what_others_have_evicted_is_no_longer_expected_if_events_are_followed(follows):
    with stand_ins(1, "--blocks", "513") as replicas:
        async with router_before(replicas, follows=follows) as harness:
            await send(harness, DOCUMENT)
            await until_hits(harness, DOCUMENT, lambda hits: hits[0] > 1000)
            for number in range(6):
                await send_directly(replicas[0], f"{number} " + "another prompt of about as many words " * 200)
            if follows:
                await until_hits(harness, DOCUMENT, lambda hits: hits == [0])
                rows = (await harness.admin("GET", "/admin/replicas"))[1]["replicas"]
                assert 0.8 * 512 * 16 < rows[0]["kv_events"][0]["capacity_tokens"] <= 512 * 16
                assert rows[0]["kv_events"][0]["blocks"] <= 512
            else:
                assert (await expected_hits(harness, DOCUMENT))[0] > 1000


async def test_a_reset_of_the_cache_is_known_with_the_next_step():
    with stand_ins(1) as replicas:
        async with router_before(replicas) as harness:
            await send(harness, DOCUMENT)
            await until_hits(harness, DOCUMENT, lambda hits: hits[0] > 1000)
            assert replicas[0].send("POST", "/reset_prefix_cache").json == {"success": True}
            await send_directly(replicas[0], "Hello")
            await until_hits(harness, DOCUMENT, lambda hits: hits == [0])


def test_the_stand_in_publishes_what_its_cache_holds():
    """All blocks that were stored and not removed fit into the cache, and their tokens are those of the prompts."""
    context = zmq.Context()
    try:
        with stand_ins(1, "--blocks", "129") as (replica,), context.socket(zmq.DEALER) as dealer:
            for number in range(8):
                replica.chat(f"{number} " + "words of a prompt " * 60)
            tokens = replica.send("POST", "/tokenize", body("7 " + "words of a prompt " * 60)).json["tokens"]
            replica.send("POST", "/reset_prefix_cache")
            replica.chat("Hello")
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
            dealer.connect(source(replica)["replay_endpoint"])
            dealer.send_multipart([b"", b"\0" * 8])
            blocks, counts, kinds, prompts = EngineBlocks(10_000), [], [], []
            while (frames := dealer.recv_multipart())[-2] != b"\xff" * 8:
                sent = msgspec.msgpack.decode(frames[-1])[1]
                for event, fields in zip(decode_batch(frames[-1]).events, sent, strict=True):
                    kinds.append(event.type)
                    if event.type == STORED:
                        run = blocks.store(event, 0.0)
                        assert run is not None
                        assert run.keys, "its parent is known"
                        prompts += [fields["token_ids"]] if event.parent is None else []
                    elif event.type == REMOVED:
                        blocks.remove(event)
                    else:
                        blocks.clear(is_complete=True)
                counts.append(blocks.blocks)

        assert REMOVED in kinds
        assert kinds.count(CLEARED) == 1
        assert 100 < max(counts) <= 128
        assert prompts[7] == tokens[: len(prompts[7])]
        assert len(prompts) == 8
    finally:
        context.destroy(0)


@pytest.mark.parametrize("text", ["{", '{"buffer_steps": "many"}'])
def test_a_wrong_option_of_the_stand_in_is_an_error(text, capsys):
    from routing.standin.replica import parse_settings

    with pytest.raises(SystemExit):
        parse_settings(["--port", "0", "--kv-events-config", text])
    assert "--kv-events-config" in capsys.readouterr().err
    assert parse_settings(["--port", "0", "--kv-events-config", "{}"]).kv_events is None
