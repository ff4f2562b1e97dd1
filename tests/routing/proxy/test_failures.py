"""Failures of replicas, before and after the first byte, and their deadlines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from routing.schema import RETRY_CAUSES, HealthCheck, Limits
from tests.fakes.replica import (
    STREAM_HEAD,
    Call,
    FakeReplica,
    Script,
    answering,
    chunk,
    fake_replicas,
    halting,
    hanging,
    plain_answer,
    raw,
    resetting,
    sse,
)
from tests.routing.proxy.harness import BODY, CHAT, config, get, post, routed

DRAINING = json.dumps({"error": {"message": "cannot schedule new futures after shutdown", "code": 500}}).encode()
SHORT = Limits(
    first_byte_timeout_s=0.15,
    response_timeout_s=0.15,
    idle_timeout_s=0.15,
    connect_timeout_s=0.5,
    retry_on=RETRY_CAUSES,
)
NEVER_DOWN = HealthCheck(failures=100, interval_s=60)

RETRIED: dict[str, tuple[Script, str]] = {
    "reset at once": (resetting, "reset"),
    "closed inside the head": (raw(b"HTTP/1.1 200 O", then_close=True), "reset"),
    "closed after the head": (raw(STREAM_HEAD, then_close=True), "reset"),
    "closed inside an error": (raw(b"HTTP/1.1 500 X\r\nContent-Length: 9\r\n\r\nabc", then_close=True), "reset"),
    "hanging": (hanging, "timeout"),
    "502": (answering(b"{}", status=502), "status_502"),
    "503": (answering(b"{}", status=503), "status_503"),
    "504": (answering(b"{}", status=504), "status_504"),
    "503 and long": (answering(b"x" * 200_000, status=503), "status_503"),
    "draining vLLM": (answering(DRAINING, status=500), "draining"),
}


@pytest.mark.parametrize("name", RETRIED)
async def test_a_replica_that_fails_before_the_first_byte_is_not_noticed_by_clients(
    name: str, two: list[FakeReplica]
) -> None:
    script, cause = RETRIED[name]
    two[0].script = script
    async with routed(config(two, limits=SHORT, health=NEVER_DOWN)) as harness:
        for _ in range(4):
            answer = await harness.chat()
            assert (answer.status, answer.body, answer.replica) == (200, b'{"ok":true}', "replica-1")
        await harness.at_rest()
        _, text = await harness.admin("GET", "/metrics")
        assert (
            f'warmpath_router_retries_total{{pool="chat",replica="replica-0",cause="{cause}"}} {len(two[0].calls)}'
            in text
        )
    assert two[0].calls[0].body == two[1].calls[0].body == BODY


async def test_a_replica_that_refuses_connections_is_not_noticed_by_clients(two: list[FakeReplica]) -> None:
    two[0].kill()
    async with routed(config(two)) as harness:
        for _ in range(6):
            assert (await harness.chat()).replica == "replica-1"
        await harness.until(
            lambda: not harness.router.balancer.health.is_up("replica-0"), "the dead replica to be down"
        )


@pytest.mark.parametrize(
    ("script", "status"),
    [
        (resetting, 502),
        (hanging, 504),
        (answering(b'{"mine":1}', status=503), 503),
        (answering(DRAINING, status=500), 500),
    ],
)
async def test_when_all_have_failed_the_client_learns_the_last_failure(
    script: Script, status: int, two: list[FakeReplica]
) -> None:
    for replica in two:
        replica.script = script
    async with routed(config(two, limits=SHORT, health=NEVER_DOWN)) as harness, harness.connect() as client:
        await client.send(post(CHAT))
        answer = await client.answer()
        assert answer.status == status
        await client.send(get(b"/health"))  # the client's connection is sound
        assert (await client.answer()).status == 200
        await harness.at_rest()
    assert [len(replica.calls) for replica in two] == [1, 1]


@pytest.mark.parametrize("retries", [0, 1, 2])
async def test_no_more_replicas_are_tried_than_the_limit_says(retries: int) -> None:
    async with fake_replicas(5, resetting) as replicas:
        limits = Limits(retries=retries)
        async with routed(config(replicas, limits=limits, health=NEVER_DOWN)) as harness:
            assert (await harness.chat()).status == 502
        assert sum(len(replica.calls) for replica in replicas) == 1 + retries


@pytest.mark.parametrize("status", [400, 404, 422, 500, 501])
async def test_other_statuses_are_passed_on(status: int, two: list[FakeReplica]) -> None:
    for replica in two:
        replica.script = answering(b'{"theirs":1}', status=status, extra=b"Retry-After: 7\r\n")
    async with routed(config(two)) as harness:
        answer = await harness.chat()
    assert (answer.status, answer.body, answer.headers["retry-after"]) == (status, b'{"theirs":1}', "7")
    assert sum(len(replica.calls) for replica in two) == 1


async def test_a_stale_connection_is_replaced_by_a_fresh_one_to_the_same_replica(replica: FakeReplica) -> None:
    async with routed(config([replica], limits=Limits(retries=0), health=NEVER_DOWN)) as harness:
        assert (await harness.chat()).status == 200
        (upstream,) = harness.router.active.connection_pools["replica-0"]._idle
        upstream._transport.pause_reading()  # so that the router has not heard of it yet
        replica.calls[0].close()
        await replica.calls[0].writer.wait_closed()
        asked = asyncio.create_task(harness.chat())
        await harness.until(lambda: upstream.waiting is not None, "the request to be sent")
        upstream._transport.resume_reading()
        assert (await asked).status == 200
        _, text = await harness.admin("GET", "/metrics")
        assert harness.router.balancer.breakers.not_closed == {}
    assert (replica.connections, len(replica.calls)) == (2, 2)
    assert "retries_total{" not in text


@pytest.mark.parametrize("ends", [Call.close, Call.reset])
async def test_a_replica_that_breaks_over_a_request_is_not_sent_it_again(
    ends: Callable[[Call], None], two: list[FakeReplica]
) -> None:
    async def script(call: Call) -> None:
        if len(two[0].calls) == 1:
            await call.send(plain_answer(b"fine"))
        else:
            ends(call)

    two[0].script = script
    async with routed(config(two, health=NEVER_DOWN)) as harness:
        while not two[0].calls:
            assert (await harness.chat()).status == 200
        while len(two[0].calls) < 2:
            assert (await harness.chat()).status == 200
        await harness.at_rest()
        _, text = await harness.admin("GET", "/metrics")
        assert harness.router.balancer.breakers.not_closed["replica-0"].failures == 1
    assert 'retries_total{pool="chat",replica="replica-0",cause="reset"} 1' in text
    assert two[0].connections == 1


async def test_a_connection_that_dies_after_a_byte_of_an_answer_is_not_stale(replica: FakeReplica) -> None:
    async def script(call: Call) -> None:
        if len(replica.calls) == 1:
            await call.send(plain_answer(b"fine"))
        else:
            await call.send(b"HTTP/1.1 2")
            call.close()

    replica.script = script
    async with routed(config([replica])) as harness, harness.connect() as client:
        for status in (200, 502):
            await client.send(post(CHAT))
            assert (await client.answer()).status == status
    assert len(replica.calls) == 2


async def test_connections_to_replicas_are_kept_and_used_again(replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness:
        for _ in range(5):
            await harness.chat()
    assert replica.connections == 1


async def test_a_stream_that_stops_ends_with_an_error_event_at_its_deadline(replica: FakeReplica) -> None:
    replica.script = halting
    async with routed(config([replica], limits=SHORT)) as harness:
        answer = await harness.chat()
        await harness.at_rest()
        await harness.until(replica.calls[0].gone.is_set, "the router to hang up on the replica")
    assert json.loads(answer.body.split(b"data: ")[2])["error"]["code"] == 504


async def test_without_any_replica_up_the_answer_names_the_pool(two: list[FakeReplica]) -> None:
    for replica in two:
        replica.health_status = 503
    async with routed(config(two, health=HealthCheck(failures=1, interval_s=0.05))) as harness:
        await harness.until(lambda: not harness.router.balancer.health.is_up("replica-1"), "both to be down")
        await harness.until(lambda: not harness.router.balancer.health.is_up("replica-0"), "both to be down")
        answer = await harness.chat()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert "'chat'" in answer.error["message"]
        two[0].health_status = 200
        await harness.until(lambda: harness.router.balancer.health.is_up("replica-0"), "one to be up")
        assert (await harness.chat()).replica == "replica-0"
        _, text = await harness.admin("GET", "/metrics")
        assert (
            'warmpath_router_requests_total{pool="chat",group="",replica="",policy="",revision="",reason="",'
            'outcome="router_error"} 1' in text
        )


async def test_a_replica_too_busy_for_its_health_check_is_up_while_its_answers_come(replica: FakeReplica) -> None:
    stops = asyncio.Event()

    async def script(call: Call) -> None:
        await call.send(STREAM_HEAD)
        while not stops.is_set():
            await call.send(chunk(sse({"n": 1})))
            await asyncio.sleep(0.01)
        await call.wait_gone()

    replica.script = script
    health = HealthCheck(failures=1, interval_s=0.02, timeout_s=0.3)
    async with routed(config([replica], health=health)) as harness, asyncio.TaskGroup() as group:
        asked = group.create_task(harness.chat())
        await replica.wait_calls(1)
        await harness.until(lambda: harness.router.services.checks.status("replica-0").is_up, "a first finding")
        replica.health_status, before = None, replica.probes
        await harness.until(lambda: replica.probes >= before + 4, "some checks to pass in silence")
        assert harness.router.balancer.health.is_up("replica-0")

        stops.set()
        await harness.until(
            lambda: not harness.router.balancer.health.is_up("replica-0"), "it to be down, now it is silent"
        )
        assert "no response within" in (harness.router.services.checks.status("replica-0").reason or "")
        asked.cancel()


async def test_a_replica_that_comes_back_is_used_again(replica: FakeReplica) -> None:
    async with routed(config([replica], health=HealthCheck(interval_s=0.05))) as harness:
        assert (await harness.chat()).status == 200
        replica.kill()
        await harness.until(lambda: not harness.router.balancer.health.is_up("replica-0"), "it to be down")
        assert (await harness.chat()).status == 503
        await replica.start()
        await harness.until(lambda: harness.router.balancer.health.is_up("replica-0"), "it to be up")
        assert (await harness.chat()).status == 200


async def test_a_router_out_of_sockets_does_not_blame_the_replica(
    replica: FakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with routed(config([replica], health=NEVER_DOWN)) as harness, harness.connect() as client:

        async def fail(*_: object, **__: object) -> None:
            raise OSError(24, "Too many open files")

        finding = harness.router.services.checks.status("replica-0")
        await harness.until(lambda: finding.is_up, "the first probe")
        link = harness.router.active.connection_pools["replica-0"]
        monkeypatch.setattr(
            link,
            "_loop",
            type("Loop", (), {"create_connection": fail, "create_task": harness.router.loop.create_task})(),
        )
        await client.send(post(CHAT))
        assert (await client.answer()).status == 502
        assert finding.failures == 0
