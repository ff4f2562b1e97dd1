"""The router's own answers, as bytes."""

from __future__ import annotations

from http import HTTPStatus

from routing.proxy.errors import LocalAnswer
from routing.proxy.replicas.answer import connection_line


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


def _phrase(status: int) -> bytes:
    """The reason phrase of a status, which nobody reads and HTTP/1.1 wants."""
    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b"Unknown"
