"""A coding agent's conversation through a router to stand-in replicas: it stays where its turns are cached."""

from __future__ import annotations

import asyncio
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
OPTIONS = ("--enable-auto-tool-choice", "--prefill-rate", "400000", "--step-s", "0.002")


@pytest.fixture(scope="module")
def standins() -> Iterator[RouterConfig]:
    """A pool of three stand-in replicas."""
    with ExitStack() as stack:
        ports = [stack.enter_context(replica_process(*OPTIONS)).port for _ in range(3)]
        replicas = tuple(
            ReplicaConfig(name=f"replica-{number}", url=f"http://127.0.0.1:{port}", block_tokens=16)
            for number, port in enumerate(ports)
        )
        whole = config([], settings=LowestCostSettings(), models=("tiny",))
        yield replace(whole, pools=(replace(whole.pools[0], replicas=replicas),))


async def ask(harness: Harness, path: bytes, body: dict[str, Any], headers: list[bytes] = JSON) -> Any:
    async with harness.connect() as client:
        await client.send(post(path, json.dumps(body).encode(), headers))
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


# --- sessions as Claude Code sends them ---

TURNS = 20
AGENT_TOOLS = [
    {
        "name": name,
        "description": f"{name}: what the tool does, when to use it, and what it returns. " * 30,
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    }
    for name in ("Bash", "Edit", "Glob", "Grep", "Read", "Task", "TodoWrite", "Write")
]
AGENT_SYSTEM = "You are an agent for software engineering. Follow the instructions below. " * 80
SUBAGENT_SYSTEM = "You search the files of this project, and report what you found. " * 20


def question(text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text}]}


class Session:
    """One session of an agent: its headers, its user id, and its growing list of messages."""

    def __init__(self, name: str) -> None:
        self.id = f"{name}-1fb2-4b0f-9d37-5b7d3f2a8e10"
        self.user_id = f"user_1f_account_5b1ad4ad-8f6c-4b3a-9f52-0f6f2f0d9d11_session_{self.id}"
        self.messages: list[Any] = [question(f"{name}: find the defect, and correct it. " * 10)]
        self.requests = 0

    def body(self, system: str = AGENT_SYSTEM, messages: list[Any] | None = None, **fields: Any) -> dict[str, Any]:
        """A request, with the attribution line that differs in each one and the mark of the newest message."""
        self.requests += 1
        attribution = f"x-anthropic-billing-header: cc_version=2.1.0; cch={self.requests:05x};"
        *earlier, newest = self.messages if messages is None else messages
        *blocks, last = newest["content"]
        marked = newest | {"content": [*blocks, last | {"cache_control": {"type": "ephemeral"}}]}
        instructions = {"type": "text", "text": system, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
        return {
            "model": "tiny",
            "system": [{"type": "text", "text": attribution}, instructions],
            "tools": AGENT_TOOLS,
            "messages": [*earlier, marked],
            "metadata": {"user_id": self.user_id},
            **fields,
        }

    async def turn(self, harness: Harness, number: int) -> None:
        """Count the tokens, generate, and add the response and the result of a tool."""
        headers = [*JSON, b"X-Claude-Code-Session-Id: " + self.id.encode()]
        body = self.body()
        await ask(harness, b"/v1/messages/count_tokens", body, headers)
        await ask(harness, b"/v1/messages", body | {"max_tokens": 30, "stream": True}, headers)
        call = {"type": "tool_use", "id": f"toolu_{number}", "name": "Read", "input": {"path": f"src/{number}.py"}}
        result = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": f"Line {number}. " * 100}
        self.messages = [
            *self.messages,
            {"role": "assistant", "content": [{"type": "text", "text": f"I read file {number}."}, call]},
            {"role": "user", "content": [result]},
        ]

    async def subagent(self, harness: Harness) -> None:
        """A subagent with the tools of its parent, and a system prompt and messages of its own."""
        headers = [*JSON, b"X-Claude-Code-Session-Id: " + self.id.encode()]
        messages = [question(f"{self.id}: which files use the cache? " * 20)]
        body = self.body(SUBAGENT_SYSTEM, messages, max_tokens=30, stream=True)
        await ask(harness, b"/v1/messages", body, headers)


async def test_twenty_turns_of_an_agent_stay_where_they_are_cached(standins: RouterConfig) -> None:
    session, other = Session("0c9bd1a0"), Session("7e2f94c1")
    async with routed(standins) as harness:
        for number in range(TURNS):
            await session.turn(harness, number)
        turns = [decision for decision in decisions(harness) if decision["streamed"]]
        await session.subagent(harness)
        subagent = decisions(harness)[-1]
        await asyncio.gather(*(agent.turn(harness, TURNS) for agent in (session, other)))

    assert len({turn["replica"] for turn in turns}) == 1
    for before, turn in pairwise(turns):
        assert turn["prompt_tokens"] > before["prompt_tokens"]
        assert turn["cached_tokens"] >= 0.9 * turn["prompt_tokens"]
    assert subagent["replica"] == turns[-1]["replica"]
    assert subagent["cached_tokens"] >= 0.8 * subagent["prompt_tokens"]
