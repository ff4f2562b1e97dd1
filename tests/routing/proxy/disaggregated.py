"""A pool of fake replicas with roles."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from routing.schema import Disaggregation, Limits, LowestCostSettings, ReplicaRole, RouterConfig, Settings
from tests.fakes.replica import Call, FakeReplica, Script, answering, plain_answer
from tests.routing.proxy.harness import CHAT, Harness, config, samples

PREFILL, DECODE, BOTH = ReplicaRole.PREFILL, ReplicaRole.DECODE, ReplicaRole.BOTH
WORDS = "word " * 2500  # 3,125 tokens
MEMBER = "kv_transfer_params"
PREFILL_PARAMETERS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
TRANSFER_PARAMETERS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "engine",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
}
PREFILLED: dict[str, Any] = {
    "choices": [{"finish_reason": "length"}],
    "usage": {"prompt_tokens": 3000, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 48}},
    MEMBER: TRANSFER_PARAMETERS,
}


def prefilling(**fields: Any) -> Script:
    """Respond as a prefill replica."""
    return answering(json.dumps(PREFILLED | fields).encode())


def decoded(cached_tokens: int = 2999) -> Script:
    """Respond as a decode replica whose prompt was transferred."""
    details = {"cached_tokens": cached_tokens}
    usage = {"prompt_tokens": 3000, "completion_tokens": 2, "prompt_tokens_details": details}
    return answering(json.dumps({"choices": [{"finish_reason": "stop"}], "usage": usage}).encode())


def roles(
    replicas: Sequence[FakeReplica],
    *roles: ReplicaRole,
    minimum: int | None = None,
    settings: Settings | None = None,
    limits: Limits | None = None,
    **fields: Any,
) -> RouterConfig:
    """The configuration of a pool whose replicas have these roles; the prefill replicas respond as such."""
    whole = config(replicas, settings=settings or LowestCostSettings(), limits=limits, **fields)
    members = tuple(replace(member, role=role) for member, role in zip(whole.pools[0].replicas, roles, strict=True))
    for fake, role in zip(replicas, roles, strict=True):
        if role is PREFILL:
            fake.script = prefilling()
    disaggregation = None if minimum is None else Disaggregation(min_uncached_tokens=minimum)
    return replace(whole, pools=(replace(whole.pools[0], replicas=members, disaggregation=disaggregation),))


def prompt(text: str = "a", **fields: Any) -> bytes:
    """A chat that is long enough for a prefill leg."""
    return json.dumps({"model": "tiny", "messages": [{"role": "user", "content": text + WORDS}], **fields}).encode()


def has_parameters(call: Call) -> bool:
    return MEMBER in json.loads(call.body)


async def legs(harness: Harness) -> dict[tuple[str, str, str], float]:
    """``prefill_legs_total`` by replica, outcome and cause."""
    _, text = await harness.admin("GET", "/metrics")
    rows = samples(text).get("warmpath_router_prefill_legs_total", [])
    return {(row["replica"], row["outcome"], row["cause"]): value for row, value in rows}


async def last_prefill(harness: Harness) -> dict[str, Any]:
    """``prefill`` of the latest decision record."""
    _, page = await harness.admin("GET", "/admin/decisions")
    found: dict[str, Any] = page["decisions"][-1]["prefill"]
    return found


async def explained(harness: Harness, body: bytes, path: bytes = CHAT) -> tuple[int, Any]:
    """Status and content of ``/admin/explain``."""
    return await harness.admin("POST", "/admin/explain", data=b'{"path":"%b","body":%b}' % (path, body))


async def replica_rows(harness: Harness) -> list[dict[str, Any]]:
    """The rows of ``/admin/replicas``."""
    _, page = await harness.admin("GET", "/admin/replicas")
    rows: list[dict[str, Any]] = page["replicas"]
    return rows


class Gate:
    """A prefill replica that responds when it is opened."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    async def __call__(self, call: Call) -> None:
        await self.opened.wait()
        await call.send(plain_answer(json.dumps(PREFILLED).encode()))
