"""How long other connections wait while a large body is handled: ``python -m tests.benchmarks bodies``.

A router, plain and compiled, gets bodies of the maximum size of each kind on one connection, while another connection
sends small requests that the router answers itself. A figure is the longest wait of a small request, the minimum of
several rounds. The first row has no large body.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import uvloop

from routing.schema import LowestCostSettings
from tests.benchmarks.builds import compiled_environment
from tests.benchmarks.proxy import DEADLINE_S
from tests.benchmarks.router import our_router, replicas

ROUNDS = 5
BYTES = 8 << 20
GOAL_MS = 10.0
CHAT, COMPLETION = b"/v1/chat/completions", b"/v1/completions"
_TEXT = b'{"model":"m","messages":[{"role":"user","content":"'
_STREAM = _TEXT.replace(b"{", b'{"stream":true,', 1)
_OPTIONS = _STREAM.replace(b"{", b'{"stream_options":{"include_usage":false},', 1)
_END = b'"}]}'
# Path, beginning, repeated part, end. The first five are realistic; the others are worst cases for the parser.
KINDS: dict[str, tuple[bytes, bytes, bytes, bytes]] = {
    "plain text": (CHAT, _TEXT, b"lorem ipsum dolor sit amet ", _END),
    "lines of text": (CHAT, _TEXT, rb"lorem ipsum dolor sit amet\n", _END),
    "text in UTF-8": (CHAT, _TEXT, "длинный текст ".encode(), _END),
    "code in a text": (CHAT, _TEXT, rb"x[i] = {\"a\": f(y)}\n", _END),
    "token ids": (COMPLETION, b'{"model":"m","prompt":[1', b",12345", b"]}"),
    "escaped quotes": (CHAT, _TEXT, rb"\"", _END),
    "escaped letters": (CHAT, _TEXT, rb"\u00e9", _END),
    "a stream": (CHAT, _STREAM, rb"\u00e9", _END),
    "a stream with options": (CHAT, _OPTIONS, rb"\u00e9", _END),
    "brackets in a text": (CHAT, _TEXT, b"[", _END),
    "numbers": (COMPLETION, b'{"model":"m","prompt":[1', b",1", b"]}"),
    "empty texts": (COMPLETION, b'{"model":"m","x":[""', b',""', b"]}"),
    "empty lists": (COMPLETION, b'{"model":"m","x":[[]', b",[]", b"]}"),
    "empty lists in metadata": (COMPLETION, b'{"model":"m","metadata":[[]', b",[]", b"]}"),
    "objects in metadata": (COMPLETION, b'{"model":"m","metadata":[{}', b',{"a":0}', b"]}"),
    "keys": (CHAT, b'{"model":"m","messages":[]', b',"a":1', b"}"),
    "messages": (CHAT, b'{"model":"m","messages":[{}', b",{}", b"]}"),
    "deep and narrow": (CHAT, b'{"model":"m","x":[0', b"," + b"[" * 30 + b"]" * 30, b"]}"),
}


def request(path: bytes, body: bytes) -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: bench\r\nContent-Length: %d\r\n\r\n%b" % (path, len(body), body)


def large_request(kind: str, size: int = BYTES) -> bytes:
    """A request with a body of this kind, up to a size."""
    path, begin, unit, end = KINDS[kind]
    return request(path, begin + unit * ((size - len(begin) - len(end)) // len(unit)) + end)


SMALL = request(b"/v1/nowhere", b"{}")


class ClientConnection:
    """One connection, kept open until the router closes it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None

    async def request(self, data: bytes) -> int:
        if self._reader is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writer.write(data)
        headers = await self._reader.readuntil(b"\r\n\r\n")
        lines = dict(line.lower().split(b": ", 1) for line in headers.split(b"\r\n")[1:-2])
        await self._reader.readexactly(int(lines[b"content-length"]))
        if lines.get(b"connection") == b"close":
            self._writer.close()
            self._reader = None
        return int(headers.split(b" ", 2)[1])


def send_large(port: int, data: bytes) -> int:
    """Status of one request on a new connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as connection:
        connection.sendall(data)
        return int(connection.recv(65536).split(b" ", 2)[1])


async def worst_wait_ms(port: int, data: bytes) -> tuple[int, float]:
    """(status of the large request, longest wait of a small one meanwhile in milliseconds)."""
    small = ClientConnection(port)
    await small.request(SMALL)
    task = asyncio.ensure_future(asyncio.to_thread(send_large, port, data))
    worst_s = 0.0
    while not task.done():
        started = time.perf_counter()
        await small.request(SMALL)
        worst_s = max(worst_s, time.perf_counter() - started)
    return task.result(), 1e3 * worst_s


async def measure(port: int, kinds: Iterable[str]) -> None:
    print(f"{'':20}{'status':>8}{'worst wait, ms':>16}")
    for kind in ("", *kinds):
        data = large_request(kind) if kind else SMALL
        async with asyncio.timeout(4 * DEADLINE_S):
            rounds = [await worst_wait_ms(port, data) for _ in range(ROUNDS)]
        status, wait_ms = min(rounds, key=lambda result: result[1])
        note = f"  over {GOAL_MS:g} ms" if wait_ms > GOAL_MS else ""
        print(f"{kind or 'none':20}{status:>8}{wait_ms:>16.1f}{note}", flush=True)


def main() -> None:
    compiled = compiled_environment()
    for build in (None, compiled) if compiled else (None,):
        print(f"{BYTES >> 20} MiB bodies, the router {'compiled' if build else 'in plain Python'}")
        with (
            tempfile.TemporaryDirectory() as folder,
            replicas() as (_, ports),
            our_router(Path(folder), ports, LowestCostSettings(), build) as router,
        ):
            uvloop.run(measure(router.port, KINDS))
