"""Engines that crawl while all the rest of them is well: found beside their peers, tried, and taken back (R8)."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from routing.schema import BreakerConfig, PrefixHashSettings
from tests.fakes.replica import LAST_CHUNK, STREAM_HEAD, Call, FakeReplica, chunk, fake_replicas, plain_answer, sse
from tests.pace import is_within
from tests.routing.proxy.harness import Harness, config, routed
from tests.routing.proxy.streams import WHOLE, Load, p95

SOONER = BreakerConfig(stall_s=1.0, open_s=0.4, slow_start_s=0.5)
FOUND_S = 5.0  # (R8)


@dataclass
class Engine:
    """Streams of three events. ``delay_s`` holds the first one back, for all but each ``spares``-th request."""

    between_s: float = 0.02
    delay_s: float = 0.02
    spares: int = 1000
    taken: int = 0

    async def __call__(self, call: Call) -> None:
        self.taken += 1
        await call.send(STREAM_HEAD)
        await self._pause(0.02 if self.taken % self.spares == 0 else self.delay_s)
        for number in range(3):
            if call.writer.is_closing():
                return
            await call.send(chunk(sse({"n": number})))
            await self._pause(self.between_s)
        await call.send(LAST_CHUNK)

    async def _pause(self, seconds: float) -> None:
        """So long, or until it is well again."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and max(self.between_s, self.delay_s) >= seconds:
            await asyncio.sleep(min(0.02, seconds))


@pytest.fixture
async def four() -> AsyncIterator[list[FakeReplica]]:
    async with fake_replicas(4) as replicas:
        yield replicas


def engines(replicas: list[FakeReplica]) -> list[Engine]:
    made = [Engine() for _ in replicas]
    for replica, engine in zip(replicas, made, strict=True):
        replica.script = engine
    return made


def about(number: int, *, stream: bool = True) -> bytes:
    """A request that has a home of its own."""
    message = {"role": "user", "content": f"You are expert number {number}. " * 20}
    return json.dumps({"model": "tiny", "messages": [message], "stream": stream}).encode()


async def is_out(harness: Harness, replica: str, within_s: float) -> None:
    begun = time.monotonic()
    await harness.until(lambda: not harness.router.balancer.health.is_up(replica), "the replica to be out")
    assert is_within(time.monotonic() - begun, within_s)


def causes(harness: Harness) -> set[str]:
    return {cause for _, _, cause in harness.router.balancer.breakers.ejections}


@asynccontextmanager
async def going(load: Load) -> AsyncIterator[None]:
    """Streams for as long as the block lasts; they may end after it."""
    asking = asyncio.create_task(load.run(60.0))
    try:
        yield
    finally:
        asking.cancel()
        await asyncio.wait([asking])


async def test_a_replica_that_trickles_is_out_within_five_seconds_and_nobody_else_notices(
    four: list[FakeReplica],
) -> None:
    """R8 in short, at the defaults: an event in 4 s, and its first bytes as quick as ever."""
    made = engines(four)
    place = random.Random(7).randrange(4)
    async with routed(config(four)) as harness:
        base, load, later = (Load(harness, rate=60) for _ in range(3))
        await base.run(1.0)
        await base.ended()
        async with going(load):
            made[place].between_s = 4.0
            await is_out(harness, f"replica-{place}", FOUND_S)
            assert causes(harness) == {"slow"}
        await later.run(1.0)
        await later.ended()
        assert p95(later.ttft_s) <= 1.2 * p95(base.ttft_s) + 0.2
        made[place].between_s = 0.02
        await load.ended()
        await harness.at_rest()


async def test_a_replica_whose_first_bytes_are_late_is_out_though_others_get_theirs(four: list[FakeReplica]) -> None:
    made = engines(four)
    async with routed(config(four, breaker=SOONER)) as harness:
        load = Load(harness, rate=80)
        await load.run(0.5)
        async with going(load):
            made[1].delay_s, made[1].spares = 8.0, 4
            await is_out(harness, "replica-1", 3.0)
            assert causes(harness) == {"slow"}
        made[1].delay_s = 0.02
        await load.ended()
        _, text = await harness.admin("GET", "/metrics")
        assert 'ejections_total{pool="chat",replica="replica-1",cause="slow"}' in text
        assert 'retries_total{pool="chat",replica="replica-1",cause="stalled"}' in text
        await harness.at_rest()


async def test_it_is_tried_until_a_whole_answer_comes_and_then_starts_slowly(four: list[FakeReplica]) -> None:
    made = engines(four)
    async with routed(config(four, breaker=SOONER)) as harness:
        load = Load(harness, rate=60)
        async with going(load):
            made[0].between_s = 3.0
            await is_out(harness, "replica-0", FOUND_S)
            taken, opened = made[0].taken, harness.router.balancer.breakers.ejections
            before = opened["chat", "replica-0", "slow"]
            await harness.until(lambda: opened["chat", "replica-0", "slow"] >= before + 2, "probes to fail")
            tried = opened["chat", "replica-0", "slow"] - before  # a busy machine looks late; its share is 15 a second
            assert 2 <= made[0].taken - taken <= 8 + 3 * tried, "one at a time, though its first bytes are quick"
            made[0].between_s = 0.02
            await harness.until(
                lambda: harness.router.balancer.breakers.state("replica-0") == "closed", "it to prove well"
            )
            assert harness.router.balancer.health.share("replica-0") < 1.0
        await load.ended()
        await harness.at_rest()


async def test_streams_that_crawl_since_before_it_was_out_spoil_no_trial(two: list[FakeReplica]) -> None:
    """Three stay, without another byte, and it is tried by an answer that takes longer than ``stall_s``."""
    well, released = Engine(), asyncio.Event()

    async def forgetful(call: Call) -> None:
        if json.loads(call.body).get("stream"):
            await call.send(STREAM_HEAD, chunk(sse({"n": 0})))
            await call.wait_gone()
        else:
            await released.wait()
            await call.send(plain_answer(b"{}"))

    for replica in two:
        replica.script = well
    breaker = BreakerConfig(stall_s=0.5, open_s=0.3, successes=1)
    async with routed(config(two, breaker=breaker, settings=PrefixHashSettings(load_factor=10.0))) as harness:
        homes = {(await harness.chat(about(number))).replica: number for number in range(20)}
        here, there = (homes[replica.name] for replica in two)
        two[0].script = forgetful
        crawling = [asyncio.create_task(harness.chat(about(here))) for _ in range(3)]
        async with going(Load(harness, rate=60, body=about(there))):
            await is_out(harness, "replica-0", FOUND_S)
            await harness.until(lambda: harness.router.balancer.health.is_up("replica-0"), "its probe")
            probe = asyncio.create_task(harness.chat(about(here, stream=False)))
            opened = harness.router.loop.time()
            await harness.until(lambda: harness.router.loop.time() > opened + 1.0, "what was too slow to be found so")
            assert causes(harness) == {"slow"}
            assert harness.router.balancer.breakers.state("replica-0") == "half_open"
            released.set()
            assert (await probe).replica == "replica-0"
        assert harness.router.balancer.breakers.ejections == {("chat", "replica-0", "slow"): 1}
        for stream in crawling:
            stream.cancel()
        await harness.until(lambda: harness.router.services.in_flight == 0, "all to have gone")


async def test_when_all_crawl_half_stays_at_most(four: list[FakeReplica]) -> None:
    made = engines(four)
    async with routed(config(four, breaker=SOONER)) as harness:
        load = Load(harness, rate=60)
        for engine in made:
            engine.between_s = 3.0
        await load.run(3.0)
        up = [number for number in range(4) if harness.router.balancer.health.is_up(f"replica-{number}")]
        assert len(up) >= 2
        for engine in made:
            engine.between_s = 0.02
        await load.ended()
        await harness.at_rest()


def test_the_streams_here_are_those_of_the_load() -> None:
    assert b"".join(sse({"n": number}) for number in range(3)) == WHOLE
