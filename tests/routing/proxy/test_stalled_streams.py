"""Replicas whose engine stalls while their health check succeeds."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from routing.schema import BreakerConfig, Limits
from tests.fakes.replica import LAST_CHUNK, STREAM_HEAD, Call, FakeReplica, Script, chunk, sse
from tests.pace import is_within
from tests.routing.proxy.harness import DEADLINE_S, Harness, config, routed
from tests.routing.proxy.streams import STREAM, WHOLE, Load
from tests.side_by_side import alone

COMMENT = b": keep-alive\n\n"
QUICK = BreakerConfig(stall_s=0.3, open_s=0.3, slow_start_s=0.4)


@dataclass
class Engine:
    """An engine behind a healthy API server: like vLLM, it sends its head before any token."""

    first_byte_s: float = 0.02
    sends_head: bool = True
    comments_s: float | None = None  # between two comments while no token comes; None: it sends none
    runs: asyncio.Event = field(default_factory=asyncio.Event)
    requests: int = 0

    def __post_init__(self) -> None:
        self.runs.set()

    async def __call__(self, call: Call) -> None:
        self.requests += 1
        if self.sends_head:
            await call.begin_stream()
        await asyncio.sleep(self.first_byte_s)
        for number in range(3):
            await self.wait(call)
            await call.send((b"" if self.sends_head or number else STREAM_HEAD) + chunk(sse({"n": number})))
        await call.end_stream()

    async def wait(self, call: Call) -> None:
        """Wait until the engine runs, as vLLM with ``--sse-keep-alive-interval``."""
        while not self.runs.is_set():
            if self.comments_s is not None:
                await call.send(chunk(COMMENT))
            with suppress(TimeoutError):
                async with asyncio.timeout(self.comments_s):
                    await self.runs.wait()


def engines(replicas: list[FakeReplica], **options: float | None) -> list[Engine]:
    engines_made = [Engine(**options) for _ in replicas]
    for replica, engine in zip(replicas, engines_made, strict=True):
        replica.script = engine
    return engines_made


async def is_out(harness: Harness, name: str = "replica-0") -> None:
    await harness.until(lambda: not harness.health.is_up(name), f"{name} to be out")


@pytest.mark.parametrize(("sends_head", "comments_s"), [(True, None), (False, None), (True, 0.05)])
async def test_a_stalled_engine_is_ejected_and_its_streams_are_retried(sends_head, comments_s, two):
    first, second = engines(two, sends_head=sends_head, comments_s=comments_s)
    if comments_s is not None:
        two[0].on_token_probe = first  # gets comments and no token either
    async with routed(config(two, breaker=QUICK)) as harness:
        load = Load(harness, rate=50)
        await load.run(0.5)
        await load.ended()
        first.runs.clear()
        await load.run(1.0)
        await is_out(harness)
        await load.ended()
        assert (two[0].probes > 0, two[0].health_status) == (True, 200)
        _, shown = await harness.admin("GET", "/admin/replicas")
        row = shown["replicas"][0]
        assert (row["health"], row["running"]) == ("up", 0)
        assert row["reason"].startswith("no byte for ")
        _, text = await harness.admin("GET", "/metrics")
        assert 'ejections_total{pool="chat",replica="replica-0",cause="stalled"}' in text
        assert 'retries_total{pool="chat",replica="replica-0",cause="stalled"}' in text
        assert second.requests > first.requests
        await harness.at_rest()


@alone
async def test_comments_of_streams_in_progress_do_not_hide_a_stall(two):
    stalled, works = Engine(comments_s=0.05), Engine()
    stalled.runs.clear()
    first: list[FakeReplica] = []

    def script(replica: FakeReplica) -> Script:
        async def respond(call: Call) -> None:
            if not first:
                first.append(replica)
                await call.begin_stream(sse({"n": 0}))
                await stalled.wait(call)
            await (stalled if replica is first[0] else works)(call)

        return respond

    for replica in two:
        replica.script = replica.on_token_probe = script(replica)
    async with routed(config(two, breaker=QUICK)) as harness:
        in_progress = asyncio.create_task(harness.chat(STREAM))
        await harness.until(lambda: first, "a stream in progress")
        assert [(await harness.chat(STREAM)).body for _ in range(2)] == [WHOLE] * 2
        assert not harness.health.is_up(first[0].name)
        in_progress.cancel()
        await asyncio.gather(in_progress, return_exceptions=True)


@pytest.mark.parametrize("tail", [COMMENT, COMMENT[:4]])
async def test_a_stream_of_comments_only_ends_at_its_deadline(replica, tail):
    async def script(call: Call) -> None:
        await call.begin_stream(sse({"n": 0}))
        while not call.writer.is_closing():
            await call.send(chunk(tail))
            await asyncio.sleep(0.05)

    replica.script = script
    async with routed(config([replica], limits=Limits(idle_timeout_s=0.3))) as harness:
        response = await harness.chat(STREAM)
        assert b"did not respond in time" in response.body
        await harness.at_rest()


async def test_a_stalled_replica_is_readmitted_by_a_probe_and_starts_slowly(two):
    first, _ = engines(two)
    async with routed(config(two, breaker=QUICK)) as harness:
        load = Load(harness, rate=50)
        first.runs.clear()
        await load.run(0.8)
        await is_out(harness)
        before = first.requests
        await load.run(1.0)
        assert first.requests - before <= 3, "while it hangs, it gets one request a probe"
        first.runs.set()
        shares = set()

        def is_back() -> bool:
            shares.add(harness.health.share("replica-0"))
            return harness.breakers.not_closed == {} and harness.health.share("replica-0") == 1.0

        more = asyncio.create_task(load.run(3.0))
        await harness.until(is_back, "it to have its whole share")
        assert min(shares) == 0.25
        await more
        await load.ended()
        await harness.at_rest()


async def test_when_all_stall_half_stays_and_no_request_is_rejected(two):
    both = engines(two)
    async with routed(config(two, breaker=QUICK, limits=Limits(retries=1))) as harness:
        for engine in both:
            engine.runs.clear()
        waiting = [asyncio.create_task(harness.chat(STREAM)) for _ in range(6)]
        await harness.until(lambda: len(harness.breakers.ejections) > 0, "one to be out")
        assert any(harness.health.is_up(name) for name in ("replica-0", "replica-1"))
        for engine in both:
            engine.runs.set()
        for response in await asyncio.gather(*waiting):
            assert (response.status, response.body) == (200, WHOLE)
        await harness.at_rest()


async def test_streams_that_may_not_be_retried_wait(two):
    both = engines(two)
    async with routed(config(two, breaker=QUICK, limits=Limits(retries=0))) as harness:
        both[0].runs.clear()
        waiting = [asyncio.create_task(harness.chat(STREAM)) for _ in range(4)]
        await is_out(harness)
        both[0].runs.set()
        assert {response.status for response in await asyncio.gather(*waiting)} == {200}


@alone
async def test_at_the_defaults_a_stall_ends_within_five_seconds(two):
    first, _ = engines(two)
    async with routed(config(two)) as harness:
        first.runs.clear()
        started_at = time.monotonic()
        waiting = [asyncio.create_task(harness.chat(STREAM)) for _ in range(4)]
        await is_out(harness)
        assert is_within(time.monotonic() - started_at, 5.0)
        assert {response.body for response in await asyncio.gather(*waiting)} == {WHOLE}


@alone
async def test_waiting_prompts_are_not_read_again_at_each_check(two):
    """Checking 8 waiting prompts of 2 MiB takes less time than reading one."""
    for engine in engines(two):
        engine.runs.clear()
    prompt = {**json.loads(STREAM), "messages": [{"role": "user", "content": "word " * ((2 << 20) // 5)}]}
    body = json.dumps(prompt).encode()
    async with routed(config(two, breaker=BreakerConfig(stall_s=0.2, max_out_ratio=0.0))) as harness:
        assert harness.router.active is not None
        loop, connection_pools = harness.router.loop, harness.router.active.connection_pools.values()
        waiting = [asyncio.create_task(harness.chat(body)) for _ in range(8)]

        def all_are_looked_at() -> bool:
            return sum(loop.time() - it.sent_at > 0.1 for link in connection_pools for it in link.waiting()) == 8

        await harness.until(all_are_looked_at, "all to have waited for a while")
        harness.router._run_housekeeping()
        looks_s, reads_s = [], []
        for _ in range(5):
            started_at = time.perf_counter()
            harness.router._run_housekeeping()
            looks_s.append(time.perf_counter() - started_at)
            started_at = time.perf_counter()
            assert json.loads(body)["stream"] is True
            reads_s.append(time.perf_counter() - started_at)
        assert min(looks_s) < min(reads_s)
        for task in waiting:
            task.cancel()


async def test_an_error_in_pieces_is_no_silence(two):
    goes_on = asyncio.Event()

    async def halting(call: Call) -> None:
        await call.send(b"HTTP/1.1 500 Oops\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"{"))
        await goes_on.wait()
        await call.send(chunk(b"}") + LAST_CHUNK)

    for replica in two:
        replica.script = halting
    async with routed(config(two)) as harness:
        assert harness.router.active is not None
        connection_pools = harness.router.active.connection_pools.values()
        pending = asyncio.create_task(harness.chat(STREAM))
        await harness.until(
            lambda: any(upstream._head for it in connection_pools for upstream in it._open), "half an error"
        )
        harness.router._run_housekeeping()
        goes_on.set()
        assert (await pending).status == 500
        assert harness.breakers.ejections == {}


async def test_an_older_stalled_stream_does_not_fail_the_probe(two):
    """A stream without retries that its engine forgot; later requests are answered."""
    first, _ = engines(two)

    async def forgetful(call: Call) -> None:
        if call is two[0].calls[0]:
            await call.wait_gone()
        await first(call)

    two[0].script = forgetful
    async with routed(config(two, breaker=QUICK, limits=Limits(retries=0))) as harness:
        pending = [asyncio.create_task(harness.chat(STREAM)) for _ in two]
        await is_out(harness)
        (forgotten,) = (await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED))[1]
        load = Load(harness, rate=50)
        asking = asyncio.create_task(load.run(DEADLINE_S))
        await harness.until(lambda: harness.breakers.not_closed == {}, "it to prove well")
        assert not forgotten.done()
        for task in (asking, forgotten):
            task.cancel()
        await load.ended()
        await harness.at_rest()
