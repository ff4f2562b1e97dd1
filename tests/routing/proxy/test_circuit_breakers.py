"""Circuit breakers: replicas that fail requests but not their health checks; the retry budget."""

from __future__ import annotations

import asyncio
import json

import pytest

from routing.schema import BreakerConfig, HealthCheck, Limits
from routing.types import ReplicaId
from tests.fakes.replica import (
    LAST_CHUNK,
    STREAM_HEAD,
    Call,
    FakeReplica,
    Script,
    answering,
    chunk,
    fake_replicas,
    raw,
    sse,
)
from tests.fakes.replica import hanging as hang
from tests.routing.proxy.harness import CHAT, Harness, RawClient, config, post, routed
from tests.side_by_side import alone

HEALTHY = answering()
BROKEN = answering(b'{"error":"x"}', status=500)
QUICK = BreakerConfig(open_s=0.3)
QUEUE_FULL = (
    b'{"error":{"message":"The engine is currently busy and cannot accept new requests. Please try again later or on a '
    b'different instance.","type":"Service Unavailable","code":503}}'
)
DEAD_ENGINE = [chunk(sse({"error": {"message": "EngineCore died", "code": 500}})), chunk(sse("[DONE]"))]


async def test_five_failures_eject_a_replica_and_a_probe_readmits_it(two: list[FakeReplica]) -> None:
    two[0].script = BROKEN
    async with routed(config(two, breaker=QUICK)) as harness:
        statuses = [(await harness.chat()).status for _ in range(20)]
        assert statuses.count(500) == 5
        assert len(two[0].calls) == 5
        _, shown = await harness.admin("GET", "/admin/replicas")
        row = shown["replicas"][0]
        assert (row["health"], row["breaker"], row["reason"]) == ("up", "open", "status_500")
        _, text = await harness.admin("GET", "/metrics")
        assert 'ejections_total{pool="chat",replica="replica-0",cause="failures"} 1' in text
        assert 'replica_out{pool="chat",replica="replica-0"} 1' in text
        two[0].script = HEALTHY
        await harness.until(lambda: harness.router.balancer.health.is_up("replica-0"), "a probe")
        for _ in range(8):
            assert (await harness.chat()).status == 200
        _, shown = await harness.admin("GET", "/admin/replicas")
        row = shown["replicas"][0]
        assert (row["breaker"], row["reason"], row["share"]) == ("closed", None, 0.25)
        await harness.at_rest()


async def eject(harness: Harness, failing: FakeReplica) -> None:
    """Make a replica fail until it is ejected, then let a request probe it."""
    failing.script = BROKEN
    while harness.router.balancer.health.is_up(failing.name):
        await harness.chat()
    harness.router.balancer.breakers.on_health_check_passed(ReplicaId(failing.name))


async def send_probe(client: RawClient, failing: FakeReplica) -> None:
    """Send requests until one probes the replica."""
    before = len(failing.calls)
    while len(failing.calls) == before:
        await client.send(post(CHAT))
        waits = [asyncio.ensure_future(client.read_response()), asyncio.ensure_future(failing.wait_calls(before + 1))]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await asyncio.wait(waits)


async def test_a_client_that_disconnects_after_a_probe_result_does_not_end_the_next_probe(
    two: list[FakeReplica],
) -> None:
    async def begin(call: Call) -> None:
        await call.send(STREAM_HEAD, chunk(sse({"n": 1})))
        await call.wait_gone()

    breaker = BreakerConfig(open_s=60, successes=3)
    async with routed(config(two, breaker=breaker)) as harness, harness.connect() as second:
        await eject(harness, two[0])
        state = harness.router.balancer.breakers.not_closed[ReplicaId(two[0].name)]
        two[0].script = begin
        async with harness.connect() as first:
            await send_probe(first, two[0])
            await harness.until(lambda: state.successes == 1, "a first byte")
            two[0].script = hang
            await send_probe(second, two[0])
            assert state.is_probing
        await harness.until(lambda: harness.router.services.in_flight == 1, "the first client's end to be heard of")
        assert state.is_probing
        calls_before = len(two[0].calls)
        for _ in range(4):
            assert (await harness.chat()).replica == "replica-1"
        assert len(two[0].calls) == calls_before


async def test_an_older_stream_that_breaks_does_not_end_the_probe(two: list[FakeReplica]) -> None:
    breaks = asyncio.Event()

    async def begin(call: Call) -> None:
        await call.send(STREAM_HEAD, chunk(sse({"n": 1})))
        await breaks.wait()
        call.reset()

    async with routed(config(two, breaker=BreakerConfig(open_s=60))) as harness, harness.connect() as old:
        for replica in two:
            replica.script = begin
        await old.send(post(CHAT))
        await old.read_until(b"\n\n")
        failing = next(replica for replica in two if replica.calls)
        two[two[0] is failing].script = HEALTHY
        await eject(harness, failing)
        breaks.set()
        assert b"error" in await old.read_all()
        state = harness.router.balancer.breakers.not_closed[ReplicaId(failing.name)]
        assert (state.state, state.reason) == ("half_open", "status_500")


@pytest.mark.parametrize("status", [429, 501])
async def test_a_probe_without_result_lets_the_next_request_probe(status: int, two: list[FakeReplica]) -> None:
    async with routed(config(two, breaker=BreakerConfig(open_s=60))) as harness, harness.connect() as client:
        await eject(harness, two[0])
        two[0].script = answering(b"{}", status=status)
        await send_probe(client, two[0])
        await harness.at_rest()
        assert not harness.router.balancer.breakers.not_closed[ReplicaId(two[0].name)].is_probing


@pytest.mark.parametrize("status", [400, 404, 429, 501])
async def test_errors_that_are_not_the_replicas_fault_eject_nothing(status: int, two: list[FakeReplica]) -> None:
    two[0].script = answering(b"{}", status=status)
    async with routed(config(two)) as harness:
        for _ in range(20):
            await harness.chat()
        assert len(two[0].calls) == 10


async def test_a_full_queue_is_retried_and_ejects_nothing(two: list[FakeReplica]) -> None:
    two[0].script = answering(QUEUE_FULL, status=503)
    async with routed(config(two)) as harness:
        for _ in range(20):
            assert (await harness.chat()).replica == "replica-1"
        assert harness.router.balancer.breakers.not_closed == {}
        busy = len(two[0].calls)
        assert busy >= 10
        _, text = await harness.admin("GET", "/metrics")
        assert f'retries_total{{pool="chat",replica="replica-0",cause="busy"}} {busy}' in text


async def test_errors_inside_streams_eject_a_replica(two: list[FakeReplica]) -> None:
    two[0].script = raw(STREAM_HEAD, chunk(sse({"n": 1})), *DEAD_ENGINE, LAST_CHUNK)
    async with routed(config(two)) as harness:
        for _ in range(20):
            await harness.chat()
        assert len(two[0].calls) == 5


async def test_incomplete_responses_eject_a_replica(two: list[FakeReplica]) -> None:
    two[0].script = raw(STREAM_HEAD, chunk(sse({"n": 1})), then_close=True)
    async with routed(config(two, health=HealthCheck(failures=100))) as harness:
        for _ in range(20):
            await harness.chat()
        assert len(two[0].calls) == 5


async def test_the_only_replica_is_never_ejected(replica: FakeReplica) -> None:
    replica.script = BROKEN
    async with routed(config([replica])) as harness:
        for _ in range(12):
            assert (await harness.chat()).status == 500
    assert len(replica.calls) == 12


@pytest.mark.parametrize(("extra", "calls"), [(b"Retry-After: 1\r\n", 2), (b"X-Other: 1\r\n", 1)])
async def test_a_429_is_retried_once_if_it_has_retry_after(extra: bytes, calls: int) -> None:
    async with fake_replicas(4, answering(b"{}", status=429, extra=extra)) as replicas:
        async with routed(config(replicas, limits=Limits(retries=3))) as harness:
            response = await harness.chat()
            assert response.status == 429
            assert ("retry-after" in response.headers) is (calls == 2)
            await harness.at_rest()
        assert sum(len(replica.calls) for replica in replicas) == calls


async def test_retries_do_not_overload_a_failing_pool() -> None:
    """Every request fails: retries stay within a fifth of the requests plus the floor."""
    async with fake_replicas(4, answering(b"{}", status=503)) as replicas:
        limits = Limits(retry_ratio=0.2, retry_floor_per_s=1)
        settings = BreakerConfig(max_out_ratio=0.0)
        async with routed(config(replicas, limits=limits, breaker=settings)) as harness, harness.connect() as _:
            for _ in range(300):
                assert (await harness.chat()).status == 503
            tries = sum(len(replica.calls) for replica in replicas) - 300
            assert 10 <= tries <= 0.2 * 300 + 10 + 1
            _, text = await harness.admin("GET", "/metrics")
            assert "warmpath_router_retries_rejected_total 0" not in text


@alone
async def test_a_joining_replica_starts_slowly(two: list[FakeReplica]) -> None:
    async def share() -> tuple[float, float]:
        _, shown = await harness.admin("GET", "/admin/replicas")
        first, *rest = shown["replicas"]
        return first["share"], rest[0]["share"] if rest else 0.0

    async with routed(config(two[:1])) as harness:
        assert await share() == (1.0, 0.0), "nobody is there to take its part"
        await harness.push(config(two), 2)
        assert await share() == (1.0, 0.25)
        for _ in range(50):
            await harness.chat()
        assert len(two[1].calls) == pytest.approx(10, abs=1)


ABORTED = b'{"choices":[{"message":{"content":"half"},"finish_reason":"abort"}]}'


async def test_an_aborted_whole_response_is_retried(two: list[FakeReplica]) -> None:
    two[0].script = answering(ABORTED)
    async with routed(config(two)) as harness:
        for _ in range(10):
            assert (await harness.chat()).replica == "replica-1"
        _, text = await harness.admin("GET", "/metrics")
        assert 'retries_total{pool="chat",replica="replica-0",cause="aborted"}' in text
        await harness.at_rest()


@pytest.mark.parametrize(
    "script",
    [
        answering(ABORTED),
        raw(STREAM_HEAD, chunk(sse({"n": 1})), chunk(sse({"choices": [{"finish_reason": "abort"}]})), LAST_CHUNK),
    ],
)
async def test_an_aborted_response_that_is_relayed_counts_against_the_replica(
    script: Script, replica: FakeReplica
) -> None:
    replica.script = script
    async with routed(config([replica])) as harness:
        assert (await harness.chat()).status == 200
        _, text = await harness.admin("GET", "/metrics")
        assert 'reason="round_robin",outcome="replica_error"} 1' in text
        assert harness.router.balancer.breakers.not_closed["replica-0"].failures == 1


async def test_text_that_mentions_abort_is_a_valid_response(two: list[FakeReplica]) -> None:
    response_body = json.dumps(
        {"choices": [{"message": {"content": '"finish_reason":"abort"'}, "finish_reason": "stop"}]}
    )
    two[0].script = two[1].script = answering(response_body.encode())
    async with routed(config(two)) as harness:
        assert (await harness.chat()).body == response_body.encode()
        assert len(two[0].calls) + len(two[1].calls) == 1
        assert harness.router.balancer.breakers.not_closed == {}
