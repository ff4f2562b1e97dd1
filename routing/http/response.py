"""A replica's answer: what its head may be, and how its body ends.

Chunks of a body whose length nobody says: one written, and one told from other bytes.

The router's own answers, those of errors among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from typing import Final

from routing.http.headers import HOP_BY_HOP, Header, without_named

_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding"})
_NOT_PASSED: Final = HOP_BY_HOP | {b"content-length", b"x-request-id"}


class BadResponseError(Exception):
    """A replica's answer that breaks HTTP, so that nobody can say where it ends."""


class Framing(Enum):
    """How the end of a body is known."""

    NONE = "no body"
    LENGTH = "content-length"
    CHUNKED = "chunked"
    CLOSE = "the connection's end"


NONE: Final = Framing.NONE  # an enum's attributes are slow to look up
LENGTH: Final = Framing.LENGTH
CHUNKED: Final = Framing.CHUNKED
CLOSE: Final = Framing.CLOSE


class ResponseHead:
    """The end-to-end part of an answer's head."""

    __slots__ = ("framing", "is_stream", "length", "lines", "status", "status_line", "template")

    def __init__(self, status: int, status_line: bytes) -> None:
        self.status = status
        self.status_line = status_line
        self.lines = b""  # its headers, each with its CRLF
        self.framing = CLOSE
        self.length = b""  # as it was said; where the head was known, of another answer
        self.is_stream = False  # server-sent events
        self.template: bytes | None = None  # ``lines`` as a format of later answers' values; None: ``lines`` has none

    def with_values(self, values: Sequence[bytes]) -> ResponseHead:
        """The head of a later answer, which has these values."""
        if self.template is None:
            return self
        answer = ResponseHead(self.status, self.status_line)
        answer.lines = self.template % tuple(values)
        answer.framing, answer.length, answer.is_stream = self.framing, self.length, self.is_stream
        return answer


def parse_response_head(
    status: int, reason: bytes, version: str, headers: Sequence[Header], *, bodyless: bool = False
) -> ResponseHead:
    """Build an answer's head from its parsed parts. ``bodyless``: it answers a HEAD request."""
    if version not in {"1.1", "1.0"} or status < 200:
        raise BadResponseError(f"HTTP/{version} status {status}")
    answer = ResponseHead(status, b"HTTP/1.1 %d %b\r\n" % (status, reason))
    lines: list[bytes] = []
    connection: list[bytes] = []
    coding: bytes | None = None
    for name, value in headers:
        lower = name.lower()
        if not (lower in _NOT_PASSED or lower.startswith(b"x-warmpath-")):
            lines.append(name + b": " + value + b"\r\n")
            if lower == b"content-type":
                answer.is_stream = value.startswith(b"text/event-stream")
        elif lower == b"content-length":
            answer.length, answer.framing = value, LENGTH
        elif lower == b"transfer-encoding":
            coding = value if coding is None else b"several"
        elif lower == b"connection":
            connection.append(value)
    _settle_framing(answer, coding, version, bodyless=bodyless)
    answer.lines = b"".join(without_named(lines, connection) if connection else lines)
    return answer


def describes_body(headers: Sequence[Header]) -> bool:
    """Whether a head has what may stand only before a body: RFC 9110, 8.6, of interim answers and of 204."""
    return any(name.lower() in _FRAMING for name, _ in headers)


def is_encoded(answer: ResponseHead) -> bool:
    """Whether the body is compressed, so that its events cannot be read."""
    return b"\r\ncontent-encoding:" in b"\r\n" + answer.lines.lower()


def _settle_framing(answer: ResponseHead, coding: bytes | None, version: str, *, bodyless: bool) -> None:
    """What a Transfer-Encoding, a status or the request's method has to say about the body's end."""
    if coding is not None:
        _check_chunked(coding, version)
        answer.framing = CHUNKED
    if bodyless or answer.status in {204, 304}:
        answer.framing = NONE
    if answer.status == 204:
        answer.length = b""  # RFC 9110, 8.6: it has none, and a client that believed it would wait for a body


def _check_chunked(coding: bytes, version: str) -> None:
    if coding.lower() != b"chunked" or version == "1.0":
        raise BadResponseError("a Transfer-Encoding other than chunked in HTTP/1.1")


LAST_CHUNK: Final = b"0\r\n\r\n"
SHORT_CHUNK: Final = 1024  # bytes
_SIZE_LINES: Final = [b"%x\r\n" % length for length in range(SHORT_CHUNK)]


def chunked(data: bytes, last: bool) -> bytes:
    """Frame body bytes as one chunk; the last one is followed by the end."""
    if not data:
        return LAST_CHUNK if last else b""
    if last:
        return b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
    return b"%x\r\n%b\r\n" % (len(data), data)


def chunk_start(data: bytes) -> int:
    """Where the bytes begin that are all of one chunk, written as ``chunked`` does; 0 for anything else, or longer."""
    size = len(data)
    for start in (3, 4, 5):  # behind one, two or three digits
        length = size - start - 2
        if 0 < length < SHORT_CHUNK:
            line = _SIZE_LINES[length]
            if len(line) == start:
                return start if data[:start] == line and data[-2:] == b"\r\n" else 0
    return 0


@dataclass(frozen=True, slots=True)
class LocalResponse:
    """An answer that needs no replica."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    content_type: bytes = b"application/json"


def encode_local_response(
    answer: LocalResponse, *, http11: bool, keep_alive: bool, bodyless: bool, request_id: str
) -> bytes:
    """An answer of the router's own, head and body."""
    lines = [b"HTTP/1.1 %d %b\r\n" % (answer.status, _phrase(answer.status))]
    lines += [b"%b: %b\r\n" % header for header in answer.headers]
    if answer.body:
        lines.append(b"Content-Type: %b\r\n" % answer.content_type)
    if request_id:
        lines.append(b"X-Request-Id: %b\r\n" % request_id.encode())
    lines.append(b"Content-Length: %d\r\n" % len(answer.body))
    lines.append(connection_line(http11=http11, keep_alive=keep_alive))
    lines.append(b"\r\n")
    return b"".join(lines) + (b"" if bodyless else answer.body)


def connection_line(*, http11: bool, keep_alive: bool) -> bytes:
    """The Connection header, where the version's default is not what we do."""
    if not keep_alive:
        return b"Connection: close\r\n"
    return b"" if http11 else b"Connection: keep-alive\r\n"


def _phrase(status: int) -> bytes:
    """The reason phrase of a status, which nobody reads and HTTP/1.1 wants."""
    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b"Unknown"
