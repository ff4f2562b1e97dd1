"""Whatever clients send, the event loop is held for milliseconds only, so that others wait for little.

Measured is the CPU time of the loop's thread in one iteration, which no busy machine can prolong. A health check waits
for the end of the iteration in which it arrives, and is among the first in the next one.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from time import thread_time
from typing import Any

import pytest

from routing.http.loop import Turns
from routing.prompt.parsing import COUNTED_BYTES, MAX_INLINE_CONTAINERS, is_large
from routing.proxy.client_connection import READ_BYTES
from tests.pace import cpu_slowness
from tests.routing.proxy.harness import CHAT, api_key, config, get, post, routed, with_keys

CONNECTIONS = 50
SIZE = 256 << 10
MAX_WAIT_S = 0.010  # of a health check, beside what reading takes
ITERATIONS = 150
COMPLETIONS = b"/v1/completions"


def filled(start: bytes, item: bytes, end: bytes, size: int = SIZE) -> bytes:
    count = (size - len(start) - len(end)) // len(item)
    return start + item * (count - 1) + item.rstrip(b",") + end


def chunked(body: bytes, head: bytes = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n") -> bytes:
    return (
        head + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    )


TINY = get(b"/a")
PIPELINED = {
    "no such path": TINY * (SIZE // len(TINY)),
    "health": get(b"/health") * (SIZE // len(get(b"/health"))),
    "no key": post(CHAT, b"{}") * (SIZE // len(post(CHAT, b"{}"))),
    "upgrades": get(b"/a", [b"Connection: upgrade", b"Upgrade: x"]) * 3000,
    "chunks": chunked(b"x" * (SIZE // 6)),
    "headers": b"GET /a HTTP/1.1\r\n" + b"X: y\r\n" * (SIZE // 6),
    "empty lines": b"\r\n" * (SIZE // 2),
}
MODEL = b'"model":"none"'  # which no pool has: the body is read, and no replica gets it
BODIES = {
    "nested lists": (COMPLETIONS, filled(b"{" + MODEL + b',"prompt":[', b"[1],", b"]}")),
    "small nested lists": (COMPLETIONS, filled(b"{" + MODEL + b',"prompt":[', b"[1],", b"]}", COUNTED_BYTES)),
    "lists in tools": (CHAT, filled(b"{" + MODEL + b',"messages":[],"tools":[', b"[[]],", b"]}")),
    "empty messages": (CHAT, filled(b"{" + MODEL + b',"messages":[', b"{},", b"]}", 200_000)),
    "texts": (COMPLETIONS, filled(b"{" + MODEL + b',"prompt":[', b'"",', b"]}", 190_000)),
    "documents": (b"/v1/rerank", filled(b"{" + MODEL + b',"query":"a","documents":[', b'"",', b"]}", 190_000)),
    "items": (b"/v1/responses", filled(b"{" + MODEL + b',"input":[', b'{"role":"a"},', b"]}")),
    "token ids": (COMPLETIONS, filled(b"{" + MODEL + b',"prompt":[', b"1,", b"]}", 64 << 10)),
}


class Flood:
    """A connection that sends the same again and again, and reads all responses; another one after its end."""

    def __init__(self, port: int, data: bytes) -> None:
        self._port = port
        self._data = data
        self._is_over = threading.Event()
        self._sock = socket.create_connection(("127.0.0.1", port), timeout=5)
        self._threads = [threading.Thread(target=it, daemon=True) for it in (self._send, self._read)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._is_over.set()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(10)
        self._sock.close()

    def _send(self) -> None:
        while not self._is_over.is_set():
            try:
                self._sock.sendall(self._data)
            except OSError:
                with suppress(OSError):
                    self._sock.close()
                    time.sleep(0.1)  # connections themselves are not what is tested
                    self._sock = socket.create_connection(("127.0.0.1", self._port), timeout=5)

    def _read(self) -> None:
        while not self._is_over.is_set():
            with suppress(OSError):
                if not self._sock.recv(1 << 20):
                    time.sleep(0.001)


@contextmanager
def flooded(port: int, data: bytes) -> Iterator[None]:
    """Connections that send ``data`` from threads of their own."""
    floods = [Flood(port, data) for _ in range(CONNECTIONS)]
    try:
        yield
    finally:
        for flood in floods:
            flood.stop()
        for flood in floods:
            flood.join()


@asynccontextmanager
async def iterations() -> AsyncIterator[list[float]]:
    """CPU seconds of each iteration of the running loop, while the block runs."""
    loop, took_s = asyncio.get_running_loop(), []
    gc.collect()
    gc.disable()  # a collection of the test process takes longer than an iteration
    last = thread_time()

    def count() -> None:
        nonlocal last
        now = thread_time()
        took_s.append(now - last)
        last = now
        handle[0] = loop.call_soon(count)

    handle = [loop.call_soon(count)]
    try:
        yield took_s
    finally:
        handle[0].cancel()
        gc.enable()


async def longest_wait_s(harness: Any, data: bytes) -> float:
    """CPU time of an iteration while clients send ``data``, which 99 % do not exceed."""
    with flooded(harness.port, data):
        async with harness.connect() as client, iterations() as took_s:
            answered = 0
            while len(took_s) < ITERATIONS or answered < 5:
                assert (await client.ask(get(b"/health"))).status == 200
                answered += 1
    return sorted(took_s)[int(0.99 * len(took_s))]


class Discard(asyncio.Protocol):
    """Reads as the router does, and does nothing else."""

    def __init__(self, transports: set[Any]) -> None:
        self.transports = transports

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.transports.add(transport)

    def connection_lost(self, _: Exception | None) -> None:
        self.transports.discard(self.transport)

    def data_received(self, data: bytes) -> None:
        if len(data) >= READ_BYTES:
            self.transport.pause_reading()
            asyncio.get_running_loop().call_soon(self.transport.resume_reading)


async def reading_s(data: bytes) -> float:
    """CPU time of an iteration that only reads what clients send: the kernel's copies, and its work for the senders."""
    transports: set[Any] = set()
    server = await asyncio.get_running_loop().create_server(lambda: Discard(transports), "127.0.0.1", 0)
    with flooded(server.sockets[0].getsockname()[1], data):
        async with iterations() as took_s:
            while len(took_s) < ITERATIONS:
                await asyncio.sleep(0)
    server.close()
    async with asyncio.timeout(10):
        while transports:
            await asyncio.sleep(0)
    return sorted(took_s)[int(0.99 * len(took_s))]


async def waits_little(harness: Any, data: bytes) -> bool:
    """Whether the router's own share of an iteration is within the limit in one of three runs."""
    for _ in range(3):
        longest_s = await longest_wait_s(harness, data)
        if longest_s <= MAX_WAIT_S or longest_s <= MAX_WAIT_S * cpu_slowness() + await reading_s(data):
            return True
    return False


@pytest.mark.parametrize("shape", PIPELINED)
async def test_clients_without_a_key_hold_nobody_up(shape, replica):
    async with routed(with_keys([replica], api_key())) as harness:
        assert await waits_little(harness, PIPELINED[shape])


@pytest.mark.parametrize("shape", BODIES)
async def test_bodies_of_many_values_hold_nobody_up(shape, replica):
    path, body = BODIES[shape]
    whole = config([replica], models=("tiny",))
    async with routed(whole) as harness:
        assert await waits_little(harness, post(path, body))


class Busy:
    """A client that always has work for a whole turn."""

    def __init__(self, turns: Turns) -> None:
        self.is_deferred = self.has_ended = False
        self._turns = turns
        turns.defer(self, 100)

    def on_turn(self) -> None:
        while not self._turns.is_over():
            pass
        if not self.has_ended:
            self._turns.defer(self, 100)


async def test_clients_with_small_reads_do_not_hold_up_one_with_a_long_prompt(replica):
    prompt = post(COMPLETIONS, b'{"prompt":"%b"}' % (b"x" * 100_000))
    async with routed(config([replica])) as harness, harness.connect() as client:
        small = [Busy(harness.router.turns) for _ in range(3)]
        async with asyncio.timeout(20):
            assert (await client.ask(prompt)).status == 200
        for busy in small:
            busy.has_ended = True


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"[" * COUNTED_BYTES, False),
        (b"{" * (MAX_INLINE_CONTAINERS + 1) + b" " * COUNTED_BYTES, True),
        (b'"' + b"[" * COUNTED_BYTES + b'"', False),
        (b'"",' * COUNTED_BYTES, True),
        (b"a" * SIZE, False),
        (b"a" * (SIZE + 1), True),
    ],
)
def test_a_body_is_large_by_its_bytes_or_by_its_values(body, expected):
    assert is_large(body) is expected
