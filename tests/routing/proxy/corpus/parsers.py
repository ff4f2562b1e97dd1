"""How other servers read what the router sends: each must see the same requests in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import h11
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
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Request):
            read.append((event.method, event.target, b""))
        elif isinstance(event, h11.Data):
            read[-1] = (*read[-1][:2], read[-1][2] + bytes(event.data))
        elif isinstance(event, h11.EndOfMessage):
            connection.send(h11.Response(status_code=200, headers=[(b"Content-Length", b"0")]))
            connection.send(h11.EndOfMessage())
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
    messages, _, rest = parser.feed_data(raw)
    assert not rest
    return [
        (message.method.encode(), message.path.encode(), b"".join(part for part in body._buffer))
        for message, body in messages
    ]


PARSERS: dict[str, Callable[[bytes], Read]] = {
    "h11": by_h11,
    "httptools": by_httptools,
    "gunicorn": by_gunicorn,
    "aiohttp": by_aiohttp,
}
