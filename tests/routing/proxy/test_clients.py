"""Clients that disconnect, pipeline, exceed limits, or read or send slowly, and requests that the router rejects."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Callable

import pytest

from routing.http.loop import BURST_BYTES, BURST_WRITES, WriteBuffer
from routing.http.tls import TlsFiles
from routing.proxy.client_connection import MAX_PIPELINED_BYTES, MAX_QUEUED, PIECE_PARSED_BYTES
from routing.schema import Limits
from tests.fakes.certificates import Authority
from tests.fakes.replica import Call, chunk, hanging, plain_answer, sse
from tests.pace import is_within
from tests.routing.proxy.harness import BODY, CHAT, Harness, RawClient, chat_body, config, get, narrow, post, routed

LONG = chat_body(text="word " * 800_000)


@pytest.mark.parametrize(
    ("request_bytes", "has_started"),
    [
        (post(CHAT), False),
        (post(CHAT), True),
        (post(CHAT, LONG), False),
        (post(CHAT, gzip.compress(LONG), [b"Content-Encoding: gzip"]), False),  # decoding takes several turns
    ],
    ids=["waiting", "streaming", "long", "encoded"],
)
async def test_a_client_that_disconnects_stops_its_replica_at_once(request_bytes, has_started, replica):
    async def script(call: Call) -> None:
        if has_started:
            await call.begin_stream(sse({"n": 1}))
        await call.wait_gone()

    replica.script = script
    async with routed(config([replica])) as harness:
        async with harness.connect() as client:
            await client.send(request_bytes)
            call = await replica.wait_calls(1)
            if has_started:
                await client.read_until(b"\n\n")
        async with asyncio.timeout(1):
            await call.gone.wait()
        await harness.at_rest()
        _, text = await harness.admin("GET", "/metrics")
        assert 'outcome="cancelled"} 1' in text


async def test_a_client_that_disconnects_after_sending_more_is_noticed(replica):
    replica.script = hanging
    async with routed(config([replica])) as harness:
        async with harness.connect() as client:
            await client.send(post(CHAT))
            call = await replica.wait_calls(1)
            for _ in range(3):  # some clients end a body with an empty line
                await client.send(b"\r\n")
                await asyncio.sleep(0.05)
        async with asyncio.timeout(1):
            await call.gone.wait()


async def test_pipelined_requests_are_answered_in_order(two):
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
        responses = [await client.read_response() for _ in range(10)]
    assert [response.status for response in responses] == [200] * 9 + [404]
    assert [response.body[-3:] for response in responses[:4] + responses[5:9]] == [body[-3:] for body in bodies]


async def test_connections_are_limited_by_address(replica):
    limits = Limits(max_connections_per_address=3)
    async with routed(config([replica])) as harness, harness.connect() as before:
        assert (await before.ask(post(CHAT))).status == 200
        await harness.push(config([replica], limits=limits), 2)
        async with harness.connect() as second, harness.connect() as third:
            await harness.until(lambda: len(harness.router.clients) == 3, "three connections")
            async with harness.connect() as fourth:
                assert await fourth.read_all() == b"", "and those who were there count too"
            reader, writer = await asyncio.open_connection("127.0.0.1", harness.port, local_addr=("127.0.0.2", 0))
            for client in (before, second, third, RawClient(reader, writer)):
                assert (await client.ask(post(CHAT))).status == 200
            writer.close()
        await harness.until(lambda: len(harness.router.clients) == 1, "two of them to end")
        assert (await harness.send(post(CHAT))).status == 200
        _, text = await harness.admin("GET", "/metrics")
        assert 'connections_closed_total{reason="limit"} 1\n' in text
        await harness.push(config([replica]), 3)
        assert len(harness.router.connection_limit) == 0
        async with harness.connect(), harness.connect(), harness.connect(), harness.connect():
            await harness.until(lambda: len(harness.router.clients) == 5, "as many as like")


async def test_requests_over_the_limit_get_503_with_retry_after(replica):
    replica.script = hanging
    async with routed(config([replica], limits=Limits(max_in_flight=2))) as harness:
        async with harness.connect() as first, harness.connect() as second, harness.connect() as third:
            await first.send(post(CHAT))
            await second.send(post(CHAT))
            await replica.wait_calls(2)
            response = await third.ask(post(CHAT))
            assert (response.status, response.headers["retry-after"]) == (503, "1")
        await harness.at_rest()


LENGTH = b"Content-Length: %d\r\n" % len(BODY)
START = b"POST /v1/chat/completions HTTP/1.1\r\n"
HOST = b"Host: router\r\n"
END = b"\r\n"


async def test_the_100_continue_follows_the_responses_to_earlier_requests(replica):
    before = get(b"/health") * 200  # more than are answered in one iteration
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(before + START + HOST + LENGTH + b"Expect: 100-continue\r\n" + END)
        assert [(await client.read_response()).status for _ in range(201)] == [200] * 200 + [100]
        assert (await client.ask(BODY)).status == 200


async def test_a_rejected_client_can_read_the_rejection_while_it_sends(replica):
    limits = Limits(max_body_bytes=1024)
    async with routed(config([replica], limits=limits)) as harness, harness.connect() as client:
        assert (await client.ask(START + HOST + b"Content-Length: 4000000\r\n" + END, b"x" * 1_000_000)).status == 413


# --- Clients that read or send slowly: deadlines, and the memory that they can make the router hold ---


MAX_HELD_BYTES = 2 << 20  # of one client: some reads of a replica, or some local responses
READ_BYTES = 256 << 10  # the largest read of the event loop
ASKED = 30_000
PIECE = chunk(b"x" * 65_536)
PIECES = 1_000  # 64 MiB, many times the socket buffers


async def at_a_standstill(figure: Callable[[], int]) -> int:
    """Wait until a value stops changing; returns it."""
    async with asyncio.timeout(30):
        before = -1
        while figure() != before:
            before = figure()
            await asyncio.sleep(0.3)
    return before


def held_bytes(harness: Harness) -> int:
    """Bytes in the transports' write buffers."""
    return sum(client.transport.get_write_buffer_size() for client in harness.router.clients)


async def flood(call: Call) -> None:
    await call.begin_stream()
    for _ in range(PIECES):
        await call.send(PIECE)
    await call.end_stream()


@pytest.mark.parametrize("is_tls", [False, True])
async def test_a_client_that_does_not_read_pauses_its_replica(is_tls, tmp_path, replica):
    authority, replica.script = Authority(tmp_path), flood
    certificate = authority.issue("router")
    files = TlsFiles(str(certificate.path), str(certificate.key)) if is_tls else None
    async with (
        routed(config([replica]), tls=files) as harness,
        harness.connect(authority.client() if is_tls else None) as client,
    ):
        client.writer.transport.pause_reading()
        await client.send(post(CHAT))
        await harness.until(lambda: any(it.is_full for it in harness.router.clients), "the client to be full")
        assert await at_a_standstill(lambda: held_bytes(harness)) < MAX_HELD_BYTES
        client.writer.transport.resume_reading()
        assert len((await client.read_response()).body) == PIECES * 65_536


async def test_a_client_that_reads_nothing_is_disconnected_at_its_deadline(replica):
    async def script(call: Call) -> None:
        await call.begin_stream()
        for _ in range(2000):
            await call.send(chunk(b"x" * 65_536))

    replica.script = script
    async with routed(config([replica], limits=Limits(write_stall_timeout_s=0.2))) as harness:
        async with harness.connect() as client:
            client.writer.transport.pause_reading()
            await client.send(post(CHAT))
            await replica.wait_calls(1)
            await harness.until(lambda: not harness.router.clients, "the client to be disconnected")
        await harness.at_rest()


async def test_a_client_that_ends_its_side_and_reads_nothing_is_disconnected(replica):
    async def script(call: Call) -> None:
        await call.begin_stream(sse({"n": "x" * 40_000}))  # fewer bytes than pause the replica
        await call.wait_gone()

    replica.script = script
    limits = Limits(write_stall_timeout_s=0.2)
    async with routed(config([replica], limits=limits)) as harness, narrow(harness) as client:
        client.writer.write(post(CHAT))
        await harness.until(lambda: held_bytes(harness), "unread bytes")
        client.writer.write_eof()
        await harness.until(lambda: not harness.router.clients, "the client to be disconnected")


async def test_a_client_that_is_full_before_the_response_pauses_its_replica(replica):
    """Pipelined requests: a response fills the client while the next request is in flight."""
    harness: Harness

    async def script(call: Call) -> None:
        if any(client.is_full for client in harness.router.clients):
            await flood(call)
        else:
            await call.send(plain_answer(b"a" * 60_000))

    replica.script = script
    async with routed(config([replica])) as harness, narrow(harness) as client:
        client.writer.write(post(CHAT) * 40)
        await harness.until(lambda: any(it.is_full for it in harness.router.clients), "the client to be full")
        assert await at_a_standstill(lambda: held_bytes(harness)) < MAX_HELD_BYTES

        received = len(replica.calls)
        assert received < 40
        client.writer.transport.resume_reading()
        for _ in range(received - 1):
            assert len((await client.read_response()).body) == 60_000
        await client.read_until(b"\r\n\r\n")
        async with asyncio.timeout(10):
            await client.reader.readexactly(2 * MAX_HELD_BYTES)  # and the replica is read again


async def test_a_client_that_sends_and_does_not_read_is_not_read(replica):
    request = get(b"/health")
    async with routed(config([replica])) as harness, narrow(harness) as client:
        client.writer.write(request * ASKED + get(b"/health", (b"Connection: close",)))
        await harness.until(lambda: any(it.is_full for it in harness.router.clients), "the client to be full")
        (connection,) = harness.router.clients
        waiting = await at_a_standstill(lambda: len(connection._reader.queue))
        assert 0 < waiting * len(request) <= MAX_PIPELINED_BYTES + READ_BYTES
        assert held_bytes(harness) < MAX_HELD_BYTES

        client.writer.transport.resume_reading()
        assert (await client.read_all()).count(b"HTTP/1.1 ") == ASKED + 1


async def test_few_pipelined_requests_are_parsed_ahead(replica):
    """However small its reads are: a parsed request takes many times its bytes."""

    async def script(call: Call) -> None:
        await call.begin_stream()
        while True:
            await call.send(chunk(sse({"n": 1})))
            await asyncio.sleep(0.001)

    replica.script = script
    request = get(b"/")
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(post(CHAT))
        await client.read_until(b"\n\n")
        (connection,) = harness.router.clients
        for _ in range(30):
            await client.send(request * 20)
            await asyncio.sleep(0.005)
        assert 0 < len(connection._reader.queue) <= MAX_QUEUED + PIECE_PARSED_BYTES // len(request)


class Wire(asyncio.Transport):
    """A transport that counts written bytes."""

    written_bytes = 0

    def write(self, data: bytes) -> None:  # type: ignore[override]
        self.written_bytes += len(data)


async def test_writes_of_one_iteration_do_not_pile_up():
    write_buffer, wire, written = WriteBuffer(asyncio.get_running_loop()), Wire(), 0
    for _ in range(10 * BURST_WRITES):
        write_buffer.write(wire, bytes(BURST_BYTES))
        written += BURST_BYTES
        assert written - wire.written_bytes < BURST_WRITES * BURST_BYTES
    write_buffer.flush()
    assert wire.written_bytes == written


DEADLINES = Limits(header_timeout_s=0.15, body_idle_timeout_s=0.15, keep_alive_timeout_s=0.15)


async def test_a_trickling_head_has_one_deadline(replica):
    async with routed(config([replica], limits=DEADLINES)) as harness, harness.connect() as client:
        response = asyncio.create_task(client.read_all())
        endless = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 1000
        for byte in endless:
            client.writer.write(bytes([byte]))
            await asyncio.wait([response], timeout=0.01)
            if response.done():
                break
        assert (await response).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("before", [b"", get(b"/health")], ids=["at first", "kept alive"])
async def test_empty_lines_before_a_request_do_not_extend_the_deadline(before, replica):
    limits = Limits(header_timeout_s=0.15, keep_alive_timeout_s=60)
    async with routed(config([replica], limits=limits)) as harness, harness.connect() as client:
        if before:
            assert (await client.ask(before)).status == 200
        ending = asyncio.create_task(client.read_all())
        for _ in range(1000):
            client.writer.write(b"\r\n")
            await asyncio.wait([ending], timeout=0.01)
            if ending.done():
                break
        assert await ending == b""


async def test_empty_lines_between_requests_do_not_add_up(replica):
    limits = Limits(max_header_bytes=1024, header_timeout_s=30, keep_alive_timeout_s=60)
    async with routed(config([replica], limits=limits)) as harness, harness.connect() as client:
        time_s = asyncio.get_running_loop().time
        for _ in range(20):
            assert (await client.ask(post(CHAT))).status == 200
            await client.send(b"\r\n" * 30)
            await harness.until(lambda: all(it.deadline < time_s() + 45 for it in harness.router.clients), "a read")


async def drip(client: RawClient, data: bytes, piece: int, every_s: float) -> bytes:
    """Send pieces at intervals until a response arrives; returns its first line."""
    response = asyncio.create_task(client.read_until(b"\r\n"))
    for at in range(0, len(data), piece):
        if response.done():
            break
        client.writer.write(data[at : at + piece])
        await asyncio.wait([response], timeout=every_s)
    return await response


@pytest.mark.parametrize("framing", [b"Content-Length: 4000", b"Transfer-Encoding: chunked"])
async def test_a_body_below_the_minimum_rate_is_rejected(framing, replica):
    """100 bytes/s after the grace period, where 1,000 are required."""
    limits = Limits(body_idle_timeout_s=5.0, body_grace_s=0.3)
    async with routed(config([replica], limits=limits)) as harness, harness.connect() as client:
        await client.send(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n" + framing + b"\r\n\r\n")
        body = b"1\r\nx\r\n" * 4000 if framing.startswith(b"T") else b"x" * 4000
        started_at = time.monotonic()
        assert await drip(client, body, len(body) // 4000, 0.01) == b"HTTP/1.1 408 Request Timeout\r\n"
        took_s = time.monotonic() - started_at
        assert took_s >= 0.3
        assert is_within(took_s, 2.0)
    assert replica.calls == []


async def test_a_body_that_waits_for_an_earlier_response_is_not_too_slow(replica):
    limits = Limits(body_idle_timeout_s=0.5, body_grace_s=0.5)

    async def slow(call: Call) -> None:
        if len(replica.calls) == 1:
            await asyncio.sleep(1.0)
        await call.begin_stream(sse({"n": 1}))
        await asyncio.sleep(0.05)
        await call.end_stream()

    replica.script = slow
    async with routed(config([replica], limits=limits)) as harness, harness.connect() as client:
        later = post(CHAT)
        await client.send(post(CHAT))
        await replica.wait_calls(1)
        for piece in (later[:-30], later[-30:-20], later[-20:-10]):
            await client.send(piece)
            await asyncio.sleep(0.05)
        assert (await client.read_response()).status == 200
        await asyncio.sleep(0.1)
        assert (await client.ask(later[-10:])).status == 200


async def test_a_body_above_the_minimum_rate_is_received(replica):
    """2,000 bytes in a second after a grace of 0.1 s; then a pause that the rate allows."""
    limits = Limits(body_idle_timeout_s=5.0, body_grace_s=0.1)
    async with routed(config([replica], limits=limits)) as harness, harness.connect() as client:
        request = post(b"/v1/completions", b'{"prompt":"' + b"x" * 4000 + b'"}')
        await client.send(request[:2000])
        for at in range(2000, 4000, 40):
            await client.send(request[at : at + 40])
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        assert (await client.ask(request[4000:])).status == 200
