"""What the router itself asks of a replica, each time on a connection of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from routing.proxy.replicas.address import Address
from routing.proxy.replicas.permitted import permitted_hosts

READ_BYTES = 64 << 10  # of a response at a time


class ResponseError(ValueError):
    """A response that is not HTTP, not whole or too long."""


class _Collected:
    """What httptools reads of one response."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.is_complete = False
        self.on_body = self.body.extend

    def on_message_complete(self) -> None:
        self.is_complete = True


@asynccontextmanager
async def asked(address: Address, path: str, body: bytes | None = None) -> AsyncIterator[asyncio.StreamReader]:
    """The answer to a GET, or to a POST of ``body``, as it comes, until the end of the block.

    OSError where there is no connection.
    """
    reader, writer = await _connected(address)
    try:
        request = b"%b %b%b HTTP/1.1\r\nHost: %b\r\n%bConnection: close\r\n%b\r\n"
        method, content = (b"GET", b"") if body is None else (b"POST", _content_headers(body))
        lines = address.base, path.encode(), address.host_header, address.authorization, content
        writer.write(request % (method, *lines) + (body or b""))
        yield reader
    finally:
        writer.transport.abort()


async def fetched(
    address: Address, path: str, body: bytes | None = None, *, max_bytes: int, only_first_byte: bool = False
) -> tuple[int, bytes]:
    """Status and body of the response to a GET, or to a POST of ``body``.

    ``only_first_byte``: return as soon as the body has begun, or is known to be empty. OSError where there is no
    connection, ResponseError for what is not HTTP, ends early or is longer than ``max_bytes``.
    """
    collected = _Collected()
    parser = HttpResponseParser(collected)
    async with asked(address, path, body) as response:
        while not (collected.is_complete or (only_first_byte and collected.body)):
            data = await response.read(READ_BYTES)
            _feed(parser, data)
            if len(collected.body) > max_bytes:
                raise ResponseError(f"longer than {max_bytes} bytes")
            if not data:
                break
    if not (collected.is_complete or only_first_byte):
        raise ResponseError("the response is not complete")
    return parser.get_status_code(), bytes(collected.body)


async def _connected(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the first of the replica's addresses that accepts one; OSError where none does."""
    failure, name = OSError("no address"), address.host if address.ssl_context else None
    for host in await permitted_hosts(address):
        try:
            return await asyncio.open_connection(host, address.port, ssl=address.ssl_context, server_hostname=name)
        except OSError as error:
            failure = error
    raise failure


def _feed(parser: HttpResponseParser, data: bytes) -> None:
    try:
        parser.feed_data(data)
    except (HttpParserError, HttpParserUpgrade) as error:
        raise ResponseError("the response is not HTTP") from error


def _content_headers(body: bytes) -> bytes:
    return b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
