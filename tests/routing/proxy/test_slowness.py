"""Slow engines whose health checks succeed: ejected by comparison, probed and readmitted."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from routing.schema import BreakerConfig
from tests.fakes.replica import Call, FakeReplica, chunk, sse
from tests.pace import is_within
from tests.routing.proxy.harness import Harness, config, routed
from tests.routing.proxy.streams import Load, p95

SOONER = BreakerConfig(stall_s=1.0, open_s=0.4, slow_start_s=0.5)
FOUND_S = 5.0


@dataclass
class Engine:
    """Streams of three events. ``delay_s`` delays the first event, except for every ``spares``-th request."""

    between_s: float = 0.02
    delay_s: float = 0.02
    spares: int = 1000
    requests: int = 0

    async def __call__(self, call: Call) -> None:
        self.requests += 1
        await call.begin_stream()
        await self._pause(0.02 if self.requests % self.spares == 0 else self.delay_s)
        for number in range(3):
            if call.writer.is_closing():
                return
            await call.send(chunk(sse({"n": number})))
            await self._pause(self.between_s)
        await call.end_stream()

    async def _pause(self, seconds: float) -> None:
        """Sleep, or until the engine is healthy again."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and max(self.between_s, self.delay_s) >= seconds:
            await asyncio.sleep(min(0.02, seconds))


def engines(replicas: list[FakeReplica]) -> list[Engine]:
    engines_made = [Engine() for _ in replicas]
    for replica, engine in zip(replicas, engines_made, strict=True):
        replica.script = engine
    return engines_made


async def is_out(harness: Harness, replica: str, within_s: float) -> None:
    started_at = time.monotonic()
    await harness.until(lambda: not harness.health.is_up(replica), "the replica to be out")
    assert is_within(time.monotonic() - started_at, within_s)


def causes(harness: Harness) -> set[str]:
    return {cause for _, _, cause in harness.breakers.ejections}


@asynccontextmanager
async def going(load: Load) -> AsyncIterator[None]:
    """Start streams for the length of the block; they may end after it."""
    asking = asyncio.create_task(load.run(60.0))
    try:
        yield
    finally:
        asking.cancel()
        await asyncio.wait([asking])


async def test_a_trickling_replica_is_ejected_within_five_seconds(four):
    """At the defaults: one event in 4 s, with normal first bytes."""
    engines_made = engines(four)
    slow_index = random.Random(7).randrange(4)
    async with routed(config(four)) as harness:
        base, load, later = (Load(harness, rate=60) for _ in range(3))
        await base.run(1.0)
        await base.ended()
        async with going(load):
            engines_made[slow_index].between_s = 4.0
            await is_out(harness, f"replica-{slow_index}", FOUND_S)
            assert causes(harness) == {"slow"}
        await later.run(1.0)
        await later.ended()
        assert is_within(p95(later.ttft_s), p95(base.ttft_s) + 1.0)
        engines_made[slow_index].between_s = 0.02
        await load.ended()
        await harness.at_rest()


async def test_a_replica_with_late_first_bytes_is_ejected(four):
    engines_made = engines(four)
    async with routed(config(four, breaker=SOONER)) as harness:
        load = Load(harness, rate=80)
        await load.run(0.5)
        async with going(load):
            engines_made[1].delay_s, engines_made[1].spares = 8.0, 4
            await is_out(harness, "replica-1", 3.0)
            assert causes(harness) == {"slow"}
        engines_made[1].delay_s = 0.02
        await load.ended()
        _, text = await harness.admin("GET", "/metrics")
        assert 'ejections_total{pool="chat",replica="replica-1",cause="slow"}' in text
        assert 'retries_total{pool="chat",replica="replica-1",cause="stalled"}' in text
        await harness.at_rest()


async def test_a_slow_replica_is_probed_until_a_whole_response_and_then_starts_slowly(four):
    engines_made = engines(four)
    async with routed(config(four, breaker=SOONER)) as harness:
        load = Load(harness, rate=60)
        async with going(load):
            engines_made[0].between_s = 3.0
            await is_out(harness, "replica-0", FOUND_S)
            requests, opened = engines_made[0].requests, harness.breakers.ejections
            before = opened["chat", "replica-0", "slow"]
            await harness.until(lambda: opened["chat", "replica-0", "slow"] >= before + 2, "probes to fail")
            tried = (
                opened["chat", "replica-0", "slow"] - before
            )  # a busy machine checks late; its share is 15 requests a second
            assert 2 <= engines_made[0].requests - requests <= 8 + 3 * tried, (
                "one at a time, though its first bytes are quick"
            )
            engines_made[0].between_s = 0.02
            await harness.until(lambda: harness.breakers.state("replica-0") == "closed", "it to prove well")
            assert harness.health.share("replica-0") < 1.0
        await load.ended()
        await harness.at_rest()
