"""Clients that go away, run ahead or ask too much."""

from __future__ import annotations

import asyncio
import json

import pytest

from routing.schema import Limits
from tests.fakes.replica import STREAM_HEAD, Call, FakeReplica, chunk, hanging, plain_answer, sse
from tests.routing.proxy.harness import CHAT, RawClient, config, get, post, routed


@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_goes_away_stops_its_replica_at_once(begun: bool, replica: FakeReplica) -> None:
    async def script(call: Call) -> None:
        if begun:
            await call.send(STREAM_HEAD, chunk(sse({"n": 1})))
        await call.wait_gone()

    replica.script = script
    async with routed(config([replica])) as harness:
        async with harness.connect() as client:
            await client.send(post(CHAT))
            call = await replica.wait_calls(1)
            if begun:
                await client.read_until(b"\n\n")
        async with asyncio.timeout(1):
            await call.gone.wait()
        await harness.at_rest()
        _, text = await harness.admin("GET", "/metrics")
        assert 'outcome="cancelled"} 1' in text


async def test_a_thousand_clients_that_go_away_leave_nothing_behind(replica: FakeReplica) -> None:
    async def script(call: Call) -> None:
        await call.send(STREAM_HEAD, chunk(sse({"n": 1})))
        await call.wait_gone()

    replica.script = script
    async with routed(config([replica])) as harness:

        async def come_and_go(number: int) -> None:
            async with harness.connect() as client:
                await client.send(post(CHAT))
                if number % 2:
                    await client.read_until(b"\n\n")

        for start in range(0, 1000, 50):
            await asyncio.gather(*(come_and_go(start + number) for number in range(50)))
        await harness.at_rest()
        await harness.until(lambda: not harness.router.clients, "all connections to be forgotten")
        link = harness.router.active.connection_pools["replica-0"]
        await harness.until(lambda: link.connections == 0, "all upstream connections to be closed")
        assert len(harness.router.deadlines) == 0


async def test_pipelined_requests_are_answered_in_order(two: list[FakeReplica]) -> None:
    async def slow(call: Call) -> None:
        await asyncio.sleep(0.1)
        await call.send(plain_answer(b"slow " + call.body[-3:]))

    async def quick(call: Call) -> None:
        await call.send(plain_answer(b"quick " + call.body[-3:]))

    two[0].script, two[1].script = slow, quick
    bodies = [b'{"prompt":"%d"}' % number for number in range(8)]
    async with routed(config(two)) as harness, harness.connect() as client:
        requests = [post(b"/v1/completions", body) for body in bodies]
        await client.send(b"".join([*requests[:4], get(b"/health"), *requests[4:], get(b"/nowhere")]))
        answers = [await client.answer() for _ in range(10)]
    assert [answer.status for answer in answers] == [200] * 9 + [404]
    assert [answer.body[-3:] for answer in answers[:4] + answers[5:9]] == [body[-3:] for body in bodies]


async def test_a_malformed_request_is_refused_after_those_before_it_are_answered(replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(post(CHAT) + post(CHAT) + b"GET / HTTP/1.1\r\n\r\n" + post(CHAT))
        assert [(await client.answer()).status for _ in range(3)] == [200, 200, 400]
        assert await client.read_all() == b""
    assert len(replica.calls) == 2


async def test_nothing_after_connection_close_is_answered(replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(post(CHAT, headers=[b"Connection: close"]) + post(CHAT))
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await client.read_all() == b""
    assert len(replica.calls) == 1


async def test_a_client_far_ahead_is_not_read_and_loses_nothing(replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness, harness.connect() as client:
        padded = json.dumps({"prompt": "x" * 10_000}).encode()
        sending = asyncio.create_task(client.send(*[post(b"/v1/completions", padded)] * 300))
        for _ in range(300):
            assert (await client.answer()).status == 200
        await sending
    assert len(replica.calls) == 300


async def test_an_address_has_so_many_connections_and_another_one_its_own(replica: FakeReplica) -> None:
    """S2"""
    limits = Limits(max_connections_per_address=3)
    async with routed(config([replica])) as harness, harness.connect() as before:
        await before.send(post(CHAT))
        assert (await before.answer()).status == 200
        await harness.push(config([replica], limits=limits), 2)
        async with harness.connect() as second, harness.connect() as third:
            await harness.until(lambda: len(harness.router.clients) == 3, "three connections")
            async with harness.connect() as fourth:
                assert await fourth.read_all() == b"", "and those who were there count too"
            reader, writer = await asyncio.open_connection("127.0.0.1", harness.port, local_addr=("127.0.0.2", 0))
            for client in (before, second, third, RawClient(reader, writer)):
                await client.send(post(CHAT))
                assert (await client.answer()).status == 200
            writer.close()
        await harness.until(lambda: len(harness.router.clients) == 1, "two of them to end")
        async with harness.connect() as again:
            await again.send(post(CHAT))
            assert (await again.answer()).status == 200
        _, text = await harness.admin("GET", "/metrics")
        assert "warmpath_router_connections_refused_total 1\n" in text
        await harness.push(config([replica]), 3)
        assert len(harness.router.connection_limit) == 0
        async with harness.connect(), harness.connect(), harness.connect(), harness.connect():
            await harness.until(lambda: len(harness.router.clients) == 5, "as many as like")


async def test_requests_over_the_limit_are_told_to_come_back(replica: FakeReplica) -> None:
    replica.script = hanging
    async with routed(config([replica], limits=Limits(max_in_flight=2))) as harness:
        async with harness.connect() as first, harness.connect() as second, harness.connect() as third:
            await first.send(post(CHAT))
            await second.send(post(CHAT))
            await replica.wait_calls(2)
            await third.send(post(CHAT))
            answer = await third.answer()
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        await harness.at_rest()
