"""HTTP requests of the router itself to a replica, each on its own connection: health checks, metrics, probes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from routing.upstream.pool import Address, permitted_hosts

Until = Callable[[bytearray], bool]
READ_BYTES = 64 << 10
MAX_HEADER_BYTES = 64 << 10  # of one response


class ResponseError(ValueError):
    """A response that is not HTTP, not complete or too long."""


class FetchedResponse(NamedTuple):
    """A response; of equal header names, which are in lower case, the last value."""

    status: int
    body: bytes
    headers: dict[bytes, bytes]


class _Body:
    """Collects the body and the headers of one response; the parser's protocol."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.headers: dict[bytes, bytes] = {}
        self._header_bytes = 0
        self.is_complete = False
        self.on_body = self.data.extend

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ResponseError(f"headers longer than {MAX_HEADER_BYTES} bytes")
        self.headers[name.lower()] = value

    def on_message_complete(self) -> None:
        self.is_complete = True


@asynccontextmanager
async def send_request(address: Address, path: str, body: bytes | None = None) -> AsyncIterator[asyncio.StreamReader]:
    """Send a GET, or a POST of ``body``; yields the raw response. OSError if there is no connection."""
    reader, writer = await _open_connection(address)
    try:
        request = b"%b %b%b HTTP/1.1\r\nHost: %b\r\n%bConnection: close\r\n%b\r\n"
        method, content = (b"GET", b"") if body is None else (b"POST", _content_headers(body))
        parts = address.base, path.encode(), address.host_header, address.authorization, content
        writer.write(request % (method, *parts) + (body or b""))
        yield reader
    finally:
        writer.transport.abort()


async def fetch(
    address: Address, path: str, body: bytes | None = None, *, max_bytes: int, until: Until | None = None
) -> tuple[int, bytes]:
    """Status and body of a response; arguments and errors as of ``fetch_response``."""
    response = await fetch_response(address, path, body, max_bytes=max_bytes, until=until)
    return response.status, response.body


async def fetch_response(
    address: Address, path: str, body: bytes | None = None, *, max_bytes: int, until: Until | None = None
) -> FetchedResponse:
    """The response to a GET, or to a POST of ``body``.

    ``until``: return as soon as it is true of the body so far. OSError if there is no connection; ResponseError if the
    response is not HTTP, ends early or is longer than ``max_bytes``.
    """
    received = _Body()
    parser = HttpResponseParser(received)
    async with send_request(address, path, body) as response:
        while not (received.is_complete or (until is not None and until(received.data))):
            data = await response.read(READ_BYTES)
            try:
                parser.feed_data(data)
            except (HttpParserError, HttpParserUpgrade) as error:
                raise ResponseError("the response is not HTTP") from error
            if len(received.data) > max_bytes:
                raise ResponseError(f"longer than {max_bytes} bytes")
            if not data:
                break
    if not (received.is_complete or until is not None):
        raise ResponseError("the response is not complete")
    return FetchedResponse(parser.get_status_code(), bytes(received.data), received.headers)


async def _open_connection(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the first of the replica's addresses that accepts; OSError if none does."""
    failure, name = OSError("no address"), address.host if address.ssl_context else None
    for host in await permitted_hosts(address):
        try:
            return await asyncio.open_connection(host, address.port, ssl=address.ssl_context, server_hostname=name)
        except OSError as error:
            failure = error
    raise failure


def _content_headers(body: bytes) -> bytes:
    return b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
