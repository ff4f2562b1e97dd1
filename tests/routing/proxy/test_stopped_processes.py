"""A router that could not run for a while: a stopped process, or one that gets little of the machine.

The time in which it could not read counts against no client and no replica, and every request gets its response.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from routing.schema import HealthCheck, Limits
from tests.fakes.replica import LAST_CHUNK, STREAM_HEAD, Call, FakeReplica, chunk, plain_answer
from tests.routing.proxy.harness import CHAT, RawClient, config, connect, get, post, routed
from tests.routing.proxy.own_process import started

# Deadlines that are over long before the process continues.
LIMITS = Limits(
    header_timeout_s=1.0,
    body_idle_timeout_s=1.0,
    body_grace_s=1.0,
    keep_alive_timeout_s=1.0,
    first_byte_timeout_s=1.0,
    response_timeout_s=1.0,
    idle_timeout_s=1.0,
    connect_timeout_s=1.0,
    write_stall_timeout_s=1.0,
    retries=0,
)
STOPPED_S = 15.0
REQUEST = post(CHAT)
CUTS = (0, 30, REQUEST.index(b"\r\n\r\n") + 8, len(REQUEST) - 1)  # nothing, in the head, in the body, before its end


async def streamed(call: Call) -> None:
    await call.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
    await asyncio.sleep(0.2)
    await call.send(chunk(b"data: 2\n\n") + LAST_CHUNK)


async def open_at(port: int, stack: AsyncExitStack, cut: int) -> RawClient:
    client: RawClient = await stack.enter_async_context(connect(port))
    await client.send(REQUEST[:cut])
    return client


async def test_every_request_is_answered_after_the_process_was_stopped(replica: FakeReplica, tmp_path: Path) -> None:
    """Requests begun before the stop, in its middle, and streams that run through it."""
    snapshot = config([replica], limits=LIMITS, health=HealthCheck(failures=100))
    async with started(replica, tmp_path, LIMITS, snapshot=snapshot) as router, AsyncExitStack() as stack:
        kept_alive = await open_at(router.port, stack, len(REQUEST))
        assert (await kept_alive.read_response()).status == 200
        replica.script = streamed
        begun = [(cut, await open_at(router.port, stack, cut)) for cut in CUTS for _ in range(20)]
        running = [await open_at(router.port, stack, len(REQUEST)) for _ in range(20)]
        await replica.wait_calls(21)
        router.stop()
        try:
            await asyncio.sleep(0.2)
            for cut, client in begun:
                await client.send(REQUEST[cut:])
            await kept_alive.send(REQUEST)
            late = [await open_at(router.port, stack, len(REQUEST)) for _ in range(20)]
            await asyncio.sleep(STOPPED_S)
        finally:
            router.resume()
        for client in [kept_alive, *(client for _, client in begun), *running, *late]:
            response = await client.read_response()
            assert (response.status, response.body[:9]) == (200, b"data: 1\n\n")


async def test_a_starved_process_refuses_no_request_that_moves(replica: FakeReplica, tmp_path: Path) -> None:
    """The process runs for 20 ms in each half second, and each body moves after each of these."""
    limits = Limits(header_timeout_s=0.6, body_idle_timeout_s=0.6, body_grace_s=60, keep_alive_timeout_s=60)
    snapshot = config([replica], limits=limits, health=HealthCheck(failures=100))
    async with started(replica, tmp_path, limits, snapshot=snapshot) as router, AsyncExitStack() as stack:
        clients = [await open_at(router.port, stack, len(REQUEST) - 8) for _ in range(20)]
        for at in range(len(REQUEST) - 8, len(REQUEST)):
            router.stop()
            await asyncio.sleep(0.5)
            for client in clients:
                await client.send(REQUEST[at : at + 1])
            router.resume()
            await asyncio.sleep(0.02)
        for client in clients:
            assert (await client.read_response()).status == 200


async def test_connections_that_end_are_counted_by_reason(replica: FakeReplica) -> None:
    limits = Limits(header_timeout_s=0.1, body_idle_timeout_s=0.1, keep_alive_timeout_s=0.3)

    async def answered(call: Call) -> None:
        await call.send(plain_answer(b"{}"))

    replica.script = answered
    sent = {
        "idle": b"",
        "timeout": REQUEST[:30],
        "rejected": b"GET / HTTP/9.9\r\n\r\n",
        "complete": get(b"/health", [b"Connection: close"]),
    }
    async with routed(config([replica], limits=limits)) as harness:
        for data in sent.values():
            async with harness.connect() as client:
                if data:
                    await client.send(data)
                await client.read_all()
        async with harness.connect() as client:
            await client.send(REQUEST)
            await client.read_response()
        await harness.until(lambda: not harness.router.clients, "the connections to end")
        _, text = await harness.admin("GET", "/metrics")
        for reason in (*sent, "client"):
            assert f'connections_closed_total{{reason="{reason}"}} 1\n' in text, reason
        assert 'connections_closed_total{reason="unread"} 0\n' in text
