"""The router's own answers, those of errors among them."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus


@dataclass(frozen=True, slots=True)
class LocalAnswer:
    """An answer that needs no replica."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    content_type: bytes = b"application/json"


def local_bytes(answer: LocalAnswer, *, http11: bool, keep_alive: bool, bodyless: bool, request_id: str) -> bytes:
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
