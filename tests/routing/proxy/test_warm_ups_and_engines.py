"""Stand-ins for vLLM: after a warm-up the first real requests find their openings cached."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from routing.schema import RouterConfig, WarmUp
from tests.routing.proxy.harness import Harness, routed
from tests.routing.proxy.warm_ups import joined, opening, row, warming
from tests.routing.standin.replica_process import replica_process

OPENINGS = 16
JSON = [b"Content-Type: application/json"]


@dataclass
class StandIn:
    """As the harness's configuration wants it."""

    name: str
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


async def cached_ratio(harness: Harness, number: int, question: str) -> tuple[str, float]:
    """Who answered, and how much of the prompt was cached there."""
    messages = [{"role": "system", "content": opening(number)}, {"role": "user", "content": question}]
    answer = await harness.chat(json.dumps({"model": "tiny", "messages": messages, "max_tokens": 2}).encode(), JSON)
    usage = json.loads(answer.body)["usage"]
    return answer.replica, usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"]


@pytest.mark.parametrize("is_warmed", [True, False])
async def test_the_first_requests_of_a_replica_that_joined_hit(is_warmed: bool) -> None:
    with ExitStack() as processes:
        ports = [processes.enter_context(replica_process("--prefill-rate", "80000")).port for _ in range(3)]
        fleet = [StandIn(f"replica-{number}", port) for number, port in enumerate(ports)]

        def configured(count: int) -> RouterConfig:
            whole = warming(fleet[:count])  # type: ignore[arg-type]  # name and url are all that it reads
            return replace(whole, pools=(replace(whole.pools[0], warm_up=WarmUp() if is_warmed else None),))

        async with routed(configured(2)) as harness:
            for turn in range(2):
                for number in range(OPENINGS):
                    await cached_ratio(harness, number, f"Question {turn}")
            assert (await harness.push(configured(3), 2))[0] == 200
            await joined(harness, "replica-2")
            first = [await cached_ratio(harness, number, "And now?") for number in range(OPENINGS)]
            assert (await row(harness, "replica-2"))["health"] == "up"

    ratios = [ratio for replica, ratio in first if replica == "replica-2"]
    assert len(ratios) > 2
    assert all((ratio > 0.8) is is_warmed for ratio in ratios)
