"""What a client that does not read can make the router hold."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from routing.http.loop import BURST_BYTES, BURST_WRITES, WriteBuffer
from routing.http.tls import TlsFiles
from routing.proxy.client_connection import MAX_PIPELINED_BYTES
from routing.schema import Limits
from tests.fakes.certificates import Authority
from tests.fakes.replica import LAST_CHUNK, STREAM_HEAD, Call, FakeReplica, chunk, plain_answer
from tests.routing.proxy.harness import CHAT, Harness, config, get, narrow, post, routed

MAX_EVENT_BYTES = 2 << 20  # of one client: some reads of a replica, or some answers of the router's own
READ_BYTES = 256 << 10  # that a read of the event loop's brings at most
ASKED = 30_000
PIECE = chunk(b"x" * 65_536)
PIECES = 1_000  # 64 MiB, many times what the sockets take


async def at_a_standstill(figure: Callable[[], int]) -> int:
    """Wait until a figure moves no more, and what it is then."""
    async with asyncio.timeout(30):
        before = -1
        while figure() != before:
            before = figure()
            await asyncio.sleep(0.3)
    return before


def held_bytes(harness: Harness) -> int:
    """What waits for clients."""
    return sum(client.transport.get_write_buffer_size() for client in harness.router.clients)


async def flood(call: Call) -> None:
    await call.send(STREAM_HEAD)
    for _ in range(PIECES):
        await call.send(PIECE)
    await call.send(LAST_CHUNK)


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
        await at_a_standstill(lambda: sent)
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


async def test_a_client_that_was_full_before_the_answer_began_holds_up_its_replica(replica: FakeReplica) -> None:
    """Requests in a row: the answer to one fills the client up while the next one is on its way already."""
    harness: Harness

    async def script(call: Call) -> None:
        if any(client.is_full for client in harness.router.clients):
            await flood(call)
        else:
            await call.send(plain_answer(b"a" * 60_000))

    replica.script = script
    async with routed(config([replica])) as harness, narrow(harness) as client:
        client.writer.write(post(CHAT) * 40)
        await harness.until(lambda: any(one.is_full for one in harness.router.clients), "the client to be full")
        assert await at_a_standstill(lambda: held_bytes(harness)) < MAX_EVENT_BYTES

        asked = len(replica.calls)
        assert asked < 40
        client.writer.transport.resume_reading()
        for _ in range(asked - 1):
            assert len((await client.answer()).body) == 60_000
        await client.read_until(b"\r\n\r\n")
        async with asyncio.timeout(10):
            await client.reader.readexactly(2 * MAX_EVENT_BYTES)  # and the replica is read on


async def test_a_client_that_asks_on_and_reads_nothing_is_read_no_more(replica: FakeReplica) -> None:
    request = get(b"/health")
    async with routed(config([replica])) as harness, narrow(harness) as client:
        client.writer.write(request * ASKED + get(b"/health", (b"Connection: close",)))
        await harness.until(lambda: any(one.is_full for one in harness.router.clients), "the client to be full")
        (connection,) = harness.router.clients
        waiting = await at_a_standstill(lambda: len(connection._reader.queue))
        assert 0 < waiting * len(request) <= MAX_PIPELINED_BYTES + READ_BYTES
        assert held_bytes(harness) < MAX_EVENT_BYTES

        client.writer.transport.resume_reading()
        assert (await client.read_all()).count(b"HTTP/1.1 ") == ASKED + 1


async def test_a_client_behind_tls_that_does_not_read_holds_up_its_replica(
    tmp_path: Path, replica: FakeReplica
) -> None:
    authority, replica.script = Authority(tmp_path), flood
    certificate = authority.issue("router")
    files = TlsFiles(str(certificate.path), str(certificate.key))
    async with (
        routed(config([replica]), tls=files) as harness,
        harness.connect(authority.client()) as client,
    ):
        client.writer.transport.pause_reading()
        await client.send(post(CHAT))
        await harness.until(lambda: any(one.is_full for one in harness.router.clients), "the client to be full")
        assert await at_a_standstill(lambda: held_bytes(harness)) < MAX_EVENT_BYTES
        client.writer.transport.resume_reading()
        assert len((await client.answer()).body) == PIECES * 65_536


class Wire(asyncio.Transport):
    """A transport that takes everything, and remembers how much."""

    took = 0

    def write(self, data: bytes) -> None:  # type: ignore[override]
        self.took += len(data)


async def test_what_one_turn_writes_does_not_pile_up() -> None:
    write_buffer, wire, written = WriteBuffer(asyncio.get_running_loop()), Wire(), 0
    for _ in range(10 * BURST_WRITES):
        write_buffer.write(wire, bytes(BURST_BYTES))
        written += BURST_BYTES
        assert written - wire.took < BURST_WRITES * BURST_BYTES
    write_buffer.flush()
    assert wire.took == written
