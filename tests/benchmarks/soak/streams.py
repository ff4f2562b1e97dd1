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

STREAM_KIB = 40  # of the router's memory, that a stream may take
EVERY_S = 1.0
BATCH = 100  # streams that begin at once
EVENT_BYTES = 200  # about what vLLM's events of one token have


def events(count: int) -> list[bytes]:
    return [sse({"n": number, "text": "x" * EVENT_BYTES}) for number in range(count)]


class Engine(asyncio.Protocol):
    """A replica's connection: a request with a body starts a stream, any other is a health check."""

    def __init__(self, streams: set[asyncio.Transport]) -> None:
        self._streams = streams
        self._seen = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._seen += data
        if self._seen.startswith(b"GET "):
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self._transport.close()
        elif self._seen.endswith(b"}"):
            self._seen = b""
            self._transport.write(STREAM_HEAD + chunk(sse({"n": -1})))
            self._streams.add(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._streams.discard(self._transport)


class Reader(asyncio.Protocol):
    def __init__(self, begun: asyncio.Event) -> None:
        self.data = bytearray()
        self.ended = False
        self._begun = begun

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.data += data
        self._begun.set()
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

    async def tell(self, said: bytes) -> None:
        """Write to every stream, a few at a time."""
        for number, transport in enumerate(list(self.streams)):
            transport.write(said)
            if number % BATCH == 0:
                await asyncio.sleep(0)


async def measure(verdict: Verdict, count: int, seconds: float) -> None:
    allow_files(2 * count + 1000)
    replica = Replica()
    server = await replica.start()
    said = events(max(2, int(seconds / EVERY_S)))
    limits = Limits(max_in_flight=2 * count)
    async with router_process(pool_of([replica], settings=RoundRobinSettings(), limits=limits)) as router:
        await _begin(router.port, 1)  # what a first request costs is not a stream's
        before = await router.figures()
        readers = await _begin(router.port, count)
        for number, event in enumerate(said):
            await asyncio.gather(replica.tell(chunk(event)), asyncio.sleep(EVERY_S))
            if number == len(said) // 3:  # the ends of answers that are kept for their usage are as long as they get
                full = await router.figures()
        busy = await router.figures()
        await replica.tell(LAST_CHUNK)
        await _until_ended(readers)
        for reader in readers:
            reader.transport.abort()
        await router.at_rest()
    server.close()
    whole = sse({"n": -1}) + b"".join(said)
    good = sum(reader.body == whole for reader in readers)
    each_kib = (busy.rss_kib - before.rss_kib) / count
    verdict.holds("streams at once", f"{count:,}, {good:,} whole, {len(said)} events each", good == count)
    verdict.holds("memory of each", f"{each_kib:.1f} KiB, of {STREAM_KIB}", each_kib <= STREAM_KIB)
    verdict.memory(full.rss_kib, busy.rss_kib)
    verdict.flat("tasks", before.tasks, busy.tasks, slack=4)


async def _begin(port: int, count: int) -> list[Reader]:
    loop = asyncio.get_running_loop()
    readers: list[Reader] = []
    for first in range(0, count, BATCH):
        begun = [asyncio.Event() for _ in range(min(BATCH, count - first))]
        made = await asyncio.gather(
            *(loop.create_connection(lambda it=it: Reader(it), "127.0.0.1", port) for it in begun)  # type: ignore[misc]
        )
        for number, (transport, reader) in enumerate(made):
            transport.write(request(first + number, stream=True))
            readers.append(reader)
        async with asyncio.timeout(60):
            for event in begun:
                await event.wait()
    return readers


async def _until_ended(readers: list[Reader]) -> None:
    deadline = asyncio.get_running_loop().time() + 60
    while not all(reader.ended for reader in readers) and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.1)
