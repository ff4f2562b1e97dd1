"""Replicas that fail requests and not their health checks; and how much is tried again."""

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

WELL = answering()
BROKEN = answering(b'{"error":"x"}', status=500)
QUICK = BreakerConfig(open_s=0.3)
QUEUE_FULL = (
    b'{"error":{"message":"The engine is currently busy and cannot accept new requests. Please try again later or on a '
    b'different instance.","type":"Service Unavailable","code":503}}'
)
DEAD_ENGINE = [chunk(sse({"error": {"message": "EngineCore died", "code": 500}})), chunk(sse("[DONE]"))]


async def test_a_replica_that_fails_five_times_is_left_alone_and_comes_back_by_trial(two: list[FakeReplica]) -> None:
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
        two[0].script = WELL
        await harness.until(lambda: harness.router.balancer.health.is_up("replica-0"), "a probe")
        for _ in range(8):
            assert (await harness.chat()).status == 200
        _, shown = await harness.admin("GET", "/admin/replicas")
        row = shown["replicas"][0]
        assert (row["breaker"], row["reason"], row["share"]) == ("closed", None, 0.25)
        await harness.at_rest()


async def test_while_it_is_tried_no_other_request_goes_there(two: list[FakeReplica]) -> None:
    two[0].script = BROKEN
    async with routed(config(two, breaker=QUICK)) as harness:
        for _ in range(10):
            await harness.chat()
        two[0].script = hang
        await harness.until(lambda: harness.router.balancer.health.is_up("replica-0"), "a probe")
        probe = asyncio.create_task(harness.chat())
        while len(two[0].calls) < 6:
            await asyncio.wait([probe], timeout=0.01)
            if probe.done():
                probe = asyncio.create_task(harness.chat())
        for _ in range(6):
            assert (await harness.chat()).replica == "replica-1"
        assert len(two[0].calls) == 6
        probe.cancel()


async def taken_out(harness: Harness, sick: FakeReplica) -> None:
    """Let a replica break until it is out, and then be tried."""
    sick.script = BROKEN
    while harness.router.balancer.health.is_up(sick.name):
        await harness.chat()
    harness.router.balancer.breakers.on_health_check_passed(ReplicaId(sick.name))


async def probed(client: RawClient, sick: FakeReplica) -> None:
    """Ask until the replica that is tried has the request."""
    before = len(sick.calls)
    while len(sick.calls) == before:
        await client.send(post(CHAT))
        waits = [asyncio.ensure_future(client.answer()), asyncio.ensure_future(sick.wait_calls(before + 1))]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await asyncio.wait(waits)


async def test_a_client_that_goes_when_its_trial_has_shown_something_does_not_end_the_next_one(
    two: list[FakeReplica],
) -> None:
    async def begin(call: Call) -> None:
        await call.send(STREAM_HEAD, chunk(sse({"n": 1})))
        await call.wait_gone()

    breaker = BreakerConfig(open_s=60, successes=3)
    async with routed(config(two, breaker=breaker)) as harness, harness.connect() as second:
        await taken_out(harness, two[0])
        state = harness.router.balancer.breakers.not_closed[ReplicaId(two[0].name)]
        two[0].script = begin
        async with harness.connect() as first:
            await probed(first, two[0])
            await harness.until(lambda: state.successes == 1, "a first byte")
            two[0].script = hang
            await probed(second, two[0])
            assert state.is_probing
        await harness.until(lambda: harness.router.services.in_flight == 1, "the first client's end to be heard of")
        assert state.is_probing
        tried = len(two[0].calls)
        for _ in range(4):
            assert (await harness.chat()).replica == "replica-1"
        assert len(two[0].calls) == tried


async def test_a_stream_from_before_that_breaks_does_not_end_the_trial(two: list[FakeReplica]) -> None:
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
        sick = next(replica for replica in two if replica.calls)
        two[two[0] is sick].script = WELL
        await taken_out(harness, sick)
        breaks.set()
        assert b"error" in await old.read_all()
        state = harness.router.balancer.breakers.not_closed[ReplicaId(sick.name)]
        assert (state.state, state.reason) == ("half_open", "status_500")


@pytest.mark.parametrize("status", [429, 501])
async def test_a_trial_that_shows_nothing_leaves_its_place_to_the_next_request(
    status: int, two: list[FakeReplica]
) -> None:
    async with routed(config(two, breaker=BreakerConfig(open_s=60))) as harness, harness.connect() as client:
        await taken_out(harness, two[0])
        two[0].script = answering(b"{}", status=status)
        await probed(client, two[0])
        await harness.at_rest()
        assert not harness.router.balancer.breakers.not_closed[ReplicaId(two[0].name)].is_probing


@pytest.mark.parametrize("status", [400, 404, 429, 501])
async def test_errors_that_are_not_the_replicas_fault_take_nobody_out(status: int, two: list[FakeReplica]) -> None:
    two[0].script = answering(b"{}", status=status)
    async with routed(config(two)) as harness:
        for _ in range(20):
            await harness.chat()
        assert len(two[0].calls) == 10


async def test_a_full_queue_is_tried_elsewhere_and_takes_nobody_out(two: list[FakeReplica]) -> None:
    two[0].script = answering(QUEUE_FULL, status=503)
    async with routed(config(two)) as harness:
        for _ in range(20):
            assert (await harness.chat()).replica == "replica-1"
        assert harness.router.balancer.breakers.not_closed == {}
        busy = len(two[0].calls)
        assert busy >= 10
        _, text = await harness.admin("GET", "/metrics")
        assert f'retries_total{{pool="chat",replica="replica-0",cause="busy"}} {busy}' in text


async def test_engines_that_die_in_streams_are_noticed(two: list[FakeReplica]) -> None:
    two[0].script = raw(STREAM_HEAD, chunk(sse({"n": 1})), *DEAD_ENGINE, LAST_CHUNK)
    async with routed(config(two)) as harness:
        for _ in range(20):
            await harness.chat()
        assert len(two[0].calls) == 5


async def test_answers_cut_short_are_noticed(two: list[FakeReplica]) -> None:
    two[0].script = raw(STREAM_HEAD, chunk(sse({"n": 1})), then_close=True)
    async with routed(config(two, health=HealthCheck(failures=100))) as harness:
        for _ in range(20):
            await harness.chat()
        assert len(two[0].calls) == 5


async def test_the_only_replica_is_never_taken_out(replica: FakeReplica) -> None:
    replica.script = BROKEN
    async with routed(config([replica])) as harness:
        for _ in range(12):
            assert (await harness.chat()).status == 500
    assert len(replica.calls) == 12


@pytest.mark.parametrize(("extra", "calls"), [(b"Retry-After: 1\r\n", 2), (b"X-Other: 1\r\n", 1)])
async def test_too_many_requests_are_tried_elsewhere_once_if_the_replica_says_so(extra: bytes, calls: int) -> None:
    async with fake_replicas(4, answering(b"{}", status=429, extra=extra)) as replicas:
        async with routed(config(replicas, limits=Limits(retries=3))) as harness:
            answer = await harness.chat()
            assert answer.status == 429
            assert ("retry-after" in answer.headers) is (calls == 2)
            await harness.at_rest()
        assert sum(len(replica.calls) for replica in replicas) == calls


async def test_a_sick_pool_is_not_beaten_to_death() -> None:
    """Every request fails everywhere: replicas see the traffic, a fifth more, and the floor."""
    async with fake_replicas(4, answering(b"{}", status=503)) as replicas:
        limits = Limits(retry_ratio=0.2, retry_floor_per_s=1)
        settings = BreakerConfig(max_out_ratio=0.0)
        async with routed(config(replicas, limits=limits, breaker=settings)) as harness, harness.connect() as _:
            for _ in range(300):
                assert (await harness.chat()).status == 503
            tries = sum(len(replica.calls) for replica in replicas) - 300
            assert 10 <= tries <= 0.2 * 300 + 10 + 1
            _, text = await harness.admin("GET", "/metrics")
            assert "warmpath_router_retries_refused_total 0" not in text


@alone
async def test_a_replica_that_joins_starts_slowly(two: list[FakeReplica]) -> None:
    async def share() -> tuple[float, float]:
        _, shown = await harness.admin("GET", "/admin/replicas")
        first, *others = shown["replicas"]
        return first["share"], others[0]["share"] if others else 0.0

    async with routed(config(two[:1])) as harness:
        assert await share() == (1.0, 0.0), "nobody is there to take its part"
        await harness.push(config(two), 2)
        assert await share() == (1.0, 0.25)
        for _ in range(50):
            await harness.chat()
        assert len(two[1].calls) == pytest.approx(10, abs=1)


async def test_a_stream_of_five_hundred_requests_survives_a_replica_that_always_resets(two: list[FakeReplica]) -> None:
    async def reset(call: Call) -> None:
        call.reset()

    two[0].script = reset
    async with routed(config(two, breaker=BreakerConfig(open_s=0.05))) as harness:
        for _ in range(500):
            assert (await harness.chat()).status == 200
        await harness.at_rest()
        assert len(two[0].calls) < 50


ABORTED = b'{"choices":[{"message":{"content":"half"},"finish_reason":"abort"}]}'


async def test_a_whole_answer_that_a_stopping_engine_aborted_is_given_anew(two: list[FakeReplica]) -> None:
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
async def test_an_aborted_answer_that_had_to_be_passed_on_counts_against_the_replica(
    script: Script, replica: FakeReplica
) -> None:
    replica.script = script
    async with routed(config([replica])) as harness:
        assert (await harness.chat()).status == 200
        _, text = await harness.admin("GET", "/metrics")
        assert 'reason="round_robin",outcome="replica_error"} 1' in text
        assert harness.router.balancer.breakers.not_closed["replica-0"].failures == 1


async def test_a_text_that_speaks_of_abort_is_a_good_answer(two: list[FakeReplica]) -> None:
    said = json.dumps({"choices": [{"message": {"content": '"finish_reason":"abort"'}, "finish_reason": "stop"}]})
    two[0].script = two[1].script = answering(said.encode())
    async with routed(config(two)) as harness:
        assert (await harness.chat()).body == said.encode()
        assert len(two[0].calls) + len(two[1].calls) == 1
        assert harness.router.balancer.breakers.not_closed == {}
