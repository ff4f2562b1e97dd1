"""A replica's answer: what its head may be, and how its body ends."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final

from routing.proxy.http.headers import HOP_BY_HOP, Header, without_named

_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding"})
_NOT_PASSED: Final = HOP_BY_HOP | {b"content-length", b"x-request-id"}


class BadAnswerError(Exception):
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


class AnswerHead:
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

    def with_values(self, values: Sequence[bytes]) -> AnswerHead:
        """The head of a later answer, which has these values."""
        if self.template is None:
            return self
        answer = AnswerHead(self.status, self.status_line)
        answer.lines = self.template % tuple(values)
        answer.framing, answer.length, answer.is_stream = self.framing, self.length, self.is_stream
        return answer


def read_answer(
    status: int, reason: bytes, version: str, headers: Sequence[Header], *, bodyless: bool = False
) -> AnswerHead:
    """Build an answer's head from its parsed parts. ``bodyless``: it answers a HEAD request."""
    if version not in {"1.1", "1.0"} or status < 200:
        raise BadAnswerError(f"HTTP/{version} status {status}")
    answer = AnswerHead(status, b"HTTP/1.1 %d %b\r\n" % (status, reason))
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


def is_encoded(answer: AnswerHead) -> bool:
    """Whether the body is compressed, so that its events cannot be read."""
    return b"\r\ncontent-encoding:" in b"\r\n" + answer.lines.lower()


def _settle_framing(answer: AnswerHead, coding: bytes | None, version: str, *, bodyless: bool) -> None:
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
        raise BadAnswerError("a Transfer-Encoding other than chunked in HTTP/1.1")
