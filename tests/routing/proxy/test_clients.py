"""Clients that go away, stall, run ahead or ask too much; and a router that starts, stops or agrees with another."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from routing.schema import HealthCheck, Limits, PrefixHashSettings, TaskGroupConfig
from tests.fakes.replica import (
    LAST_CHUNK,
    STREAM_HEAD,
    Call,
    FakeReplica,
    chunk,
    fake_replicas,
    hanging,
    plain_answer,
    sse,
)
from tests.pace import is_within
from tests.routing.proxy.harness import CHAT, RawClient, config, connect, get, post, routed

NEVER_DOWN = HealthCheck(failures=100, interval_s=60)


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
        link = harness.router.serving.links["replica-0"]
        await harness.until(lambda: link.connections == 0, "all upstream connections to be closed")
        assert len(harness.router.deadlines) == 0


async def test_a_client_that_does_not_read_holds_up_its_replica_and_no_memory(replica: FakeReplica) -> None:
    sent = 0

    async def script(call: Call) -> None:
        nonlocal sent
        await call.send(STREAM_HEAD)
        piece = chunk(b"x" * 65_536)
        for _ in range(500):  # 32 MiB
            await call.send(piece)
            sent += len(piece)
        await call.send(LAST_CHUNK)

    replica.script = script
    async with routed(config([replica])) as harness, harness.connect() as client:
        client.writer.transport.pause_reading()
        await client.send(post(CHAT))
        await replica.wait_calls(1)
        before = -1
        while sent != before:  # until nothing moves any more
            before = sent
            await asyncio.sleep(0.2)
        (connection,) = harness.router.clients
        assert connection.is_full
        assert connection.transport.get_write_buffer_size() < 1 << 20
        assert sent < 24 << 20  # what the sockets' buffers hold
        client.writer.transport.resume_reading()
        answer = await client.answer()
        assert len(answer.body) == 500 * 65_536


async def test_a_client_that_takes_nothing_is_cut_at_its_deadline(replica: FakeReplica) -> None:
    async def script(call: Call) -> None:
        await call.send(STREAM_HEAD)
        for _ in range(2000):
            await call.send(chunk(b"x" * 65_536))

    replica.script = script
    async with routed(config([replica], limits=Limits(write_stall_timeout_s=0.2))) as harness:
        async with harness.connect() as client:
            client.writer.transport.pause_reading()
            await client.send(post(CHAT))
            await replica.wait_calls(1)
            await harness.until(lambda: not harness.router.clients, "the client to be cut")
        await harness.at_rest()


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


DEADLINES = Limits(header_timeout_s=0.15, body_idle_timeout_s=0.15, keep_alive_timeout_s=0.15)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n", 408),
        (b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nabc", 408),
        (b"", None),
        (get(b"/health"), 200),
    ],
)
async def test_a_client_that_says_no_more_is_let_go(sent: bytes, status: int | None, replica: FakeReplica) -> None:
    async with routed(config([replica], limits=DEADLINES)) as harness, harness.connect() as client:
        if sent:
            await client.send(sent)
        if status is not None:
            assert (await client.answer()).status == status
        assert await client.read_all() == b""
        await harness.until(lambda: not harness.router.clients, "the connection to end")


async def test_a_head_that_trickles_has_one_deadline_for_the_whole(replica: FakeReplica) -> None:
    async with routed(config([replica], limits=DEADLINES)) as harness, harness.connect() as client:
        answer = asyncio.create_task(client.read_all())
        endless = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 1000
        for byte in endless:
            client.writer.write(bytes([byte]))
            await asyncio.wait([answer], timeout=0.01)
            if answer.done():
                break
        assert (await answer).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("before", [b"", get(b"/health")], ids=["at first", "kept alive"])
async def test_empty_lines_before_a_request_buy_no_time(before: bytes, replica: FakeReplica) -> None:
    limits = Limits(header_timeout_s=0.15, keep_alive_timeout_s=60)
    async with routed(config([replica], limits=limits)) as harness, harness.connect() as client:
        if before:
            await client.send(before)
            assert (await client.answer()).status == 200
        ending = asyncio.create_task(client.read_all())
        for _ in range(1000):
            client.writer.write(b"\r\n")
            await asyncio.wait([ending], timeout=0.01)
            if ending.done():
                break
        assert await ending == b""


async def test_empty_lines_between_requests_are_forgotten_with_each_request(replica: FakeReplica) -> None:
    limits = Limits(max_header_bytes=1024, header_timeout_s=30, keep_alive_timeout_s=60)
    async with routed(config([replica], limits=limits)) as harness, harness.connect() as client:
        time_s = asyncio.get_running_loop().time
        for _ in range(20):
            await client.send(post(CHAT))
            assert (await client.answer()).status == 200
            await client.send(b"\r\n" * 30)
            await harness.until(lambda: all(it.deadline < time_s() + 45 for it in harness.router.clients), "a read")


async def test_a_body_that_trickles_is_waited_for_while_it_moves(replica: FakeReplica) -> None:
    async with routed(config([replica], limits=DEADLINES)) as harness, harness.connect() as client:
        request = post(CHAT)
        await client.send(request[:-10])
        for byte in request[-10:]:
            await asyncio.sleep(0.05)
            await client.send(bytes([byte]))
        assert (await client.answer()).status == 200


async def drip(client: RawClient, data: bytes, piece: int, every_s: float) -> bytes:
    """Send a piece now and then, until all is sent or an answer is here; what came back."""
    answer = asyncio.create_task(client.read_until(b"\r\n"))
    for at in range(0, len(data), piece):
        if answer.done():
            break
        client.writer.write(data[at : at + piece])
        await asyncio.wait([answer], timeout=every_s)
    return await answer


@pytest.mark.parametrize("framing", [b"Content-Length: 4000", b"Transfer-Encoding: chunked"])
async def test_a_body_that_moves_too_slowly_is_let_go_though_it_never_stops(
    framing: bytes, replica: FakeReplica
) -> None:
    """S2: 100 bytes/s after the grace, where 1,000 are asked for."""
    limits = Limits(body_idle_timeout_s=5.0, body_grace_s=0.3)
    async with routed(config([replica], limits=limits)) as harness, harness.connect() as client:
        await client.send(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n" + framing + b"\r\n\r\n")
        body = b"1\r\nx\r\n" * 4000 if framing.startswith(b"T") else b"x" * 4000
        begun = time.monotonic()
        assert await drip(client, body, len(body) // 4000, 0.01) == b"HTTP/1.1 408 Request Timeout\r\n"
        took_s = time.monotonic() - begun
        assert took_s >= 0.3
        assert is_within(took_s, 2.0)
    assert replica.calls == []


async def test_a_body_that_keeps_its_pace_has_all_the_time_it_needs(replica: FakeReplica) -> None:
    """2,000 bytes in a second, with a grace of a tenth; then a pause that those bytes have paid for."""
    limits = Limits(body_idle_timeout_s=5.0, body_grace_s=0.1)
    async with routed(config([replica], limits=limits)) as harness, harness.connect() as client:
        request = post(b"/v1/completions", b'{"prompt":"' + b"x" * 4000 + b'"}')
        await client.send(request[:2000])
        for at in range(2000, 4000, 40):
            await client.send(request[at : at + 40])
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        await client.send(request[4000:])
        assert (await client.answer()).status == 200


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
        assert len(harness.router.addresses) == 0
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


async def test_without_a_configuration_there_is_nothing_to_serve() -> None:
    async with routed(None) as harness:
        answer = await harness.chat()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        async with harness.connect() as client:
            await client.send(get(b"/health"))
            assert (await client.answer()).status == 503
        assert await harness.admin("GET", "/readyz") == (
            503,
            {"status": "not_ready", "reason": "no configuration yet"},
        )


async def test_a_stopping_router_finishes_what_it_began(replica: FakeReplica) -> None:
    """R11"""

    go = asyncio.Event()

    async def script(call: Call) -> None:
        await call.send(STREAM_HEAD, chunk(sse({"n": 1})))
        await go.wait()
        await call.send(chunk(sse({"n": 2})), LAST_CHUNK)

    replica.script = script
    async with routed(config([replica])) as harness, harness.connect() as idle, harness.connect() as busy:
        await idle.send(get(b"/health"))
        await idle.answer()
        await busy.send(post(CHAT) + post(CHAT))
        await replica.wait_calls(1)
        draining = asyncio.create_task(harness.server.drain())
        assert await idle.read_all() == b""
        assert await harness.admin("GET", "/readyz") == (503, {"status": "not_ready", "reason": "draining"})
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", harness.port)
        assert not draining.done()
        go.set()
        assert (await busy.answer()).body == sse({"n": 1}) + sse({"n": 2})
        async with asyncio.timeout(5):
            await draining
        await harness.at_rest()


async def test_a_stopping_router_does_not_wait_for_ever(replica: FakeReplica) -> None:
    """R11"""

    replica.script = hanging
    async with routed(config([replica], limits=Limits(drain_timeout_s=0.1))) as harness, harness.connect() as client:
        await client.send(post(CHAT))
        await replica.wait_calls(1)
        async with asyncio.timeout(2):
            await harness.server.drain()


async def test_two_routers_send_the_same_prompt_to_the_same_replica() -> None:
    async with fake_replicas(5) as replicas:
        snapshot = config(replicas, settings=PrefixHashSettings())
        async with routed(snapshot) as one, routed(snapshot) as other:
            chosen = set()
            for number in range(40):
                message = {"role": "system", "content": f"You are expert number {number}. " * 20}
                body = json.dumps({"model": "tiny", "messages": [message]}).encode()
                first, second = await one.chat(body), await other.chat(body)
                assert first.replica == second.replica
                assert first.headers["x-warmpath-reason"] == "affinity"
                chosen.add(first.replica)
            assert len(chosen) == 5


async def test_a_task_group_uses_its_own_replicas_and_an_unknown_one_is_none(two: list[FakeReplica]) -> None:
    groups = (TaskGroupConfig(name="coding", replicas=("replica-1",)),)
    async with routed(config(two, groups=groups)) as harness:
        for _ in range(4):
            assert (await harness.chat(headers=[b"X-Task-Group: coding"])).replica == "replica-1"
        replicas = {(await harness.chat(headers=[b"X-Task-Group: nobody"])).replica for _ in range(2)}
        assert replicas == {"replica-0", "replica-1"}
        _, text = await harness.admin("GET", "/metrics")
        assert 'group="coding"' in text
        assert "nobody" not in text


async def test_a_router_out_of_sockets_does_not_blame_the_replica(
    replica: FakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with routed(config([replica], health=NEVER_DOWN)) as harness, connect(harness.port) as client:

        async def fail(*_: object, **__: object) -> None:
            raise OSError(24, "Too many open files")

        finding = harness.router.checks.finding("replica-0")
        await harness.until(lambda: finding.is_up, "the first probe")
        link = harness.router.serving.links["replica-0"]
        monkeypatch.setattr(
            link,
            "_loop",
            type("Loop", (), {"create_connection": fail, "create_task": harness.router.loop.create_task})(),
        )
        await client.send(post(CHAT))
        assert (await client.answer()).status == 502
        assert finding.failures == 0
