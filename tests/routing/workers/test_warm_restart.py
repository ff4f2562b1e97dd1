"""A router restarts under load: the hit rate that engines report stays as it was."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from routing.schema import LowestCostSettings, ReplicaConfig, RouterConfig
from tests.routing.proxy.harness import chat_body, config
from tests.routing.standin.replica_process import replica_process
from tests.routing.workers.harness import Process, serving

REPLICAS = 4
DOCUMENTS = 48  # of about 70 blocks of 16 tokens: a third of all caches, or one and a half times each of them
BLOCKS = 2300
CLIENTS = 6
WINDOW = 240  # requests before and after the restart
MAX_LOSS = 0.03  # of the hit rate


@pytest.fixture
def standins() -> Iterator[RouterConfig]:
    with ExitStack() as stack:
        options = (f"--blocks={BLOCKS}", "--prefill-rate=40000")
        ports = [stack.enter_context(replica_process(*options)).port for _ in range(REPLICAS)]
        members = tuple(
            ReplicaConfig(
                name=f"replica-{number}", url=f"http://127.0.0.1:{port}", block_tokens=16, capacity_blocks=BLOCKS
            )
            for number, port in enumerate(ports)
        )
        whole = config([], settings=LowestCostSettings(), models=("tiny",))
        yield replace(whole, pools=(replace(whole.pools[0], replicas=members),))


async def hit_rate(router: Process, requests: Iterator[bytes]) -> float:
    """Cached tokens / prompt tokens of a window of requests, by several clients at once."""
    prompt = cached = 0

    async def client() -> None:
        nonlocal prompt, cached
        for body in requests:
            response = await router.chat(body, [b"Content-Type: application/json"])
            assert response.status == 200, response.body
            usage = json.loads(response.body)["usage"]
            prompt += usage["prompt_tokens"]
            cached += (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return cached / prompt


def window(name: str) -> Iterator[bytes]:
    """Questions about documents of different popularity; windows differ in the questions only."""
    rng = random.Random("warm restart")
    for number in range(WINDOW):
        document = int(DOCUMENTS * rng.random() ** 1.5)
        text = f"Document {document} says: " + f"line {document} of many lines, and more. " * 110
        yield chat_body(text=f"{text} Question {number} of {name}", max_tokens=2)


async def test_the_hit_rate_after_a_restart_is_that_before(standins: RouterConfig, tmp_path: Path) -> None:
    async with serving(tmp_path, standins) as router:
        await hit_rate(router, window("filling"))
        before = await hit_rate(router, window("before"))
        await router.end()
    async with serving(tmp_path, standins) as router:
        after = await hit_rate(router, window("after"))

    assert before > 0.6
    assert after > before - MAX_LOSS
