"""How other servers read bytes: the whole requests in them, up to the first that they refuse."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import takewhile
from typing import Any
from unittest.mock import Mock

import h11
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import HttpRequestParserPy
from gunicorn.config import Config
from gunicorn.http.parser import RequestParser
from httptools import HttpRequestParser

Read = list[tuple[bytes, bytes, bytes]]  # method, target, body


def by_h11(raw: bytes) -> Read:
    """As uvicorn with h11 reads it."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(raw)
    read: Read = []
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


def by_httptools(raw: bytes) -> Read:
    """As uvicorn with httptools reads it."""
    read: Read = []

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


def by_gunicorn(raw: bytes) -> Read:
    """As gunicorn reads it."""
    parser = RequestParser(Config(), iter([raw]) if raw else iter([]), ("127.0.0.1", 1))
    read: Read = []
    while True:
        try:
            request = next(parser)
        except StopIteration:
            return read
        read.append((request.method.encode(), request.uri.encode(), request.body.read()))


def by_aiohttp(raw: bytes) -> Read:
    """As aiohttp reads it."""
    protocol: Any = Mock(_reading_paused=False)
    parser = HttpRequestParserPy(protocol, asyncio.get_running_loop(), 2**16, max_line_size=8190, max_field_size=8190)
    read: Read = []
    for at in range(len(raw)):  # a byte at a time, since one that it refuses takes with it what one read brought
        try:
            messages, _, _ = parser.feed_data(raw[at : at + 1])
        except HttpProcessingError:
            break
        read += messages
    return [
        (head.method.encode(), head.path.encode("utf-8", "surrogateescape"), b"".join(getattr(body, "_buffer", ())))
        for head, body in takewhile(lambda message: message[1].is_eof(), read)
    ]


PARSERS: dict[str, Callable[[bytes], Read]] = {
    "h11": by_h11,
    "httptools": by_httptools,
    "gunicorn": by_gunicorn,
    "aiohttp": by_aiohttp,
}
