"""HTTP responses: heads of replicas' responses, framing of bodies, and the router's own responses and errors."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from http import HTTPStatus
from typing import Final, NamedTuple

import msgspec

from routing.http.headers import HOP_BY_HOP, Header, without_named

_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding"})
_NOT_FORWARDED: Final = HOP_BY_HOP | {b"content-length", b"x-request-id"}


class BadResponseError(Exception):
    """A replica's response violates HTTP, so that its end is ambiguous."""


class Framing(Enum):
    """How the end of a body is marked."""

    NONE = "no body"
    LENGTH = "content-length"
    CHUNKED = "chunked"
    CLOSE = "end of the connection"


NONE: Final = Framing.NONE  # attributes of an enum are slow to look up
LENGTH: Final = Framing.LENGTH
CHUNKED: Final = Framing.CHUNKED
CLOSE: Final = Framing.CLOSE


class ResponseHead:
    """Status and end-to-end headers of a replica's response."""

    __slots__ = ("framing", "is_stream", "length", "lines", "status", "status_line", "template")

    def __init__(self, status: int, status_line: bytes) -> None:
        self.status = status
        self.status_line = status_line
        self.lines = b""  # header lines, each with its CRLF
        self.framing = CLOSE
        self.length = b""  # value of Content-Length; of the response that the cache learned, if the head was cached
        self.is_stream = False  # server-sent events
        self.template: bytes | None = None  # format string of ``lines``; None: ``lines`` has no varying values

    def with_values(self, values: Sequence[bytes]) -> ResponseHead:
        """Return the head of another response, whose varying headers have these values."""
        if self.template is None:
            return self
        head = ResponseHead(self.status, self.status_line)
        head.lines = self.template % tuple(values)
        head.framing, head.length, head.is_stream = self.framing, self.length, self.is_stream
        return head


def parse_response_head(
    status: int, reason: bytes, version: str, headers: Sequence[Header], *, bodyless: bool = False
) -> ResponseHead:
    """Build a response head from its parsed parts. ``bodyless``: it responds to a HEAD request. BadResponseError."""
    if version not in {"1.1", "1.0"} or status < 200:
        raise BadResponseError(f"HTTP/{version} status {status}")
    head = ResponseHead(status, b"HTTP/1.1 %d %b\r\n" % (status, reason))
    lines: list[bytes] = []
    connection: list[bytes] = []
    coding: bytes | None = None
    for name, value in headers:
        lower = name.lower()
        if not (lower in _NOT_FORWARDED or lower.startswith(b"x-warmpath-")):
            lines.append(name + b": " + value + b"\r\n")
            if lower == b"content-type":
                head.is_stream = value.startswith(b"text/event-stream")
        elif lower == b"content-length":
            head.length, head.framing = value, LENGTH
        elif lower == b"transfer-encoding":
            coding = value if coding is None else b"several"
        elif lower == b"connection":
            connection.append(value)
    _set_framing(head, coding, version, bodyless=bodyless)
    head.lines = b"".join(without_named(lines, connection) if connection else lines)
    return head


def _set_framing(head: ResponseHead, coding: bytes | None, version: str, *, bodyless: bool) -> None:
    """Transfer-Encoding, the status and the request's method take precedence over Content-Length."""
    if coding is not None:
        if coding.lower() != b"chunked" or version == "1.0":
            raise BadResponseError("a Transfer-Encoding other than chunked in HTTP/1.1")
        head.framing = CHUNKED
    if bodyless or head.status in {204, 304}:
        head.framing = NONE
    if head.status == 204:
        head.length = b""  # RFC 9110, 8.6: a 204 has no Content-Length; a client might wait for that many bytes


def has_framing_headers(headers: Sequence[Header]) -> bool:
    """Whether a body is announced. RFC 9110, 8.6, forbids that in interim responses and in 204."""
    return any(name.lower() in _FRAMING for name, _ in headers)


def is_encoded(head: ResponseHead) -> bool:
    """Whether the body is compressed, so that its events cannot be read."""
    return b"\r\ncontent-encoding:" in b"\r\n" + head.lines.lower()


LAST_CHUNK: Final = b"0\r\n\r\n"
SHORT_CHUNK: Final = 1024  # bytes
_SIZE_LINES: Final = [b"%x\r\n" % length for length in range(SHORT_CHUNK)]


def chunked(data: bytes, last: bool) -> bytes:
    """Frame body bytes as one chunk; ``last`` appends the last chunk, which has no bytes."""
    if not data:
        return LAST_CHUNK if last else b""
    if last:
        return b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
    return b"%x\r\n%b\r\n" % (len(data), data)


def chunk_start(data: bytes) -> int:
    """Offset of the body bytes, if ``data`` is exactly one short chunk as ``chunked`` writes it; otherwise 0."""
    size = len(data)
    for start in (3, 4, 5):  # after one, two or three hexadecimal digits
        length = size - start - 2
        if 0 < length < SHORT_CHUNK:
            line = _SIZE_LINES[length]
            if len(line) == start:
                return start if data[:start] == line and data[-2:] == b"\r\n" else 0
    return 0


class LocalResponse(NamedTuple):
    """A response that the router gives without a replica."""

    status: int
    body: bytes = b""
    headers: tuple[Header, ...] = ()


def encode_local_response(
    response: LocalResponse, *, http11: bool, keep_alive: bool, bodyless: bool, request_id: str
) -> bytes:
    lines = [b"HTTP/1.1 %d %b\r\n" % (response.status, HTTPStatus(response.status).phrase.encode())]
    lines += [b"%b: %b\r\n" % header for header in response.headers]
    if response.body:
        lines.append(b"Content-Type: application/json\r\n")
    if request_id:
        lines.append(b"X-Request-Id: %b\r\n" % request_id.encode())
    lines.append(b"Content-Length: %d\r\n" % len(response.body))
    lines.append(connection_line(http11=http11, keep_alive=keep_alive))
    lines.append(b"\r\n")
    return b"".join(lines) + (b"" if bodyless else response.body)


def connection_line(*, http11: bool, keep_alive: bool) -> bytes:
    """The Connection header line; empty where the HTTP version's default applies."""
    if not keep_alive:
        return b"Connection: close\r\n"
    return b"" if http11 else b"Connection: keep-alive\r\n"


_ERROR_TYPES: Final = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    502: "bad_gateway_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class RejectedRequestError(Exception):
    """A request that the router rejects, with the status and message that the client gets.

    ``must_close``: the connection is closed, because the rest of its bytes cannot be trusted or is not read.
    ``kind``: the ``type`` of OpenAI's error object; None: the usual one of the status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
        must_close: bool = False,
        headers: tuple[Header, ...] = (),
        kind: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.must_close = must_close
        self.headers = headers
        self.kind = kind

    def response(self) -> LocalResponse:
        headers = self.headers
        if self.retry_after_s is not None:
            headers = (*headers, (b"Retry-After", b"%d" % self.retry_after_s))
        return LocalResponse(self.status, error_body(self.status, self.message, self.param, self.kind), headers)


def error_body(status: int, message: str, param: str | None = None, kind: str | None = None) -> bytes:
    """OpenAI's error object as JSON; its ``code`` is the HTTP status, as in vLLM."""
    kind = kind or _ERROR_TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": status}})


def error_event(status: int, message: str, *, is_inside_event: bool) -> bytes:
    """The last event of a stream that failed. ``is_inside_event``: the bytes sent so far end inside an event."""
    return (b"\n\n" if is_inside_event else b"") + b"data: " + error_body(status, message) + b"\n\n"
