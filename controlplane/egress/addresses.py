"""Rules for the addresses that connections of one purpose may go to. Pure: checks addresses, resolves none.

Python's ``is_private`` and ``is_global`` are not used: up to 3.11 they report 100.64.0.0/10, 192.0.0.8, NAT64, 6to4 and
multicast as public. The tables are IANA's special-purpose registries of November 2025; for IPv6, only addresses
allocated as global unicast count as public.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from django.conf import settings

from routing.schema import FORBIDDEN_NETWORKS, IpAddress, IpNetwork, embedded_addresses, is_within


def _networks(*texts: str) -> tuple[IpNetwork, ...]:
    return tuple(ipaddress.ip_network(text) for text in texts)


# Unspecified, link-local, multicast, broadcast and the metadata services of clouds.
ALWAYS_DENIED = _networks(*FORBIDDEN_NETWORKS)
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


@dataclass(frozen=True, slots=True)
class Rules:
    """Permitted destinations of one purpose."""

    networks: tuple[IpNetwork, ...]  # private networks that are allowed, at any port
    allow_public: bool
    public_ports: frozenset[int] | None = None  # allowed for public addresses; None: any
    authorities: str | None = None  # PEM file of certificate authorities trusted besides the system's

    def denial_reason(self, address: str, port: int | None = None) -> str | None:
        """Why an address, or this port of it, is denied; None if it is allowed."""
        try:
            addresses = embedded_addresses(ipaddress.ip_address(address))
        except ValueError:
            return "not an IP address"
        for embedded in addresses:
            if is_within(embedded, ALWAYS_DENIED):
                return f"{embedded} is link-local, multicast, unspecified or a metadata service"
        innermost = addresses[-1]
        if is_within(innermost, self.networks):
            return None
        if not (self.allow_public and is_public(innermost)):
            return f"{innermost} is not in an allowed network"
        if port is not None and self.public_ports is not None and port not in self.public_ports:
            return f"port {port} is not one of {', '.join(map(str, sorted(self.public_ports)))}"
        return None


def fleet_rules() -> Rules:
    """Replicas and routers: ``WARMPATH_FLEET_NETWORKS`` only; ``WARMPATH_FLEET_CA_FILE`` is trusted too."""
    return Rules(tuple(settings.FLEET_NETWORKS), allow_public=False, authorities=settings.FLEET_CA_FILE or None)


def webhook_rules() -> Rules:
    """Webhooks: public addresses at HTTP ports, and ``WARMPATH_WEBHOOK_NETWORKS``."""
    return Rules(tuple(settings.WEBHOOK_NETWORKS), allow_public=True, public_ports=WEB_PORTS)


def mail_rules() -> Rules:
    """Mail servers: public addresses at SMTP ports, and ``WARMPATH_WEBHOOK_NETWORKS``."""
    return Rules(tuple(settings.WEBHOOK_NETWORKS), allow_public=True, public_ports=MAIL_PORTS)


def provider_rules() -> Rules:
    """The identity provider: any public address, and ``WARMPATH_OIDC_NETWORKS``."""
    return Rules(tuple(settings.OIDC_NETWORKS), allow_public=True)


def is_public(address: IpAddress) -> bool:
    """Whether an address is on the public internet."""
    if isinstance(address, ipaddress.IPv6Address) and address not in PUBLIC_IPV6:
        return False
    return not is_within(address, NOT_PUBLIC)
