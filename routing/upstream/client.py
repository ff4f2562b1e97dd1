"""What the router itself asks of a replica, each time on a connection of its own.

Connecting only to addresses that the configuration permits.

Theory of operation. A replica's host name is resolved for each new connection, and every address that it has is judged
before one of them is connected to by its number: nothing is resolved again in between. A name that has one address that
is not permitted is refused as a whole. Kept-alive connections cost nothing.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from routing.log import event
from routing.upstream.address import Address

logger = logging.getLogger(__name__)


class ForbiddenAddressError(OSError):
    """A replica's host resolves to an address that the configuration does not permit."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EACCES, f"its address is not permitted: {reason}")


async def permitted_hosts(address: Address) -> list[str]:
    """Where to connect to for a replica, in order; its host as it is where the configuration has no rules.

    ForbiddenAddressError for an address that is not permitted, OSError where there is none. One look-up for a name.
    """
    if address.rules is None:
        return [address.host]
    found = [address.host] if _is_address(address.host) else await _resolved(address.host, address.port)
    for text in found:
        if reason := address.rules.rejection_reason(text):
            if address.last_refused != text:  # once for each address, however often it is tried
                address.last_refused = text
                facts = {"host": address.host, "address": text, "reason": reason}
                event(logger, "replica_address_refused", level=logging.WARNING, **facts)
            raise ForbiddenAddressError(reason)
    address.last_refused = ""
    return found


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def _resolved(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    if not addresses:
        raise OSError(errno.ENOENT, "its host name has no address")
    return addresses


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
async def send_request(address: Address, path: str, body: bytes | None = None) -> AsyncIterator[asyncio.StreamReader]:
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


async def fetch(
    address: Address, path: str, body: bytes | None = None, *, max_bytes: int, only_first_byte: bool = False
) -> tuple[int, bytes]:
    """Status and body of the response to a GET, or to a POST of ``body``.

    ``only_first_byte``: return as soon as the body has begun, or is known to be empty. OSError where there is no
    connection, ResponseError for what is not HTTP, ends early or is longer than ``max_bytes``.
    """
    collected = _Collected()
    parser = HttpResponseParser(collected)
    async with send_request(address, path, body) as response:
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
