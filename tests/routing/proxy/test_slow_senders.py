"""How long a client is waited for that sends slowly, or no more."""

from __future__ import annotations

import asyncio
import time

import pytest

from routing.schema import Limits
from tests.fakes.replica import FakeReplica
from tests.pace import is_within
from tests.routing.proxy.harness import CHAT, RawClient, config, get, post, routed

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
