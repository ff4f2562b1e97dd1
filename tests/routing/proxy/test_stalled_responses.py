"""Engines that stall while no response is streamed: such responses are silent until complete."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import pytest

from routing.health.engine_probe import ProbeResult
from routing.schema import BreakerConfig, HealthCheck, Limits, RouterConfig
from routing.types import ReplicaId
from tests.fakes.replica import Call, FakeReplica, answering, hanging, plain_answer, sse
from tests.routing.proxy.harness import BODY, Harness, Response, config, routed, samples

WHOLE = b'{"ok":true}'
TICK_S = 0.02
QUICK = BreakerConfig(stall_s=0.4, open_s=30)
PATIENT = HealthCheck(failures=100, interval_s=60)


@dataclass
class Engine:
    """An engine behind an API server: plain responses take ``response_s``, in which its counters move.

    ``is_prefilling``: only its KV cache usage moves. ``knows_requests``: its gauges count requests.
    """

    replica: FakeReplica
    response_s: float = 0.05
    is_prefilling: bool = False
    knows_requests: bool = True
    runs: asyncio.Event = field(default_factory=asyncio.Event)
    steps: int = 0
    running: int = 0

    def __post_init__(self) -> None:
        self.runs.set()
        self.replica.script = self.respond
        self.replica.metrics = self.metrics
        self.replica.on_token_probe = self.respond_to_probe

    def metrics(self) -> bytes:
        tokens, blocks = (7, self.steps) if self.is_prefilling else (self.steps, 7)
        running = self.running if self.knows_requests else 0
        return (
            b"# TYPE vllm:generation_tokens_total counter\n"
            b'vllm:generation_tokens_total{engine="0"} %d\nvllm:kv_cache_usage_perc{engine="0"} 0.%06d\n'
            b'vllm:num_requests_running{engine="0"} %d\nhttp_requests_total %d\n'
        ) % (tokens, blocks, running, self.replica.reads)

    async def respond(self, call: Call) -> None:
        self.running += 1
        disconnected = asyncio.ensure_future(call.wait_gone())
        try:
            for _ in range(max(1, round(self.response_s / TICK_S))):
                await asyncio.sleep(TICK_S)
                await asyncio.wait(
                    [disconnected, asyncio.ensure_future(self.runs.wait())], return_when="FIRST_COMPLETED"
                )
                if disconnected.done():
                    return
                self.steps += 1
            disconnected.cancel()
            await asyncio.gather(disconnected, return_exceptions=True)
            await call.send(plain_answer(WHOLE))
        finally:
            disconnected.cancel()
            self.running -= 1

    async def respond_to_probe(self, call: Call) -> None:
        await self.runs.wait()
        self.steps += 1
        events = sse({"choices": [{"text": "a"}]}), sse({"choices": [], "usage": {"prompt_tokens": 2}})
        await call.begin_stream(*events, b"data: [DONE]\n\n")  # not the last chunk

    def hang(self) -> None:
        """Stall the engine; its API server stays healthy."""
        self.runs.clear()

    def stop(self) -> None:
        """Stop all processes, as by SIGSTOP: the kernel still accepts connections."""
        self.runs.clear()
        self.replica.is_stopped = True


@dataclass
class Clients:
    """Clients that repeat plain requests, and their waiting times."""

    harness: Harness
    body: bytes = BODY
    waited_s: list[float] = field(default_factory=list)
    statuses: set[int] = field(default_factory=set)

    async def ask(self, until: Callable[[], bool]) -> None:
        while not until():
            started_at = time.monotonic()
            response = await self.harness.chat(self.body)
            self.waited_s.append(time.monotonic() - started_at)
            self.statuses.add(response.status)

    async def run(self, until: Callable[[], bool], count: int = 4) -> None:
        async with asyncio.timeout(60):
            await asyncio.gather(*(self.ask(until) for _ in range(count)))


def is_out(harness: Harness, name: str = "replica-0") -> Callable[[], bool]:
    return lambda: not harness.health.is_up(ReplicaId(name))


def with_pool(configuration: RouterConfig, **changes: object) -> RouterConfig:
    (pool,) = configuration.pools
    return msgspec.structs.replace(configuration, pools=(msgspec.structs.replace(pool, **changes),))


@pytest.mark.parametrize("stops", [Engine.hang, Engine.stop], ids=["engine", "all processes"])
async def test_a_stalled_replica_is_ejected_and_its_requests_are_retried(stops, two):
    first, _ = (Engine(replica) for replica in two)
    async with routed(config(two, breaker=QUICK, health=PATIENT)) as harness:
        clients = Clients(harness)
        await clients.run(lambda: len(clients.waited_s) > 20)
        stops(first)
        await clients.run(is_out(harness))
        assert clients.statuses == {200}
        _, text = await harness.admin("GET", "/metrics")
        assert 'ejections_total{pool="chat",replica="replica-0",cause="stalled"} 1' in text
        assert 'retries_total{pool="chat",replica="replica-0",cause="stalled"}' in text
        _, shown = await harness.admin("GET", "/admin/replicas")
        assert "no progress" in shown["replicas"][0]["reason"]
        await harness.at_rest()
        await harness.until(lambda: first.running == 0, "its engine to be told to stop")


@pytest.mark.parametrize("is_prefilling", [False, True], ids=["decode", "prefill"])
async def test_a_slow_engine_that_makes_progress_stays(is_prefilling, two):
    """Five times ``stall_s`` without a byte; no probe is sent."""
    for replica in two:
        Engine(replica, response_s=2.0, is_prefilling=is_prefilling)
    async with routed(config(two, breaker=QUICK, health=PATIENT)) as harness:
        responses = await asyncio.gather(*(harness.chat() for _ in range(6)))
        assert [response.status for response in responses] == [200] * 6
        assert (harness.breakers.ejections, [replica.token_probes for replica in two]) == ({}, [[], []])
        assert all(replica.reads < 30 for replica in two), "at most one every third of stall_s"


async def test_fast_responses_trigger_no_engine_check(two):
    for replica in two:
        Engine(replica)
    async with routed(config(two, health=PATIENT)) as harness:
        clients = Clients(harness)
        await clients.run(lambda: len(clients.waited_s) > 50)
        assert [(replica.reads, replica.token_probes) for replica in two] == [(0, []), (0, [])]


async def test_an_idle_engine_that_answers_a_probe_stays(two):
    """Its API server fetches an image for five times ``stall_s``; probes come at growing intervals."""

    async def fetching(call: Call) -> None:
        await asyncio.sleep(2.0)
        await call.send(plain_answer(WHOLE))

    for replica in two:
        Engine(replica)
        replica.script = fetching
    async with routed(config(two, breaker=QUICK, health=PATIENT)) as harness:
        assert (await harness.chat()).status == 200
        assert harness.breakers.ejections == {}
        probes = sum(len(replica.token_probes) for replica in two)
        assert 1 <= probes <= 4, "after 0.4, 0.8 and 1.6 s at the soonest"


@pytest.mark.parametrize("knows_requests", [True, False])
async def test_an_engine_that_rejects_the_probe_is_stalled_if_it_has_requests(knows_requests, two):
    first, second = (Engine(replica, knows_requests=knows_requests) for replica in two)
    for replica in two:
        replica.on_token_probe = answering(b'{"error":"Unauthorized"}', status=401)
    async with routed(config(two, breaker=QUICK, health=PATIENT)) as harness:
        first.hang()
        waiting = [asyncio.create_task(harness.chat()) for _ in range(2)]
        if knows_requests:
            await harness.until(is_out(harness), "it to be out")
        else:
            await harness.until(lambda: two[0].reads > 6, "its counters to be read for a while")
            assert harness.breakers.ejections == {}
            first.runs.set()
        assert {response.status for response in await asyncio.gather(*waiting)} == {200}
        assert second.running == 0


async def test_an_engine_without_counters_gets_the_time_of_the_whole_prefill(two):
    """Without a known rate 8,000 tokens may take 24 s, a few words almost nothing."""
    for replica in two:
        replica.on_token_probe = hanging
    long = {**json.loads(BODY), "messages": [{"role": "user", "content": "word " * 6400}]}
    first_is_taken = asyncio.Event()

    async def slow_once(call: Call) -> None:
        if len(call.body) > 10_000:
            await asyncio.sleep(3.0)
        elif not first_is_taken.is_set():
            first_is_taken.set()
            await call.wait_gone()
        await call.send(plain_answer(WHOLE))

    for replica in two:
        replica.script = slow_once
    async with routed(config(two, breaker=QUICK, health=PATIENT)) as harness:
        assert (await harness.chat(json.dumps(long).encode())).status == 200
        assert harness.breakers.ejections == {}
        assert (await harness.chat()).status == 200
        assert len(harness.breakers.ejections) == 1


async def test_late_counters_are_no_stall(two):
    """``/metrics`` takes 0.3 s, three quarters of ``stall_s``, and the probe waits too."""
    for replica in two:
        engine = Engine(replica, response_s=1.5)
        replica.on_token_probe = hanging
        replica.metrics_delay_s = 0.3
        assert engine.runs.is_set()
    async with routed(config(two, breaker=QUICK, health=PATIENT)) as harness:
        responses: list[Response] = await asyncio.gather(*(harness.chat() for _ in range(4)))
        assert [response.status for response in responses] == [200] * 4
        assert harness.breakers.ejections == {}


async def test_a_probe_has_the_pools_model_and_the_replicas_key(two):
    first, _ = (Engine(replica) for replica in two)
    configuration = config(two, breaker=QUICK, health=PATIENT, models=("tiny", "other"))
    keyed = tuple(msgspec.structs.replace(it, api_key="sk-own") for it in configuration.pools[0].replicas)
    async with routed(with_pool(configuration, replicas=keyed)) as harness:
        first.hang()
        clients = Clients(harness)
        await clients.run(is_out(harness))
        probe = two[0].token_probes[0]
    probe_body = json.loads(probe.body)
    assert (probe_body["model"], probe_body["max_tokens"], probe_body["stream"]) == ("tiny", 1, True)
    assert probe.header(b"authorization") == [b"Bearer sk-own"]


async def test_requests_leave_a_stalled_replica_that_is_down(two):
    """Its breaker may not open, because the pool allows no ejection."""
    first, _ = (Engine(replica) for replica in two)
    breaker, health = BreakerConfig(stall_s=0.4, max_out_ratio=0.0), HealthCheck(interval_s=0.1, timeout_s=0.2)
    async with routed(config(two, breaker=breaker, health=health, limits=Limits(retries=1))) as harness:
        first.stop()
        waiting = [asyncio.create_task(harness.chat()) for _ in range(4)]
        assert {response.status for response in await asyncio.gather(*waiting)} == {200}
        assert harness.breakers.ejections == {}


async def test_an_engine_with_long_steps_gets_few_probes(replica):
    """Its counters stand still for most of ``stall_s``, again and again, which becomes typical."""
    engine = Engine(replica)

    async def slow_steps(call: Call) -> None:
        for _ in range(8):
            await asyncio.sleep(0.32)
            engine.steps += 1
        await call.send(plain_answer(WHOLE))

    replica.script = slow_steps
    async with routed(config([replica], breaker=BreakerConfig(stall_s=0.4), health=PATIENT)) as harness:
        assert (await harness.chat()).status == 200
        _, text = await harness.admin("GET", "/metrics")

    assert len(replica.token_probes) <= 5
    assert f'engine_probes_total{{replica="replica-0"}} {len(replica.token_probes)}' in text or not replica.token_probes


async def test_what_an_engine_counts_of_probes_is_counted_too(replica):
    """Also of a probe that a client's bytes overtook: it is not cancelled, and tells nothing about a later silence."""
    engine = Engine(replica)
    async with routed(config([replica], health=PATIENT)) as harness:
        check = harness.router.services.stall_detector._checks[replica.name]
        results = []
        check.probe(results.append)
        await harness.until(lambda: results, "the first probe")
        progress_at = check.progress_at
        engine.hang()
        check.probe()
        await harness.until(lambda: len(replica.token_probes) == 2, "the second probe")
        check.reset()
        engine.runs.set()
        await harness.until(
            lambda: harness.router.services.own_requests.counts.get("replica-0") == (2, 4, 0), "its token"
        )
        _, text = await harness.admin("GET", "/metrics")

    assert results == [ProbeResult.PASSED]
    assert check.progress_at == progress_at
    found = {name: rows[0][1] for name, rows in samples(text).items() if "probe" in name or "_own_" in name}
    assert found == {
        "warmpath_router_engine_probes_total": 2,
        "warmpath_router_own_requests_total": 2,
        "warmpath_router_own_prompt_tokens_total": 4,
        "warmpath_router_own_cached_tokens_total": 0,
    }
