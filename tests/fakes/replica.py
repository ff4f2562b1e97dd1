"""A replica that sends raw bytes and can fail at any byte."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

DEADLINE_S = 30.0
TOKEN_PROBE = b"POST /v1/completions HTTP/1.1"


@dataclass
class Call:
    """One received request and its connection."""

    head: bytes
    body: bytes
    connection: int  # 1, 2, 3 ... of this replica
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def line(self) -> bytes:
        return self.head.split(b"\r\n", 1)[0]

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        lines = self.head.split(b"\r\n")[1:-2]
        return [(name.lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]

    def header(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name]

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()

    async def begin_stream(self, *events: bytes) -> None:
        await self.send(STREAM_HEAD, *map(chunk, events))

    async def end_stream(self, *events: bytes) -> None:
        await self.send(*map(chunk, events), LAST_CHUNK)

    async def stream(self, *events: bytes) -> None:
        """Respond with these events."""
        await self.send(STREAM_HEAD, *map(chunk, events), LAST_CHUNK)

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        self.writer.transport.abort()

    async def wait_gone(self) -> None:
        """Wait until the router closes this connection."""
        async with asyncio.timeout(DEADLINE_S):
            try:
                while await self.reader.read(65536):
                    pass
            except ConnectionError:
                pass
        self.gone.set()


Script = Callable[[Call], Awaitable[None]]


class FakeReplica:
    """Responds at ``/health`` and ``/metrics``; records other requests in ``calls`` and passes them to ``script``."""

    def __init__(self, name: str, script: Script | None = None) -> None:
        self.name = name
        self.script: Script = script or answering()
        self.calls: list[Call] = []
        self.connections = 0
        self.health_status: int | None = 200  # None: no response
        self.probes = 0  # health checks
        self.metrics: Callable[[], bytes] | None = None  # the text of ``/metrics``; None: 404
        self.metrics_headers = b""  # further header lines of that response
        self.reads = 0  # scrapes of ``/metrics``
        self.metrics_delay_s = 0.0
        self.is_stopped = False  # accepts data, and responds neither at ``/health`` nor at ``/metrics``
        self.on_token_probe: Script = answering(status=404)  # a router's own request for one token
        self.token_probes: list[Call] = []
        self.on_models_read: Script = answering(status=404)  # a router's own request for the models
        self.port = 0
        self.tls: ssl.SSLContext | None = None  # plain HTTP
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._arrived = asyncio.Condition()

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=1 << 22, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]

    def kill(self) -> None:
        """Reset all connections and stop listening."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def wait_calls(self, count: int) -> Call:
        """Wait until this many requests have arrived; the last one."""
        async with asyncio.timeout(DEADLINE_S), self._arrived:
            await self._arrived.wait_for(lambda: len(self.calls) >= count)
        return self.calls[count - 1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        number = 0
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET /health "):
                    await self._respond_health(reader, writer)
                    continue
                if head.startswith(b"GET /metrics "):
                    await self._respond_metrics(reader, writer)
                    continue
                if head.startswith(b"GET /v1/models ") and b"\r\nx-request-id:" not in head.lower():
                    await self.on_models_read(Call(head, b"", 0, reader, writer))
                    continue
                if not number:
                    self.connections += 1
                    number = self.connections
                call = Call(head, await _body(head, reader), number, reader, writer)
                if call.line == TOKEN_PROBE and b'"max_tokens": 1,' in call.body:
                    self.token_probes.append(call)
                    await self.on_token_probe(call)
                    continue
                self.calls.append(call)
                async with self._arrived:
                    self._arrived.notify_all()
                await self.script(call)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _respond_metrics(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reads += 1
        if self.is_stopped:
            await reader.read()
            return
        await asyncio.sleep(self.metrics_delay_s)
        text = b"" if self.metrics is None else self.metrics()
        status = 404 if self.metrics is None else 200
        head = b"HTTP/1.1 %d X\r\n%bContent-Length: %d\r\nConnection: close\r\n\r\n"
        writer.write(head % (status, self.metrics_headers, len(text)) + text)
        writer.close()

    async def _respond_health(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.probes += 1
        if self.health_status is None or self.is_stopped:
            await reader.read()
            return
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % self.health_status)
        writer.close()


async def _body(head: bytes, reader: asyncio.StreamReader) -> bytes:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return await reader.readexactly(int(value))
        if (name.lower(), value.strip()) == (b"transfer-encoding", b"chunked"):
            return await _chunks(reader)
    return b""


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while True:
        data = await reader.readexactly(int(await reader.readuntil(b"\r\n"), 16) + 2)
        if data == b"\r\n":
            return body
        body += data[:-2]


@asynccontextmanager
async def fake_replicas(count: int, script: Script | None = None) -> AsyncIterator[list[FakeReplica]]:
    replicas = [FakeReplica(f"replica-{number}", script) for number in range(count)]
    for replica in replicas:
        await replica.start()
    try:
        yield replicas
    finally:
        for replica in replicas:
            replica.kill()


# --- scripts -----------------------------------------------------------------------------------------


def plain_answer(body: bytes, *, status: int = 200, extra: bytes = b"") -> bytes:
    head = b"HTTP/1.1 %d Reason\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b\r\n"
    return head % (status, len(body), extra) + body


def answering(body: bytes = b'{"ok":true}', *, status: int = 200, extra: bytes = b"") -> Script:
    """Respond with this body."""

    async def script(call: Call) -> None:
        await call.send(plain_answer(body, status=status, extra=extra))

    return script


def raw(*pieces: bytes, then_close: bool = False) -> Script:
    """Send exactly these bytes."""

    async def script(call: Call) -> None:
        await call.send(*pieces)
        if then_close:
            call.close()

    return script


async def resetting(call: Call) -> None:
    """Reset the connection."""
    call.reset()


async def hanging(call: Call) -> None:
    """Send nothing until the router gives up."""
    await call.wait_gone()


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def sse(content: object) -> bytes:
    return b"data: " + (content.encode() if isinstance(content, str) else json.dumps(content).encode()) + b"\n\n"


def streaming(*events: bytes) -> Script:
    """Respond with these events."""
    return raw(STREAM_HEAD, *map(chunk, events), LAST_CHUNK)


async def halting(call: Call) -> None:
    """A stream that stalls after its first event."""
    await call.begin_stream(sse({"n": 1}))
    await call.wait_gone()


@dataclass
class Held:
    """A stream of two events; the second is sent on release."""

    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, call: Call) -> None:
        await call.begin_stream(sse({"n": 1}))
        await self.go.wait()
        await call.end_stream(sse({"n": 2}))
