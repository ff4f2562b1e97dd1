"""HTTP responses and header fields: response heads, framing of bodies, local responses, and a cache of heads.

Theory of operation of the cache. A client's requests have the same head except for the digits of Content-Length and the
values of a few headers that differ between requests (``traceparent``, ``X-Request-Id``). The same holds for a replica's
responses. The cache maps the bytes of a head, without these varying values, to the result of parsing it. A head that is
equal in all other bytes parses the same way, provided that:

- No byte of a varying value ends its line or could be stripped: values are printable ASCII without a space at either
  end, 512 bytes at most.
- The values cut out of a head when it was learned are exactly the values that the parser read for these headers.
  A folded or empty value, or one with other bytes or other white space, stays in the key, or the head is not learned.
- The varying values decide nothing except the length, and what is forwarded in their place. A header for which this is
  not true must not be among the names.

A message matches only if one read brought exactly all of it: the head, and as many bytes of body as Content-Length
says. Every other message goes through the parser from its first byte.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from http import HTTPStatus
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec

from routing.paths import ANTHROPIC
from routing.schema import PER_REQUEST_HEADERS, TRACE_HEADERS

Header = tuple[bytes, bytes]

HOP_BY_HOP: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"}
    | {b"trailer", b"transfer-encoding", b"upgrade"}
)


def without_named(lines: list[bytes], connection: list[bytes]) -> list[bytes]:
    """Drop the header lines that the values of Connection headers name: they are for this hop only."""
    named = {token.strip().lower() for value in connection for token in value.split(b",")} - {b"close", b"keep-alive"}
    if not named:
        return lines
    return [line for line in lines if line.partition(b":")[0].lower() not in named]


def template_of(lines: bytes, varying: Sequence[Header]) -> bytes:
    """Header lines as a format string that takes one value for each header of ``varying``, in order.

    The format string takes the value of a header that is not among the lines too, and prints nothing for it.
    """
    pieces: list[bytes] = []
    end = 0
    for name, value in varying:
        line = b"%b: %b\r\n" % (name, value)
        start = lines.find(line, end)
        while start > 0 and lines[start - 1] != 0x0A:
            start = lines.find(line, start + 1)
        if start < 0:
            pieces.append(b"%.0b")
            continue
        pieces.append(lines[end:start].replace(b"%", b"%%") + name + b": %b\r\n")
        end = start + len(line)
    pieces.append(lines[end:].replace(b"%", b"%%"))
    return b"".join(pieces)


MAX_HEADS: Final = 1024  # in a cache; one more, and the cache is cleared
MAX_HEAD_BYTES: Final = 4096  # of a cached head, values included
MAX_VALUE_BYTES: Final = 512  # of a varying value
MAX_VALUES: Final = 16  # varying values in one head

_PRINTABLE: Final = bytes(range(0x20, 0x7F))
_LENGTH: Final = b"content-length"
_GAP: Final = b"\0"  # stands for a varying value in a key; the parser accepts no head with this byte
VARYING_REQUEST_HEADERS: Final = PER_REQUEST_HEADERS
VARYING_RESPONSE_HEADERS: Final = (
    *TRACE_HEADERS,
    "date",
    "x-request-id",
    "x-correlation-id",
    "x-envoy-upstream-service-time",
)

H = TypeVar("H")


class CachedHead(Generic[H]):
    """A parsed head, and the bytes around its varying values."""

    def __init__(self, head: H, key: bytes, length_index: int) -> None:
        self.head = head
        self.key = key  # the bytes of the head, with a gap for each value
        *self.pieces, self.last = key.split(_GAP)  # bytes before each value, and after the last value
        self.length_index = length_index  # of Content-Length among the values
        self.line_count = self.key.count(b"\r\n")


Match = tuple[CachedHead[H], bytes, list[bytes]]  # the cached head, and the message's body and varying values


class HeaderCache(Generic[H]):
    """Parsed heads by their bytes."""

    def __init__(self, varying: Sequence[str]) -> None:
        """``varying``: names of the headers whose values may differ, in lower case."""
        self._heads: dict[bytes, CachedHead[H]] = {}
        self._max_bytes = MAX_HEAD_BYTES
        self._split = _pattern(varying).split

    def __len__(self) -> int:
        return len(self._heads)

    def find(self, data: bytes, latest: CachedHead[H] | None = None) -> Match[H] | None:
        """Match a read that is one whole message with a cached head; None for every other read.

        ``latest``: the head of the previous message on the same connection, which is compared first.
        """
        match = None if latest is None else self._match_latest(data, latest)
        return self._search(data) if match is None else match

    def _match_latest(self, data: bytes, latest: CachedHead[H]) -> Match[H] | None:
        values: list[bytes] = []
        position = 0
        for piece in latest.pieces:
            if not data.startswith(piece, position):
                return None
            start = position + len(piece)
            position = data.find(b"\r", start, start + MAX_VALUE_BYTES + 1)
            if position <= start or data[start] == 0x20 or data[position - 1] == 0x20:
                return None
            values.append(data[start:position])
        end = position + len(latest.last)
        if not data.startswith(latest.last, position) or end + latest.line_count > self._max_bytes:
            return None
        is_whole = values[latest.length_index] == b"%d" % (len(data) - end)
        if not is_whole or (len(values) > 1 and b"".join(values).translate(None, _PRINTABLE)):
            return None
        return (latest, data[end:], values) if self._heads.get(latest.key) is latest else None

    def _search(self, data: bytes) -> Match[H] | None:
        end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES) + 4
        if end < 4:
            return None
        parts = self._split(data[:end])
        values: list[bytes] = parts[2::3]
        parts[2::3] = [_GAP] * len(values)
        cached = self._heads.get(b"".join(parts))
        if cached is None or end + cached.line_count > self._max_bytes:
            return None
        if len(values) != len(cached.pieces) or values[cached.length_index] != b"%d" % (len(data) - end):
            return None
        return cached, data[end:], values

    def learn(self, data: bytes, head: H, length: int, headers: Sequence[Header]) -> list[Header] | None:
        """Cache the head of ``data``, which the parser read as one whole message with ``length`` bytes of body.

        ``headers``: all headers that the parser read. Returns the varying headers, in order; None if not cached.
        """
        end = data.find(b"\r\n\r\n") + 4
        if not 4 <= end <= MAX_HEAD_BYTES or len(data) - end != length:
            return None
        parts = self._split(data[:end])
        varying = _headers(parts)
        as_parsed = _headers(self._split(b"".join([b"\r\n%b: %b" % header for header in headers]) + b"\r\n"))
        lengths = [index for index, (name, _) in enumerate(varying) if name.lower() == _LENGTH]
        if len(lengths) != 1 or len(varying) > MAX_VALUES or varying != as_parsed:
            return None
        if len(self._heads) >= MAX_HEADS:
            self._heads.clear()
        parts[2::3] = [_GAP] * len(varying)
        cached = CachedHead(head, b"".join(parts), lengths[0])
        if len(cached.pieces) != len(varying):
            return None
        self._heads[cached.key] = cached
        return varying

    def reset(self, max_bytes: int = MAX_HEAD_BYTES) -> None:
        """Drop all heads because limits have changed; from now on match heads of up to ``max_bytes``."""
        self._heads.clear()
        self._max_bytes = min(max_bytes, MAX_HEAD_BYTES)


def _headers(parts: list[bytes]) -> list[Header]:
    """The varying headers in a head that was split at their names and values."""
    return [(name.strip(b"\r\n :"), value) for name, value in zip(parts[1::3], parts[2::3], strict=True)]


def _pattern(names: Sequence[str]) -> re.Pattern[bytes]:
    """A pattern for the header lines with these names: one group before the value, one for the value.

    It does not match a Content-Length of other than digits. Each first word of the names is tried once, which takes
    half the time of trying every name.
    """
    remainders_by_word: dict[str, list[str]] = {}
    for name in names:
        first_word, hyphen, remainder = name.partition("-")
        remainders_by_word.setdefault(first_word, []).append(_any_case(hyphen + remainder))
    varying = "|".join(
        f"{_any_case(first_word)}(?:{'|'.join(remainders)})" for first_word, remainders in remainders_by_word.items()
    )
    named = rf"{_any_case('content-length')}: ?(?=[0-9]+\r)|(?:{varying}): ?"
    return re.compile(rf"(\r\n(?:{named}))([!-~](?:[ -~]{{0,510}}[!-~])?)(?=\r\n)".encode())


def _any_case(name: str) -> str:
    """A pattern for a name in any letter case, faster than a search that ignores the case of all bytes."""
    return "".join(f"[{letter}{letter.upper()}]" if letter.isalpha() else letter for letter in name)


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
    content_type: bytes = b"application/json"


def encode_local_response(
    response: LocalResponse, *, http11: bool, keep_alive: bool, bodyless: bool, request_id: str
) -> bytes:
    lines = [b"HTTP/1.1 %d %b\r\n" % (response.status, HTTPStatus(response.status).phrase.encode())]
    lines += [b"%b: %b\r\n" % header for header in response.headers]
    if response.body:
        lines.append(b"Content-Type: %b\r\n" % response.content_type)
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
    ``path``, ``origin``: of the request, if it was rejected while it was received; empty and None if unknown.
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
        self.path = b""
        self.origin: str | None = None

    def response(self, path: bytes = b"") -> LocalResponse:
        """The response to a request to ``path``, in the error format of that path's API."""
        headers = self.headers
        if self.retry_after_s is not None:
            headers = (*headers, (b"Retry-After", b"%d" % self.retry_after_s))
        if (path or self.path).startswith(ANTHROPIC):
            return LocalResponse(self.status, anthropic_error_body(self.status, self.message), headers)
        return LocalResponse(self.status, error_body(self.status, self.message, self.param, self.kind), headers)


def error_body(status: int, message: str, param: str | None = None, kind: str | None = None) -> bytes:
    """OpenAI's error object as JSON; its ``code`` is the HTTP status, as in vLLM."""
    kind = kind or _ERROR_TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": status}})


_ANTHROPIC_ERROR_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error_body(status: int, message: str) -> bytes:
    """Anthropic's error object as JSON."""
    kind = _ANTHROPIC_ERROR_TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})


def error_event(path: bytes, status: int, message: str, *, is_inside_event: bool) -> bytes:
    """The last event of a stream that failed. ``is_inside_event``: the bytes sent so far end inside an event."""
    if path.startswith(ANTHROPIC):
        event = b"event: error\ndata: " + anthropic_error_body(status, message)
    else:
        event = b"data: " + error_body(status, message)
    return (b"\n\n" if is_inside_event else b"") + event + b"\n\n"
