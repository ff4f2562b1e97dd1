"""Clients that send too much or too slowly: their cost to the router and to other clients."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from time import perf_counter

import pytest

from routing.schema import Limits
from tests.fakes.replica import FakeReplica
from tests.routing.proxy.harness import BODY, CHAT, RawClient, connect, get, post
from tests.routing.proxy.own_process import Process, started
from tests.side_by_side import alone

MIB = 1 << 20
START = b"POST /v1/completions HTTP/1.1\r\nHost: router\r\n"
CHUNK = b"10000\r\n" + b"x" * 65_536 + b"\r\n"
SLOW_CLIENTS = 2000
OFFERS = 3500  # pipelined upgrade offers
NOISE_S = 0.005  # that another process on the machine may add to a 99th percentile


async def pour_on(client: RawClient, piece: bytes, size: int) -> None:
    """Send ``size`` bytes, or as many as possible before the connection closes."""
    async with asyncio.timeout(30):
        for _ in range(size // len(piece)):
            client.writer.write(piece)
            try:
                await client.writer.drain()
            except ConnectionError:
                return
    raise AssertionError("all of it was taken")


async def pour(client: RawClient, head: bytes, piece: bytes, size: int) -> bytes:
    """Send ``size`` bytes of body, or as many as possible; returns the response."""
    response = asyncio.create_task(client.read_all())
    client.writer.write(head)
    for _ in range(size // len(piece)):
        if response.done() or client.writer.transport.is_closing():
            break
        client.writer.write(piece)
        try:
            await asyncio.wait_for(client.writer.drain(), timeout=10)
        except ConnectionError:
            break
    return await response


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (START + b"Content-Length: 104857600\r\n\r\n", b"x" * 65_536),
        (START + b"Transfer-Encoding: chunked\r\n\r\n", CHUNK),
        (START + b"Transfer-Encoding: chunked\r\n\r\n", b"5\r\nxxxxx\r\n" * 6000),
        (START + b"Transfer-Encoding: chunked\r\n\r\n1;", b"e" * 65_536),
        (START + b"X: ", b"y" * 65_536),
        (START, b"X: y\r\n" * 10_000),
        (b"GET /", b"y" * 65_536),
        (b"", b"\r\n" * 32_768),
    ],
    ids=["length", "chunks", "tiny chunks", "chunk extension", "header", "headers", "target", "empty lines"],
)
async def test_a_hundred_mebibytes_cost_at_most_sixteen(
    head: bytes, piece: bytes, replica: FakeReplica, tmp_path: Path
) -> None:
    limits = Limits(max_body_bytes=8 * MIB)
    async with started(replica, tmp_path, limits) as router, connect(router.port) as client:
        async with connect(router.port) as other_client:
            await other_client.send(post(CHAT))
            assert (await other_client.read_response()).status == 200
        router.forget_peak()
        before = router.memory_bytes("VmRSS")
        response = await pour(client, head, piece, 100 * MIB)
        assert response == b"" or re.match(rb"HTTP/1.1 (400|413|431) ", response)
        assert router.memory_bytes("VmHWM") - before <= 16 * MIB
        async with connect(router.port) as other_client:
            await other_client.send(post(CHAT))
            assert (await other_client.read_response()).status == 200


@pytest.mark.parametrize("path", [b"/health", b"/nowhere"])
async def test_a_client_that_reads_no_responses_is_not_read(path: bytes, replica: FakeReplica, tmp_path: Path) -> None:
    """A queued request takes ten times its bytes."""
    async with (
        started(replica, tmp_path, Limits(write_stall_timeout_s=3.0)) as router,
        connect(router.port) as other_client,
        connect(router.port) as client,
    ):
        await other_client.send(post(CHAT))
        assert (await other_client.read_response()).status == 200
        router.forget_peak()
        before = router.memory_bytes("VmRSS")
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # asyncio's are read and written to
        await pour_on(client, get(path) * 1000, 100 * MIB)
        assert router.memory_bytes("VmHWM") - before <= 16 * MIB
        await other_client.send(post(CHAT))
        assert (await other_client.read_response()).status == 200


async def test_many_upgrade_offers_in_one_read_are_declined(replica: FakeReplica, tmp_path: Path) -> None:
    """The parser stops at each offer, with all others still unread."""
    offer = get(b"/nowhere", [b"Connection: upgrade", b"Upgrade: x"])
    async with started(replica, tmp_path, Limits()) as router, connect(router.port) as client:
        await client.send(offer)
        assert (await client.read_response()).status == 404
        router.forget_peak()
        before = router.memory_bytes("VmRSS")
        await client.send(offer * OFFERS)
        for _ in range(OFFERS):
            assert (await client.read_response()).status == 404
        assert router.memory_bytes("VmHWM") - before <= 16 * MIB


@alone
async def test_slow_clients_delay_no_other_and_are_disconnected(replica: FakeReplica, tmp_path: Path) -> None:
    """A third sends incomplete heads, the others bodies that never end."""
    limits = Limits(header_timeout_s=2.0, body_grace_s=2.0)
    halves = (START, START + b"Content-Length: 1000\r\n\r\n{", START + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{")
    async with started(replica, tmp_path, limits) as router, asyncio.TaskGroup() as group:
        quiet = await _p99_s(router)
        before = router.memory_bytes("VmRSS")
        slow = [await asyncio.open_connection("127.0.0.1", router.port) for _ in range(SLOW_CLIENTS)]
        for number, (_, writer) in enumerate(slow):
            writer.write(halves[number % len(halves)])
        group.create_task(_drip([writer for number, (_, writer) in enumerate(slow) if number % len(halves) == 1]))
        assert await _p99_s(router) <= 1.2 * quiet + NOISE_S
        assert router.memory_bytes("VmRSS") - before <= SLOW_CLIENTS * 16 * 1024
        async with asyncio.timeout(10):
            responses = await asyncio.gather(*(reader.read() for reader, _ in slow))
        assert all(response.startswith(b"HTTP/1.1 408 ") for response in responses)
        for _, writer in slow:
            writer.transport.abort()


async def _drip(writers: list[asyncio.StreamWriter]) -> None:
    """Send a byte from each, again and again, until they are closed."""
    while writers := [writer for writer in writers if not writer.transport.is_closing()]:
        for writer in writers:
            writer.write(b" ")
        await asyncio.sleep(0.5)


async def _p99_s(router: Process) -> float:
    """Of 200 requests, one after the other."""
    took = []
    async with connect(router.port) as client:
        for _ in range(200):
            started_at = perf_counter()
            await client.send(post(CHAT, BODY))
            assert (await client.read_response()).status == 200
            took.append(perf_counter() - started_at)
    return sorted(took)[-3]


async def test_bodies_that_never_end_are_bounded_together(replica: FakeReplica, tmp_path: Path) -> None:
    limits = Limits(max_unfinished_body_bytes=64 * MIB)
    async with started(replica, tmp_path, limits) as router:
        before = router.memory_bytes("VmRSS")
        connections = [await asyncio.open_connection("127.0.0.1", router.port) for _ in range(20)]
        for _, writer in connections:
            writer.write(START + b"Content-Length: 8388608\r\n\r\n")
            writer.write(b"x" * (8_388_608 - 1))
        waiting = {asyncio.create_task(reader.readline()) for reader, _ in connections}
        rejected: set[asyncio.Task[bytes]] = set()
        async with asyncio.timeout(20):
            while len(rejected) < 20 - limits.max_unfinished_body_bytes // 8_388_608:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                rejected |= done
        assert {task.result() for task in rejected} == {b"HTTP/1.1 503 Service Unavailable\r\n"}
        assert router.memory_bytes("VmHWM") - before <= limits.max_unfinished_body_bytes + 64 * MIB
        async with connect(router.port) as other_client:  # a body in one read does not count
            await other_client.send(post(CHAT))
            assert (await other_client.read_response()).status == 200
        for _, writer in connections:
            writer.transport.abort()
        await asyncio.gather(*waiting, return_exceptions=True)
        async with connect(router.port) as other_client:
            big = b'{"prompt":"%b"}' % (b"x" * 8_000_000)
            await other_client.send(post(b"/v1/completions", big))
            assert (await other_client.read_response()).status == 200
