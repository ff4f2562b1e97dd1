"""How many connections each client address has, where there is a limit: else nothing is counted.

An IPv6 client has at least a /64 to choose addresses from, so those that share one count as one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from ipaddress import IPv6Address, ip_address
from typing import Protocol

NETWORK_BITS = 64  # of an IPv6 address, that one client has for itself


class Connected(Protocol):
    """Whoever has a connection."""

    transport: asyncio.Transport


class ConnectionLimit:
    """The connections of one process, by address."""

    def __init__(self) -> None:
        self.most: int | None = None  # of one address; None: any number
        self.refused = 0  # ever
        self._counts: Counter[str] = Counter()
        self._where: dict[Connected, str] = {}

    def limit(self, most: int | None, present: Iterable[Connected]) -> None:
        """Go by this limit. Those who are there stay, and count."""
        if most == self.most:
            return
        self.most = most
        self._counts.clear()
        self._where.clear()
        for client in present if most is not None else ():
            self._count(client, address_of(client.transport))

    def enter(self, client: Connected) -> bool:
        """Count a new connection; False if its address has as many as it may."""
        address = address_of(client.transport)
        if self.most is not None and address and self._counts[address] >= self.most:
            self.refused += 1
            return False
        self._count(client, address)
        return True

    def leave(self, client: Connected) -> None:
        """Count a connection no longer, if it was counted."""
        address = self._where.pop(client, "")
        if address:
            self._counts[address] -= 1
            if not self._counts[address]:
                del self._counts[address]

    def __len__(self) -> int:
        """Addresses with a connection that counts."""
        return len(self._counts)

    def _count(self, client: Connected, address: str) -> None:
        if address:
            self._counts[address] += 1
            self._where[client] = address


def address_of(transport: asyncio.Transport) -> str:
    """The peer's IPv4 address or IPv6 network; empty where it has none."""
    peer = transport.get_extra_info("peername")
    if not isinstance(peer, tuple) or not peer:
        return ""
    address = ip_address(str(peer[0]).partition("%")[0])
    if not isinstance(address, IPv6Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return f"{int(address) >> (128 - NETWORK_BITS):x}/{NETWORK_BITS}"
