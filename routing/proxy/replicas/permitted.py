"""Connecting only to addresses that the configuration permits.

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
from typing import TYPE_CHECKING

from routing.proxy.log import event

if TYPE_CHECKING:
    from routing.proxy.replicas.address import Address

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
        if reason := address.rules.refusal(text):
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
