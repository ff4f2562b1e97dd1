"""Stand-in replicas with roles behind a router: the responses are those of a single replica."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest

from routing.schema import LowestCostSettings, PolicyConfig, PoolConfig, ReplicaConfig, ReplicaRole, RouterConfig
from tests.routing.building import SECRET
from tests.routing.proxy.disaggregated import legs
from tests.routing.proxy.harness import Harness, routed
from tests.routing.standin.replica_process import ReplicaProcess, replica_process

FAST = ("--prefill-rate", "200000", "--step-s", "0.002")
CHAT = "/v1/chat/completions"
ROLES = ("prefill", "prefill", "decode", "decode")


@pytest.fixture
def fleet() -> Iterator[list[ReplicaProcess]]:
    with ExitStack() as stack:
        yield [stack.enter_context(replica_process(*FAST, "--role", role)) for role in ROLES]


@asynccontextmanager
async def router_before(fleet: list[ReplicaProcess]) -> AsyncIterator[Harness]:
    members = tuple(
        ReplicaConfig(
            name=f"{role}-{number}", url=f"http://127.0.0.1:{replica.port}", block_tokens=16, role=ReplicaRole(role)
        )
        for number, (replica, role) in enumerate(zip(fleet, ROLES, strict=True))
    )
    policy = PolicyConfig(name="everyday", revision=1, settings=LowestCostSettings())
    pool = PoolConfig(name="chat", policy=policy, models=("tiny",), replicas=members)
    async with routed(RouterConfig(hash_secret=SECRET, pools=(pool,))) as harness:
        yield harness


def body(number: int, **fields: Any) -> dict[str, Any]:
    content = f"{number} " + "word " * 2400  # 3,000 tokens
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 12, **fields}


async def text_of(harness: Harness, number: int) -> str:
    """The text of a response; streamed for odd numbers."""
    is_streamed = number % 2 == 1
    url = f"http://127.0.0.1:{harness.port}{CHAT}"
    async with harness.http.post(url, json=body(number, stream=is_streamed)) as response:
        assert response.status == 200
        data = await response.read()
    if not is_streamed:
        return str(json.loads(data)["choices"][0]["message"]["content"])
    events = [event.removeprefix("data: ") for event in data.decode().split("\n\n") if event]
    assert events.pop() == "[DONE]"
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def texts_of_one_replica(numbers: range) -> list[str]:
    with replica_process(*FAST) as alone:
        responses = [alone.send("POST", CHAT, body(number)).json for number in numbers]
    return [response["choices"][0]["message"]["content"] for response in responses]


async def test_many_requests_at_once_are_prefilled_and_decoded_once_each(fleet: list[ReplicaProcess]) -> None:
    numbers = range(24)
    async with router_before(fleet) as harness:
        texts = await asyncio.gather(*(text_of(harness, number) for number in numbers))
        await harness.at_rest()
        found = await legs(harness)
        _, page = await harness.admin("GET", "/admin/decisions")

    assert texts == texts_of_one_replica(numbers)
    assert Counter({key[1]: value for key, value in found.items()}).keys() == {"used"}
    assert sum(found.values()) == 24
    assert all(value >= 6 for value in found.values())  # both prefill replicas
    external = [
        replica.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer") for replica in fleet
    ]
    computed = [replica.metric("vllm:prompt_tokens_by_source_total", source="local_compute") for replica in fleet]
    assert external[:2] == [0, 0]
    assert sum(external[2:]) > 24 * 2900
    assert sum(computed[2:]) == 24  # the last token of each prompt
    assert all(row["cached_tokens"] < 100 for row in page["decisions"])  # of distinct prompts
    assert {row["replica"] for row in page["decisions"]} == {"decode-2", "decode-3"}


async def test_conversations_stay_at_their_decode_replica_and_need_one_leg(fleet: list[ReplicaProcess]) -> None:
    url = f"http://127.0.0.1:{{}}{CHAT}"
    async with router_before(fleet) as harness:
        for number in range(4):
            asked = body(number)
            for _ in range(3):
                async with harness.http.post(url.format(harness.port), json=asked) as response:
                    message = (await response.json())["choices"][0]["message"]
                asked["messages"] += [
                    {"role": "assistant", "content": message["content"]}, {"role": "user", "content": "Go on."}
                ]  # fmt: skip
        found = await legs(harness)
        _, page = await harness.admin("GET", "/admin/decisions")

    assert sum(value for key, value in found.items() if key[1] == "used") == 4
    assert found["", "skipped", "short"] == 8
    replicas = [row["replica"] for row in page["decisions"]]
    assert all(len(set(replicas[at : at + 3])) == 1 for at in range(0, 12, 3))
    assert all(row["cached_tokens"] > 2900 for at, row in enumerate(page["decisions"]) if at % 3)


async def test_no_client_sees_a_prefill_replica_die(fleet: list[ReplicaProcess]) -> None:
    numbers = range(24)
    fleet[0].fault(kind="slow", factor=20)
    async with router_before(fleet) as harness:
        requests = [asyncio.create_task(text_of(harness, number)) for number in numbers]
        await harness.until(lambda: harness.router.balancer.loads.load("prefill-0").running > 2, "legs there")
        fleet[0].process.kill()
        texts = await asyncio.gather(*requests)
        await harness.at_rest()
        found = await legs(harness)

    assert texts == texts_of_one_replica(numbers)
    assert any(key[:2] == ("prefill-0", "failed") for key in found)


async def test_no_client_sees_a_decode_replica_die_before_its_first_byte(fleet: list[ReplicaProcess]) -> None:
    numbers = range(0, 24, 2)  # not streamed: no byte before the end
    fleet[2].fault(kind="hang")
    async with router_before(fleet) as harness:
        requests = [asyncio.create_task(text_of(harness, number)) for number in numbers]
        load = harness.router.balancer.loads.load("decode-2")
        used = harness.router.services.metrics._prefills
        await harness.until(lambda: sum(used.values()) >= len(numbers) and load.running, "decode legs there")
        fleet[2].process.kill()
        texts = await asyncio.gather(*requests)
        await harness.at_rest()

    assert texts == [text for number, text in enumerate(texts_of_one_replica(range(24))) if number % 2 == 0]
