"""A coding agent's conversation through a router to stand-in replicas: it stays where its turns are cached."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from routing.schema import LowestCostSettings, ReplicaConfig, RouterConfig
from tests.routing.proxy.harness import Harness, config, decision_page, get, post, routed
from tests.routing.standin.replica_process import replica_process

SYSTEM = [{"type": "text", "text": "You are an agent that reads files. " * 60, "cache_control": {"type": "ephemeral"}}]
TOOLS = [{"name": "read", "description": "Reads a file.", "input_schema": {"type": "object"}}]
JSON = [b"Content-Type: application/json"]


@pytest.fixture(scope="module")
def standins() -> Iterator[RouterConfig]:
    """A pool of three stand-in replicas."""
    with ExitStack() as stack:
        ports = [stack.enter_context(replica_process("--enable-auto-tool-choice")).port for _ in range(3)]
        replicas = tuple(
            ReplicaConfig(name=f"replica-{number}", url=f"http://127.0.0.1:{port}", block_tokens=16)
            for number, port in enumerate(ports)
        )
        whole = config([], settings=LowestCostSettings(), models=("tiny",))
        yield replace(whole, pools=(replace(whole.pools[0], replicas=replicas),))


async def ask(harness: Harness, path: bytes, body: dict[str, Any]) -> Any:
    async with harness.connect() as client:
        await client.send(post(path, json.dumps(body).encode(), JSON))
        response = await client.read_response()
    assert response.status == 200, response.body
    return response


def decisions(harness: Harness) -> list[dict[str, Any]]:
    page: list[dict[str, Any]] = decision_page(harness.router.services.decisions, 0, 99)["decisions"]
    return page


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_each_turn_finds_the_turns_before_it(standins: RouterConfig, is_streamed: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": f"Stream: {is_streamed}. What do the files say? " * 20}]
    request = {"model": "tiny", "max_tokens": 40, "system": SYSTEM, "tools": TOOLS, "stream": is_streamed}
    async with routed(standins) as harness:
        for number in range(4):
            counted = json.loads(
                (await ask(harness, b"/v1/messages/count_tokens", request | {"messages": messages})).body
            )
            await ask(harness, b"/v1/messages", request | {"messages": messages})
            assert decisions(harness)[-1]["prompt_tokens"] == counted["input_tokens"]
            call = {"type": "tool_use", "id": f"call_{number}", "name": "read", "input": {"path": f"{number}.txt"}}
            result = {"type": "tool_result", "tool_use_id": f"call_{number}", "content": "A line. " * 30}
            messages = [
                *messages,
                {"role": "assistant", "content": [{"type": "text", "text": "I read it."}, call]},
                {"role": "user", "content": [{**result, "cache_control": {"type": "ephemeral"}}]},
            ]
        turns = decisions(harness)[1::2]

    assert len({turn["replica"] for turn in turns}) == 1
    for before, turn in pairwise(turns):
        assert turn["cached_tokens"] >= before["prompt_tokens"] - 40
        assert abs(turn["hit_tokens"] - turn["cached_tokens"]) < 0.3 * turn["prompt_tokens"]
    assert [turn["ttft_s"] is not None for turn in turns] == [is_streamed] * 4


async def test_stored_responses_are_found_and_continued(standins: RouterConfig) -> None:
    async with routed(standins) as harness:
        previous = None
        for number in range(4):
            turn = {"model": "tiny", "input": f"Question {number}. " * 40, "max_output_tokens": 20}
            made = await ask(harness, b"/v1/responses", turn | ({"previous_response_id": previous} if previous else {}))
            previous = json.loads(made.body)["id"]
            async with harness.connect() as client:
                await client.send(get(b"/v1/responses/" + previous.encode()))
                found = await client.read_response()
            assert (json.loads(found.body), found.replica) == (json.loads(made.body), made.replica)
    assert len({decision["replica"] for decision in decisions(harness)}) == 1
