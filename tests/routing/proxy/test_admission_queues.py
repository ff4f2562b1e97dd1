"""More requests than replicas can serve: some wait, the rest are rejected, throughput stays."""

from __future__ import annotations

import asyncio
import gc
import json
from dataclasses import dataclass, field
from time import monotonic
from unittest.mock import Mock

import msgspec
import pytest

from routing.proxy.admission_queues import AdmissionQueues
from routing.schema import ConcurrencyConfig, HealthCheck, Limits, ObjectiveMissed, TaskGroupConfig
from tests.fakes.replica import Call, answering, fake_replicas, hanging, plain_answer, sse
from tests.routing.proxy.harness import (
    CHAT,
    Harness,
    Response,
    api_key,
    bearer,
    chat_body,
    config,
    post,
    routed,
    samples,
    with_keys,
)
from tests.routing.proxy.streams import STREAM

LONG = chat_body(text="word " * 50_000, stream=True)
NARROW = ConcurrencyConfig(max_running=2, max_waiting=2, max_wait_s=30.0)


@dataclass
class HeldRequests:
    """Holds every request until ``answer_next``; ``names`` has their order."""

    names: list[str] = field(default_factory=list)
    waiting_calls: list[Call] = field(default_factory=list)

    async def __call__(self, call: Call) -> None:
        self.names.append(json.loads(call.body)["user"])
        self.waiting_calls.append(call)
        await call.gone.wait()

    async def answer_next(self) -> None:
        call = self.waiting_calls.pop(0)
        await call.send(plain_answer(b"{}"))
        call.gone.set()


def body(name: str) -> bytes:
    return json.dumps({**json.loads(STREAM), "user": name}).encode()


async def waiting(harness: Harness, count: int, key: tuple[str, str] = ("chat", "")) -> None:
    await harness.until(
        lambda: harness.router.services.all_admission_queues._queues[key][0].waiting == count, f"{count} to wait"
    )


def ask(harness: Harness, name: str, *headers: bytes) -> asyncio.Task[Response]:
    return asyncio.create_task(harness.chat(body(name), headers))


async def test_requests_over_the_limit_wait_and_those_over_the_queue_get_429(replica):
    replica.script = held_requests = HeldRequests()
    async with routed(config([replica], concurrency=NARROW)) as harness:
        requests = [ask(harness, "0"), ask(harness, "1")]
        await replica.wait_calls(2)
        for count in (1, 2):
            requests.append(ask(harness, str(1 + count)))
            await waiting(harness, count)
        rejected = await harness.chat()
        assert (rejected.status, rejected.headers["retry-after"]) == (429, "1")
        assert rejected.error["type"] == "rate_limit_error"
        _, text = await harness.admin("GET", "/metrics")
        assert 'queue_running{pool="chat",group=""} 2' in text
        assert 'queue_waiting{pool="chat",group=""} 2' in text
        assert 'queue_rejected_total{pool="chat",group="",cause="full"} 1' in text
        for count in range(4):
            await replica.wait_calls(count + 1)
            await held_requests.answer_next()
        assert {response.status for response in await asyncio.gather(*requests)} == {200}
        assert held_requests.names[2:] == ["2", "3"]
        _, text = await harness.admin("GET", "/metrics")
        assert 'queue_seconds_count{pool="chat",group=""} 2' in text
        await harness.at_rest()


async def test_urgent_requests_go_first_and_clients_cannot_raise_their_priority(replica):
    replica.script = held_requests = HeldRequests()
    groups = (TaskGroupConfig(name="batch", priority=5),)
    async with routed(config([replica], concurrency=ConcurrencyConfig(max_running=1), groups=groups)) as harness:
        requests = [ask(harness, "0")]
        await replica.wait_calls(1)
        queued = [
            ("batch", b"X-Task-Group: batch", b"X-Priority: 0"),
            ("modest", b"X-Priority: 4"),
            ("odd", b"X-Priority: urgent"),
            ("last", b"X-Task-Group: batch", b"X-Priority: 9"),
            ("first", b"X-Priority: 0"),
        ]
        for count, (name, *headers) in enumerate(queued, 1):
            requests.append(ask(harness, name, *headers))
            await waiting(harness, count)
        for count in range(6):
            await replica.wait_calls(count + 1)
            await held_requests.answer_next()
        await asyncio.gather(*requests)
        assert held_requests.names == ["0", "odd", "first", "modest", "batch", "last"]
        assert (b"x-priority", b"0") in replica.calls[2].headers, "the replica is told as well"


async def test_a_tenant_with_many_requests_waits_by_itself_whatever_keys_and_groups_it_uses(replica):
    replica.script = held_requests = HeldRequests()
    keys = [api_key("a-1", tenant="a"), api_key("a-2", "k2", tenant="a"), api_key("b", "k3"), api_key("c", "k4")]
    keys[3] = msgspec.structs.replace(keys[3], queue_weight=4.0)
    async with routed(with_keys([replica], *keys, concurrency=ConcurrencyConfig(max_running=1))) as harness:
        requests = [ask(harness, "0", bearer("k2"))]
        await replica.wait_calls(1)
        queued = [("a1", None), ("a2", "k2"), ("a3", None), ("a4", "k2")]
        queued += [(f"b{number}", "k3") for number in (1, 2)] + [(f"c{number}", "k4") for number in (1, 2, 3, 4)]
        for count, (name, secret) in enumerate(queued, 1):
            group = b"X-Task-Group: " + (b"coding" if count % 2 else b"chatting")
            requests.append(ask(harness, name, bearer() if secret is None else bearer(secret), group))
            await waiting(harness, count)
        for count in range(11):
            await replica.wait_calls(count + 1)
            await held_requests.answer_next()
        assert {response.status for response in await asyncio.gather(*requests)} == {200}
        assert held_requests.names == ["0", "b1", "c1", "c2", "c3", "c4", "a1", "b2", "a2", "a3", "a4"]
        await harness.at_rest()


async def objectives(harness: Harness) -> dict[str, float]:
    """Requests with an objective for TTFT, by group and result."""
    found = samples((await harness.admin("GET", "/metrics"))[1]).get("warmpath_router_ttft_objectives_total", [])
    return {f"{labels['group']} {labels['result']}": value for labels, value in found}


async def test_objectives_for_ttft_are_recorded_as_kept_or_missed(replica):
    async def respond(call: Call) -> None:
        await asyncio.sleep(0.01)
        await call.stream(sse({"choices": [{"text": "Yes"}]}), sse("[DONE]"))

    replica.script = respond
    groups = (TaskGroupConfig(name="chat", ttft_objective_ms=60_000),)
    async with routed(config([replica], groups=groups)) as harness:
        for headers in (), (b"X-Task-Group: chat",), (b"X-Task-Group: chat", b"X-TTFT-Objective-Ms: 1"):
            assert (await harness.chat(STREAM, headers)).status == 200
        assert (await harness.chat(STREAM, [b"X-TTFT-Objective-Ms: soon"])).status == 200
        assert (await harness.chat(headers=[b"X-TTFT-Objective-Ms: 1000"])).status == 200, "of streams only"
        _, page = await harness.admin("GET", "/admin/decisions")
        seen = [(decision["objective_ms"], decision["objective_kept"]) for decision in page["decisions"]]
        assert seen == [(None, None), (60_000, True), (1, False), (None, None), (None, None)]
        assert await objectives(harness) == {"chat kept": 1, "chat missed": 1}


async def test_a_client_that_gives_up_after_its_objective_has_missed_it(replica):
    replica.script = hanging
    async with routed(config([replica])) as harness:
        for count, objective_ms in enumerate((b"60000", b"1"), 1):
            async with harness.connect() as client:
                await client.send(post(CHAT, STREAM, [b"X-TTFT-Objective-Ms: " + objective_ms]))
                await replica.wait_calls(count)
                waits_since = monotonic()
                await harness.until(lambda since=waits_since: monotonic() > since + 0.01, "the objective to pass")
            await harness.at_rest()
        assert await objectives(harness) == {" missed": 1}


async def test_a_pool_may_shed_requests_whose_objective_cannot_be_kept(replica):
    replica.script = held_requests = HeldRequests()
    limit = ConcurrencyConfig(max_running=1, max_wait_s=30.0, on_objective_missed=ObjectiveMissed.SHED)
    async with routed(config([replica], concurrency=limit)) as harness:
        at_once = await harness.chat(LONG, [b"X-TTFT-Objective-Ms: 100"])
        assert at_once.status == 429
        assert 5 <= int(at_once.headers["retry-after"]) <= 60, "as long as the prompt takes, less the objective"
        first = ask(harness, "0")
        await replica.wait_calls(1)
        queued = await ask(harness, "1", b"X-TTFT-Objective-Ms: 100")
        assert (queued.status, "retry-after" in queued.headers) == (429, True)
        await held_requests.answer_next()
        assert (await first).status == 200
        assert await objectives(harness) == {" shed": 2}
        await harness.at_rest()


async def test_a_request_with_an_objective_goes_to_a_replica_that_keeps_it():
    async with fake_replicas(2, hanging) as replicas, routed(config(replicas)) as harness:  # in turn
        long = asyncio.create_task(harness.chat(LONG))
        await harness.until(lambda: any(replica.calls for replica in replicas), "the long prompt to be sent")
        free = next(replica for replica in replicas if not replica.calls)
        free.script = answering()
        for _ in range(4):
            assert (await harness.chat(STREAM, [b"X-TTFT-Objective-Ms: 1000"])).status == 200
        assert len(free.calls) == 4
        long.cancel()


async def test_a_group_over_its_limit_leaves_permits_for_others(replica):
    replica.script = held_requests = HeldRequests()
    groups = (TaskGroupConfig(name="batch", concurrency=ConcurrencyConfig(max_running=1, max_waiting=1)),)
    batch = b"X-Task-Group: batch"
    async with routed(config([replica], concurrency=NARROW, groups=groups)) as harness:
        requests = [ask(harness, "b0", batch)]
        await replica.wait_calls(1)
        requests.append(ask(harness, "b1", batch))
        await waiting(harness, 1, ("chat", "batch"))
        assert (await harness.chat(headers=[batch])).status == 429
        requests.append(ask(harness, "c0"))
        await replica.wait_calls(2)
        for count in range(3):
            await replica.wait_calls(count + 1)
            await held_requests.answer_next()
        assert {response.status for response in await asyncio.gather(*requests)} == {200}
        assert held_requests.names == ["b0", "c0", "b1"]
        await harness.at_rest()


async def test_a_request_that_leaves_the_second_queue_costs_nothing_in_the_first_and_its_exchange_is_forgotten():
    groups = (TaskGroupConfig(name="batch", concurrency=ConcurrencyConfig(max_running=2)),)
    queues = AdmissionQueues()
    queues.configure(config([], concurrency=ConcurrencyConfig(max_running=1), groups=groups))
    admitted, rejected = Mock(), Mock()
    assert queues.permit("chat", "", None, None, 100, admitted, rejected).acquire()
    permit = queues.permit("chat", "batch", None, None, 100_000, admitted, rejected, latest_start=1e9)
    assert not permit.acquire()
    permit.release()
    assert queues._queues["chat", "batch"][0]._flows["batch"].lanes[0].tag == 0.0
    assert not [callback for callback in gc.get_referents(permit) if callback in (admitted, rejected)]


async def test_waiting_too_long_gets_503(replica):
    replica.script = hanging
    concurrency = ConcurrencyConfig(max_running=1, max_wait_s=0.1)
    async with routed(config([replica], concurrency=concurrency)) as harness:
        first = ask(harness, "0")
        await replica.wait_calls(1)
        response = await harness.chat()
        assert (response.status, "retry-after" in response.headers) == (503, True)
        first.cancel()
        await harness.until(lambda: harness.router.services.in_flight == 0, "the first to be cancelled")
        gate = harness.router.services.all_admission_queues._queues["chat", ""][0]
        assert (gate.running, gate.waiting) == (0, 0)


async def test_clients_that_disconnect_while_queued_leave_nothing(replica):
    replica.script = held_requests = HeldRequests()
    async with routed(config([replica], concurrency=ConcurrencyConfig(max_running=1))) as harness:
        first = ask(harness, "0")
        await replica.wait_calls(1)
        cancelled = [ask(harness, "gone") for _ in range(20)]
        await waiting(harness, 20)
        last = ask(harness, "last")
        await waiting(harness, 21)
        for task in cancelled:
            task.cancel()
        await waiting(harness, 1)
        await held_requests.answer_next()
        await replica.wait_calls(2)
        await held_requests.answer_next()
        assert [(await task).status for task in (first, last)] == [200, 200]
        assert held_requests.names == ["0", "last"]
        await harness.at_rest()


@pytest.mark.parametrize("after", [None, ConcurrencyConfig(max_running=9)])
async def test_a_configuration_with_a_higher_limit_admits_queued_requests(after, replica):
    replica.script = held_requests = HeldRequests()
    async with routed(config([replica], concurrency=ConcurrencyConfig(max_running=1))) as harness:
        requests = [ask(harness, "0")]
        await replica.wait_calls(1)
        requests += [ask(harness, str(number)) for number in (1, 2, 3)]
        await waiting(harness, 3)
        await harness.push(config([replica], concurrency=after), 2)
        await replica.wait_calls(4)
        for _ in range(4):
            await held_requests.answer_next()
        assert {response.status for response in await asyncio.gather(*requests)} == {200}
        await harness.at_rest()


async def test_an_admitted_request_without_a_replica_gets_503(replica):
    replica.script = held_requests = HeldRequests()
    concurrency = ConcurrencyConfig(max_running=1)
    health = HealthCheck(failures=1, interval_s=0.05)
    async with routed(config([replica], concurrency=concurrency, health=health)) as harness:
        first = ask(harness, "0")
        await replica.wait_calls(1)
        second = ask(harness, "1")
        await waiting(harness, 1)
        replica.health_status = 500
        await harness.until(lambda: not harness.health.is_up("replica-0"), "it to be down")
        await held_requests.answer_next()
        assert [(await task).status for task in (first, second)] == [200, 503]
        await harness.at_rest()


async def test_without_limits_there_are_no_queues_and_no_metrics(replica):
    async with routed(config([replica], limits=Limits())) as harness:
        assert (await harness.chat()).status == 200
        assert harness.router.services.admission_queues is None
        _, text = await harness.admin("GET", "/metrics")
        assert "queue_" not in text


async def test_a_retry_keeps_its_permit():
    async with fake_replicas(2, answering(b"{}", status=503)) as replicas:
        replicas[1].script = answering()
        async with routed(config(replicas, concurrency=ConcurrencyConfig(max_running=1))) as harness:
            responses = await asyncio.gather(*(harness.chat() for _ in range(10)))
            assert {response.status for response in responses} == {200}
            await harness.at_rest()
