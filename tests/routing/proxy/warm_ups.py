"""Prefixes that a router learns and sends to a joining replica."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from msgspec.structs import replace

from routing.schema import (
    HealthCheck,
    PrefixHashSettings,
    RouterConfig,
    Settings,
    WarmUp,
)
from tests.fakes.replica import Call, FakeReplica
from tests.routing.proxy.harness import Harness, config, routed, samples

PREFIXES = 30
CANARY = "canary"
QUICK = HealthCheck(interval_s=0.05, timeout_s=10.0, failures=2)  # a delay on a busy machine is no failure
PREFIX = b"warm-up-"


def prefix_text(number: int) -> str:
    return f"You are clerk number {number} of the {CANARY}. " * 20


def body(number: int, question: str = "And now?") -> bytes:
    messages = [{"role": "system", "content": prefix_text(number)}, {"role": "user", "content": question}]
    return json.dumps({"model": "tiny", "messages": messages, "user": "ann", "max_tokens": 2}).encode()


def with_warm_up(
    replicas: Iterable[FakeReplica], warm_up: WarmUp | None = None, *, settings: Settings | None = None, **fields: Any
) -> RouterConfig:
    whole = config(replicas, settings=settings or PrefixHashSettings(slack_s=60), health=QUICK, **fields)
    return replace(whole, pools=(replace(whole.pools[0], warm_up=warm_up or WarmUp()),))


def sent_to_warm(replica: FakeReplica) -> list[Call]:
    return [call for call in replica.calls if call.header(b"x-request-id")[0].startswith(PREFIX)]


def system_prompts(calls: Sequence[Call]) -> list[str]:
    """The system prompts of requests, in order."""
    return [json.loads(call.body)["messages"][0]["content"] for call in calls]


async def send_traffic(harness: Harness, numbers: Iterable[int] = range(PREFIXES), times: int = 3) -> None:
    for number in numbers:
        for turn in range(times):
            assert (await harness.chat(body(number, f"Question {turn}"))).status == 200


async def preferred_replicas(harness: Harness) -> dict[str, list[int]]:
    """Prefixes by the replica that gets them now."""
    by_replica: dict[str, list[int]] = {}
    for number in range(PREFIXES):
        by_replica.setdefault((await harness.chat(body(number))).replica, []).append(number)
    return by_replica


async def replica_row(harness: Harness, name: str) -> dict[str, Any]:
    _, shown = await harness.admin("GET", "/admin/replicas")
    return next(replica_row for replica_row in shown["replicas"] if replica_row["name"] == name)


def is_warming_up(harness: Harness, name: str) -> bool:
    return harness.router.services.all_warm_ups.progress_by_replica().get(name) is not None


async def wait_joined(harness: Harness, name: str) -> None:
    await harness.until(lambda: not is_warming_up(harness, name), f"the end of the warm-up of {name}")


async def endings(harness: Harness, name: str) -> dict[str, float]:
    """How the replica's warm-ups ended, from the metrics."""
    _, text = await harness.admin("GET", "/metrics")
    lines = samples(text).get("warmpath_router_warm_ups_total", [])
    return {labels["ending"]: value for labels, value in lines if labels["replica"] == name}


@asynccontextmanager
async def with_traffic(
    replicas: list[FakeReplica], warm_up: WarmUp | None = None, **fields: Any
) -> AsyncIterator[tuple[Harness, FakeReplica]]:
    """A router after traffic for all prefixes, and its last replica, which is not configured yet."""
    *existing, new = replicas
    async with routed(with_warm_up(existing, warm_up, **fields)) as harness:
        await send_traffic(harness)
        yield harness, new
