"""Openings that a router learns, and what it sends of them to a replica that joins."""

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
from tests.routing.proxy.harness import Harness, config, routed
from tests.routing.proxy.scraped import samples

OPENINGS = 30
CANARY = "canary"
QUICK = HealthCheck(interval_s=0.05, timeout_s=10.0, failures=2)  # what a busy machine delays is not down
PREFIX = b"warm-up-"


def opening(number: int) -> str:
    return f"You are clerk number {number} of the {CANARY}. " * 20


def body(number: int, question: str = "And now?") -> bytes:
    messages = [{"role": "system", "content": opening(number)}, {"role": "user", "content": question}]
    return json.dumps({"model": "tiny", "messages": messages, "user": "ann", "max_tokens": 2}).encode()


def warming(
    replicas: Iterable[FakeReplica], warm_up: WarmUp | None = None, *, settings: Settings | None = None, **fields: Any
) -> RouterConfig:
    whole = config(replicas, settings=settings or PrefixHashSettings(), health=QUICK, **fields)
    return replace(whole, pools=(replace(whole.pools[0], warm_up=warm_up or WarmUp()),))


def sent_to_warm(replica: FakeReplica) -> list[Call]:
    return [call for call in replica.calls if call.header(b"x-request-id")[0].startswith(PREFIX)]


def asked(calls: Sequence[Call]) -> list[str]:
    """The system prompts of requests, in order."""
    return [json.loads(call.body)["messages"][0]["content"] for call in calls]


async def teach(harness: Harness, numbers: Iterable[int] = range(OPENINGS), times: int = 3) -> None:
    for number in numbers:
        for turn in range(times):
            assert (await harness.chat(body(number, f"Question {turn}"))).status == 200


async def homes(harness: Harness) -> dict[str, list[int]]:
    """Openings by the replica that gets them now."""
    found: dict[str, list[int]] = {}
    for number in range(OPENINGS):
        found.setdefault((await harness.chat(body(number))).replica, []).append(number)
    return found


async def row(harness: Harness, name: str) -> dict[str, Any]:
    _, shown = await harness.admin("GET", "/admin/replicas")
    return next(row for row in shown["replicas"] if row["name"] == name)


def is_joining(harness: Harness, name: str) -> bool:
    return harness.router.services.all_warm_ups.progress_by_replica().get(name) is not None


async def joined(harness: Harness, name: str) -> None:
    await harness.until(lambda: not is_joining(harness, name), f"the end of the warm-up of {name}")


async def ended(harness: Harness, name: str) -> dict[str, float]:
    """How its warm-ups ended, from the figures."""
    _, text = await harness.admin("GET", "/metrics")
    lines = samples(text).get("warmpath_router_warm_ups_total", [])
    return {labels["ending"]: value for labels, value in lines if labels["replica"] == name}


@asynccontextmanager
async def taught(
    replicas: list[FakeReplica], warm_up: WarmUp | None = None, **fields: Any
) -> AsyncIterator[tuple[Harness, FakeReplica]]:
    """A router whose last replica is not configured yet, after traffic for ``OPENINGS`` openings; and that replica."""
    *known, new = replicas
    async with routed(warming(known, warm_up, **fields)) as harness:
        await teach(harness)
        yield harness, new
