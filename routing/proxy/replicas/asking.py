"""What the router itself asks of a replica, each time on a connection of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from routing.proxy.replicas.address import Address


@asynccontextmanager
async def asked(address: Address, path: str) -> AsyncIterator[asyncio.StreamReader]:
    """The answer to a GET, as it comes, until the end of the block; OSError where there is no connection."""
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=address.ssl_context)
    try:
        request = b"GET %b%b HTTP/1.1\r\nHost: %b\r\n%bConnection: close\r\n\r\n"
        writer.write(request % (address.base, path.encode(), address.host_header, address.authorization))
        yield reader
    finally:
        writer.transport.abort()
