"""Requests have their turns while a page of figures is written."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from itertools import count
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from routing.http import tasks
from routing.http.tasks import run_in_slices
from routing.observability.metrics import Outcome
from routing.schema import ReplicaConfig
from tests.fakes.replica import FakeReplica
from tests.routing.proxy.harness import config, routed
from tests.routing.proxy.records import told


async def test_others_have_a_turn_whenever_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    async def work(slice_s: float) -> int:
        """How many turns others had in it."""
        monkeypatch.setattr(tasks, "SLICE_S", slice_s)
        seen.clear()
        other = asyncio.create_task(keep_seeing())
        assert await run_in_slices(iter(range(100))) == list(range(100))
        other.cancel()
        return len(seen)

    async def keep_seeing() -> None:
        while True:
            seen.append(1)
            await asyncio.sleep(0)

    assert await work(0.0) >= 99
    assert await work(60.0) == 0


async def test_figures_may_change_between_any_two_lines(replica: FakeReplica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "SLICE_S", 0.0)
    async with routed(config([replica])) as harness:
        await harness.chat()
        metrics, view = harness.router.services.metrics, harness.server.data.view
        scrape = asyncio.create_task(view.metrics())
        (series,) = metrics._series.values()
        for name in map("group-{}".format, count()):
            metrics.count_unplaced(Outcome.OK, "chat", name)
            series.count(name, "ok")
            if scrape.done():
                break
            await asyncio.sleep(0)
        text = await scrape
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert "warmpath_router_requests" in families
    assert families["warmpath_router_latency_seconds"].samples[-1].value == 1


async def test_requests_have_their_turns_while_decisions_and_replicas_are_written_out(
    replica: FakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "SLICE_S", 0.0)
    async with routed(config([replica])) as harness:
        for _ in range(5):
            await harness.chat()
        view, ring = harness.server.data.view, harness.router.services.decisions
        assert await turns_of(view.replicas()) >= 2
        assert await turns_of(view.decisions(0, 10, 1.0)) >= 5
        assert await view.decisions(1, 3, 0.5) == told(ring, 1, 3, 0.5)


async def test_requests_have_their_turns_while_the_figures_of_many_replicas_are_looked_up(
    replica: FakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "SLICE_S", 0.0)
    whole = config([replica])
    members = tuple(ReplicaConfig(f"r{number}", "http://127.0.0.1:1") for number in range(50))
    async with routed(replace(whole, pools=(replace(whole.pools[0], replicas=members),))) as harness:
        view = harness.server.data.view
        lines = len((await view.metrics()).splitlines())
        assert await turns_of(view.metrics()) >= lines + len(members)


async def turns_of(work: Coroutine[Any, Any, object]) -> int:
    """How many turns others have until some work is done."""
    task, seen = asyncio.create_task(work), 0
    while not task.done():
        await asyncio.sleep(0)
        seen += 1
    await task
    return seen
