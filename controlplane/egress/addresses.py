"""Which addresses may be connected to. Pure: it judges addresses, and resolves none.

Python's ``is_private`` and ``is_global`` are not asked: up to 3.11 they take 100.64.0.0/10, 192.0.0.8, NAT64, 6to4
and multicast for public. The tables are IANA's special-purpose registries of November 2025, read the careful way
round: for IPv6 only what is allocated as global unicast is public.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from django.conf import settings

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def _networks(*texts: str) -> tuple[Network, ...]:
    return tuple(ipaddress.ip_network(text) for text in texts)


# Never, whatever is configured: unspecified, link-local, multicast, broadcast, and where clouds serve credentials.
NEVER = _networks(
    "0.0.0.0/8",
    "169.254.0.0/16",
    "224.0.0.0/4",
    "255.255.255.255/32",
    "100.100.100.200/32",
    "168.63.129.16/32",
    "192.0.0.192/32",
    "::/128",
    "fe80::/10",
    "fec0::/10",
    "ff00::/8",
    "fd00:ec2::254/128",
    "fd20:ce::254/128",
)
NOT_PUBLIC = _networks(
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.0.2.0/24",
    "192.31.196.0/24",
    "192.52.193.0/24",
    "192.88.99.0/24",
    "192.168.0.0/16",
    "192.175.48.0/24",
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "224.0.0.0/4",
    "240.0.0.0/4",
    "2001::/23",
    "2001:db8::/32",
    "2002::/16",
    "2620:4f:8000::/48",
    "3fff::/20",
)
WEB_PORTS = frozenset({80, 443, 8080, 8443})
MAIL_PORTS = frozenset({25, 465, 587, 2525})
PUBLIC_IPV6 = ipaddress.IPv6Network("2000::/3")
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
COMPATIBLE = ipaddress.IPv6Network("::/96")  # the deprecated ::1.2.3.4


@dataclass(frozen=True, slots=True)
class Rules:
    """Where requests of one purpose may go."""

    networks: tuple[Network, ...]  # allowed though private, at any port
    allow_public: bool
    public_ports: frozenset[int] | None = None  # of public addresses; None: any
    authorities: str | None = None  # a PEM file of those that certificates may be of besides the system's

    def refusal(self, text: str, port: int | None = None) -> str | None:
        """Why an address is refused; None when it may be connected to, at this port where one is given."""
        try:
            faces = all_faces(ipaddress.ip_address(text))
        except ValueError:
            return "it is no address"
        for face in faces:
            if _within(face, NEVER):
                return f"{face} is link-local, multicast, unspecified or a metadata service"
        innermost = faces[-1]
        if _within(innermost, self.networks):
            return None
        if not (self.allow_public and is_public(innermost)):
            return f"{innermost} is in no network that is allowed"
        if port is not None and self.public_ports is not None and port not in self.public_ports:
            return f"port {port} is none of {', '.join(map(str, sorted(self.public_ports)))}"
        return None


def fleet_rules() -> Rules:
    """Replicas and routers: within ``WARMPATH_FLEET_NETWORKS``, and believed by ``WARMPATH_FLEET_CA_FILE`` too."""
    return Rules(tuple(settings.FLEET_NETWORKS), allow_public=False, authorities=settings.FLEET_CA_FILE or None)


def webhook_rules() -> Rules:
    """Webhooks: any public address at a port of the web, and ``WARMPATH_WEBHOOK_NETWORKS``."""
    return Rules(tuple(settings.WEBHOOK_NETWORKS), allow_public=True, public_ports=WEB_PORTS)


def mail_rules() -> Rules:
    """Mail servers: any public address at a port of theirs, and ``WARMPATH_WEBHOOK_NETWORKS``."""
    return Rules(tuple(settings.WEBHOOK_NETWORKS), allow_public=True, public_ports=MAIL_PORTS)


def provider_rules() -> Rules:
    """The identity provider: any public address, and ``WARMPATH_OIDC_NETWORKS``."""
    return Rules(tuple(settings.OIDC_NETWORKS), allow_public=True)


def all_faces(address: Address) -> list[Address]:
    """The address, and the ones it stands for: a connection to the first ends at the last."""
    faces = [address]
    while isinstance(address, ipaddress.IPv6Address) and (inner := _embedded(address)) is not None:
        faces.append(inner)
        address = inner
    return faces


def is_public(address: Address) -> bool:
    """Whether an address is one of the open internet."""
    if isinstance(address, ipaddress.IPv6Address) and address not in PUBLIC_IPV6:
        return False
    return not _within(address, NOT_PUBLIC)


def _embedded(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address inside an IPv4-mapped, 6to4, Teredo, NAT64 or IPv4-compatible one."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    if address in NAT64 or (address in COMPATIBLE and int(address) > 1):
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return None


def _within(address: Address, networks: Iterable[Network]) -> bool:
    return any(address.version == network.version and address in network for network in networks)
