"""Many concurrent streams through one router: memory per stream, and each stream's completeness.

Every stream gets one event a second. Clients and replica run in this process as plain protocols.
"""

from __future__ import annotations

import asyncio
from typing import cast

from routing.schema import Limits, RoundRobinSettings
from tests.benchmarks.soak.prompts import request, unchunked
from tests.benchmarks.soak.stand import allow_files, pool_of, router_process
from tests.benchmarks.soak.verdict import Verdict
from tests.fakes.replica import LAST_CHUNK, STREAM_HEAD, chunk, sse

STREAM_KIB = 40  # maximum memory of the router per stream
EVERY_S = 1.0
BATCH = 100  # streams that begin at once
EVENT_BYTES = 200  # about the size of vLLM's events of one token


def events(count: int) -> list[bytes]:
    return [sse({"n": number, "text": "x" * EVENT_BYTES}) for number in range(count)]


class Engine(asyncio.Protocol):
    """A replica's connection: a request with a body starts a stream, any other is a health check."""

    def __init__(self, streams: set[asyncio.Transport]) -> None:
        self._streams = streams
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._received.startswith(b"GET "):
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self._transport.close()
        elif self._received.endswith(b"}"):
            self._received = b""
            self._transport.write(STREAM_HEAD + chunk(sse({"n": -1})))
            self._streams.add(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._streams.discard(self._transport)


class Reader(asyncio.Protocol):
    def __init__(self, first_byte: asyncio.Event) -> None:
        self.data = bytearray()
        self.ended = False
        self._first_byte = first_byte

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.data += data
        self._first_byte.set()
        self.ended = self.data.endswith(b"\r\n" + LAST_CHUNK)

    @property
    def body(self) -> bytes:
        return unchunked(bytes(self.data).partition(b"\r\n\r\n")[2])


class Replica:
    name = "replica"

    def __init__(self) -> None:
        self.streams: set[asyncio.Transport] = set()
        self.url = ""

    async def start(self) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Engine(self.streams), "127.0.0.1", 0, backlog=4096)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def send(self, data: bytes) -> None:
        """Write to every stream, a few at a time."""
        for number, transport in enumerate(list(self.streams)):
            transport.write(data)
            if number % BATCH == 0:
                await asyncio.sleep(0)


async def measure(verdict: Verdict, count: int, seconds: float) -> None:
    allow_files(2 * count + 1000)
    replica = Replica()
    server = await replica.start()
    sent = events(max(2, int(seconds / EVERY_S)))
    limits = Limits(max_in_flight=2 * count)
    async with router_process(pool_of([replica], settings=RoundRobinSettings(), limits=limits)) as router:
        await _begin(router.port, 1)  # the cost of the first request is not that of a stream
        before = await router.figures()
        readers = await _begin(router.port, count)
        for number, event in enumerate(sent):
            await asyncio.gather(replica.send(chunk(event)), asyncio.sleep(EVERY_S))
            if number == len(sent) // 3:  # the buffers that keep the end of each response have their maximum size
                full = await router.figures()
        busy = await router.figures()
        await replica.send(LAST_CHUNK)
        await _until_ended(readers)
        for reader in readers:
            reader.transport.abort()
        await router.until_idle()
    server.close()
    complete = sse({"n": -1}) + b"".join(sent)
    complete_count = sum(reader.body == complete for reader in readers)
    each_kib = (busy.rss_kib - before.rss_kib) / count
    verdict.check(
        "streams at once", f"{count:,}, {complete_count:,} complete, {len(sent)} events each", complete_count == count
    )
    verdict.check("memory of each", f"{each_kib:.1f} KiB, limit {STREAM_KIB}", each_kib <= STREAM_KIB)
    verdict.check_memory(full.rss_kib, busy.rss_kib)
    verdict.check_growth("tasks", before.tasks, busy.tasks, slack=4)


async def _begin(port: int, count: int) -> list[Reader]:
    loop = asyncio.get_running_loop()
    readers: list[Reader] = []
    for first in range(0, count, BATCH):
        first_byte = [asyncio.Event() for _ in range(min(BATCH, count - first))]
        made = await asyncio.gather(
            *(loop.create_connection(lambda event=event: Reader(event), "127.0.0.1", port) for event in first_byte)  # type: ignore[misc]
        )
        for number, (transport, reader) in enumerate(made):
            transport.write(request(first + number, stream=True))
            readers.append(reader)
        async with asyncio.timeout(60):
            for event in first_byte:
                await event.wait()
    return readers


async def _until_ended(readers: list[Reader]) -> None:
    deadline = asyncio.get_running_loop().time() + 60
    while not all(reader.ended for reader in readers) and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.1)
