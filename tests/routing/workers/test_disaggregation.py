"""Prefill legs of a router with several workers."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.fakes.replica import FakeReplica
from tests.routing.proxy.disaggregated import DECODE, PREFILL, has_parameters, prompt, roles
from tests.routing.proxy.harness import samples
from tests.routing.workers.harness import serving

REQUESTS = 16


async def test_all_workers_prefill_apart_and_their_counts_add_up(four: list[FakeReplica], tmp_path: Path) -> None:
    whole = roles(four, PREFILL, PREFILL, DECODE, DECODE)
    async with serving(tmp_path, whole, "--workers=2") as router:
        responses = await asyncio.gather(*(router.chat(prompt(str(number))) for number in range(REQUESTS)))

        async def all_counted() -> bool:
            _, text = await router.admin("GET", "/metrics")
            rows = samples(text).get("warmpath_router_prefill_legs_total", [])
            return sum(value for labels, value in rows if labels["outcome"] == "used") == REQUESTS

        await router.until(all_counted, "the sums of both workers")
        _, rows = await router.admin("GET", "/admin/replicas")

    assert len({response.headers["x-request-id"][:16] for response in responses}) == 2
    assert {response.headers["x-warmpath-prefill-replica"] for response in responses} == {"replica-0", "replica-1"}
    assert all(has_parameters(call) for replica in four[2:] for call in replica.calls)
    assert [row["role"] for row in rows["replicas"]] == ["prefill", "prefill", "decode", "decode"]
