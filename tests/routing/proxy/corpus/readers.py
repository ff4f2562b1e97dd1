"""Other readers of requests: those of common servers, and a strict one for what the router sends."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any
from unittest.mock import Mock

import h11
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import HttpRequestParserPy
from gunicorn.config import Config
from gunicorn.http.parser import RequestParser
from httptools import HttpRequestParser

ReadRequests = list[tuple[bytes, bytes, bytes]]  # method, target, body


def by_h11(raw: bytes) -> ReadRequests:
    """As uvicorn with h11 reads it."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(raw)
    read: ReadRequests = []
    start: tuple[bytes, bytes] = (b"", b"")
    body = b""
    while True:
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError:
            return read
        if isinstance(event, h11.Request):
            start, body = (event.method, event.target), b""
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            read.append((*start, body))
            if connection.their_state is h11.MUST_CLOSE or start[0] == b"CONNECT":
                return read
            connection.send(h11.Response(status_code=200, headers=[(b"Content-Length", b"0")]))
            connection.send(h11.EndOfMessage())
            if connection.our_state is not h11.DONE:
                return read
            connection.start_next_cycle()
        else:
            return read


def by_httptools(raw: bytes) -> ReadRequests:
    """As uvicorn with httptools reads it."""
    read: ReadRequests = []

    class Events:
        def on_url(self, url: bytes) -> None:
            read.append((b"", url, b""))

        def on_headers_complete(self) -> None:
            read[-1] = (parser.get_method(), *read[-1][1:])

        def on_body(self, data: bytes) -> None:
            read[-1] = (*read[-1][:2], read[-1][2] + data)

    parser = HttpRequestParser(Events())
    parser.feed_data(raw)
    return read


def by_gunicorn(raw: bytes) -> ReadRequests:
    """As gunicorn reads it."""
    parser = RequestParser(Config(), iter([raw]) if raw else iter([]), ("127.0.0.1", 1))
    read: ReadRequests = []
    while True:
        try:
            request = next(parser)
        except StopIteration:
            return read
        read.append((request.method.encode(), request.uri.encode(), request.body.read()))


def by_aiohttp(raw: bytes) -> ReadRequests:
    """As aiohttp reads it."""
    protocol: Any = Mock(_reading_paused=False)
    parser = HttpRequestParserPy(protocol, asyncio.get_running_loop(), 2**16, max_line_size=8190, max_field_size=8190)
    read: ReadRequests = []
    for at in range(len(raw)):  # byte by byte: an error discards everything that came in the same read
        try:
            messages, _, _ = parser.feed_data(raw[at : at + 1])
        except HttpProcessingError:
            break
        read += messages
    return [
        (head.method.encode(), head.path.encode("utf-8", "surrogateescape"), b"".join(getattr(body, "_buffer", ())))
        for head, body in takewhile(lambda message: message[1].is_eof(), read)
    ]


PARSERS: dict[str, Callable[[bytes], ReadRequests]] = {
    "h11": by_h11,
    "httptools": by_httptools,
    "gunicorn": by_gunicorn,
    "aiohttp": by_aiohttp,
}
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
PROBE_PATH = "/probe-of-the-router"
_line = re.compile(rb"(GET|HEAD|POST) (/[!-~]*) HTTP/1\.1").fullmatch
_header = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+): ([ \t!-~\x80-\xff]*)").fullmatch
_length = re.compile(rb"0|[1-9][0-9]{0,8}").fullmatch


class ViolationError(Exception):
    """Bytes that a router must not send to a replica."""


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """One request as it arrived."""

    method: bytes
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...]  # names in lower case
    body: bytes
    raw: bytes

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name]


def read_request(buffer: bytes) -> ReceivedRequest | None:
    """The request at the beginning of ``buffer``; None if it is incomplete."""
    end = buffer.find(b"\r\n\r\n")
    if end < 0:
        return None
    start, *lines = buffer[:end].split(b"\r\n")
    matched, headers = _line(start), [_header(line) for line in lines]
    if not matched or not all(headers):
        raise ViolationError(buffer[: end + 4])
    pairs = tuple((match[1].lower(), match[2]) for match in headers if match)
    lengths = [value for name, value in pairs if name == b"content-length"]
    names = [name for name, _ in pairs]
    is_valid = len(lengths) <= 1 and names.count(b"host") == 1 and b"transfer-encoding" not in names
    if not is_valid or not all(map(_length, lengths)):
        raise ViolationError(buffer[: end + 4])
    size = end + 4 + int(lengths[0] if lengths else 0)
    if len(buffer) < size:
        return None
    return ReceivedRequest(matched[1], matched[2], pairs, buffer[end + 4 : size], buffer[:size])


@dataclass
class Recorder:
    """A replica that responds with 200 and records requests. ``violations`` must stay empty."""

    name: str = "recorder"
    url: str = ""
    received: list[ReceivedRequest] = field(default_factory=list)
    violations: list[bytes] = field(default_factory=list)

    def take(self) -> list[ReceivedRequest]:
        """Take the requests since the last call."""
        requests, self.received = self.received, []
        return requests


class _Connection(asyncio.Protocol):
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        try:
            while self.buffer and (received := read_request(self.buffer)):
                self.buffer = self.buffer[len(received.raw) :]
                if received.target != PROBE_PATH.encode():
                    self.recorder.received.append(received)
                self.transport.write(ANSWER)
        except ViolationError:
            self.recorder.violations.append(self.buffer)
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        if self.buffer:
            self.recorder.violations.append(self.buffer)


@asynccontextmanager
async def recording() -> AsyncIterator[Recorder]:
    """A recording replica."""
    recorder = Recorder()
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(recorder), "127.0.0.1", 0)
    recorder.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield recorder
    finally:
        server.close()
