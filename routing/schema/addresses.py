"""Which addresses replicas may have, and which nobody may connect to.

An address may stand for another one: IPv4-mapped, 6to4, Teredo, NAT64 and IPv4-compatible IPv6 addresses lead to the
IPv4 address inside. All of them are judged.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from routing.schema.base import ConfigError, Frozen

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

# Unspecified, link-local, multicast, broadcast, and where clouds serve credentials.
FORBIDDEN_NETWORKS = (
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
MAX_NETWORKS = 1000
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_COMPATIBLE = ipaddress.IPv6Network("::/96")  # the deprecated ::1.2.3.4


class ReplicaNetworks(Frozen, frozen=True):
    """Networks in CIDR form. Routers judge every address that a replica's host name resolves to, at each connection."""

    allowed: tuple[str, ...] | None = None  # replicas are in one of these; None: anywhere
    forbidden: tuple[str, ...] = FORBIDDEN_NETWORKS  # never, even within ``allowed``


class AddressRules:
    """The same, ready to judge addresses. ConfigError for what is no network."""

    def __init__(self, networks: ReplicaNetworks, path: str = "$.replica_networks") -> None:
        allowed = networks.allowed
        self._allowed = None if allowed is None else parsed_networks(allowed, f"{path}.allowed")
        self._forbidden = parsed_networks(networks.forbidden, f"{path}.forbidden")

    def refusal(self, text: str) -> str | None:
        """Why an address may not be connected to; None if it may."""
        try:
            faces = all_faces(ipaddress.ip_address(text.partition("%")[0]))
        except ValueError:
            return "it is no address"
        if any(is_within(face, self._forbidden) for face in faces):
            return "it is forbidden for replicas"
        if self._allowed is not None and not is_within(faces[-1], self._allowed):
            return "it is in no network that replicas may be in"
        return None


def parsed_networks(texts: Iterable[str], path: str) -> tuple[IpNetwork, ...]:
    """Networks out of their CIDR form; ConfigError names the first that is none, below ``path``."""
    found: list[IpNetwork] = []
    for index, text in enumerate(texts):
        try:
            found.append(ipaddress.ip_network(text))
        except ValueError:
            raise ConfigError(f"{path}[{index}]", f"expected a network such as 10.0.0.0/8, not {text[:64]!r}") from None
    if len(found) > MAX_NETWORKS:
        raise ConfigError(path, f"{len(found)} networks, where {MAX_NETWORKS} is the limit")
    return tuple(found)


def all_faces(address: IpAddress) -> list[IpAddress]:
    """The address, and the ones it stands for: a connection to the first ends at the last."""
    faces = [address]
    while isinstance(address, ipaddress.IPv6Address) and (inner := _embedded(address)) is not None:
        faces.append(inner)
        address = inner
    return faces


def is_within(address: IpAddress, networks: Iterable[IpNetwork]) -> bool:
    """Whether an address is in one of these networks."""
    return any(address.version == network.version and address in network for network in networks)


def _embedded(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address inside an IPv4-mapped, 6to4, Teredo, NAT64 or IPv4-compatible one."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    if address in _NAT64 or (address in _COMPATIBLE and int(address) > 1):
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return None
