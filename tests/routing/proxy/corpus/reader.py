"""A reader of requests that knows one way to write them, ours, and takes nothing else: no parser of the router's."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
PROBE_PATH = "/probe-of-the-router"

_line = re.compile(rb"(GET|HEAD|POST) (/[!-~]*) HTTP/1\.1").fullmatch
_header = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+): ([ \t!-~\x80-\xff]*)").fullmatch
_length = re.compile(rb"0|[1-9][0-9]{0,8}").fullmatch


class ViolationError(Exception):
    """Bytes that a router must not send."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One request as it arrived."""

    method: bytes
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...]  # names in small letters
    body: bytes
    raw: bytes

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name]


def read_request(buffer: bytes) -> Seen | None:
    """The request that ``buffer`` begins with; None if it is not whole."""
    end = buffer.find(b"\r\n\r\n")
    if end < 0:
        return None
    start, *lines = buffer[:end].split(b"\r\n")
    matched, headers = _line(start), [_header(line) for line in lines]
    if not matched or not all(headers):
        raise ViolationError(buffer[: end + 4])
    pairs = tuple((one[1].lower(), one[2]) for one in headers if one)
    lengths = [value for name, value in pairs if name == b"content-length"]
    names = [name for name, _ in pairs]
    sound = len(lengths) <= 1 and names.count(b"host") == 1 and b"transfer-encoding" not in names
    if not sound or not all(map(_length, lengths)):
        raise ViolationError(buffer[: end + 4])
    size = end + 4 + int(lengths[0] if lengths else 0)
    if len(buffer) < size:
        return None
    return Seen(matched[1], matched[2], pairs, buffer[end + 4 : size], buffer[:size])


@dataclass
class Recorder:
    """A replica that answers everything with 200, and keeps what it read. ``violations`` must stay empty."""

    name: str = "recorder"
    url: str = ""
    seen: list[Seen] = field(default_factory=list)
    violations: list[bytes] = field(default_factory=list)

    def take(self) -> list[Seen]:
        """The requests since the last time."""
        taken, self.seen = self.seen, []
        return taken


class _Connection(asyncio.Protocol):
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        try:
            while self.buffer and (seen := read_request(self.buffer)):
                self.buffer = self.buffer[len(seen.raw) :]
                if seen.target != PROBE_PATH.encode():
                    self.recorder.seen.append(seen)
                self.transport.write(ANSWER)
        except ViolationError:
            self.recorder.violations.append(self.buffer)
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        if self.buffer:
            self.recorder.violations.append(self.buffer)


@asynccontextmanager
async def recording() -> AsyncIterator[Recorder]:
    """A replica for the length of a block."""
    recorder = Recorder()
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(recorder), "127.0.0.1", 0)
    recorder.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield recorder
    finally:
        server.close()
