"""What every part of a configuration shares: its words, its base, its error, and which of its fields are secret.

What a base URL may be: a replica's, or the control plane's.

Which addresses replicas may have, and which nobody may connect to.

An address may stand for another one: IPv4-mapped, 6to4, Teredo, NAT64 and IPv4-compatible IPv6 addresses lead to the
IPv4 address inside. All of them are judged.

JSON read by a type, with what is wrong said in our own error.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct


def of_form(pattern: str, **facts: Any) -> Meta:
    """A text of this form from end to end; Python's ``$`` would let a line's end follow."""
    return Meta(pattern=rf"^{pattern}\Z", **facts)


NAME = r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?"
Name = Annotated[str, of_form(NAME)]
Model = Annotated[str, Meta(min_length=1, max_length=256)]  # as clients name it
Hex = Annotated[str, of_form(r"[0-9a-f]{32,128}")]

HIDDEN = "***"
SECRET_FIELDS = frozenset({"hash_secret", "api_key", "digest", "document"})  # never in a log, an answer or a repr


class ConfigError(ValueError):
    """A snapshot that cannot be run. ``path`` is a JSON path from the config's root, such as ``$.pools[0].name``."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class Frozen(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of everything in a config: immutable, and a field nobody knows is an error rather than a silent no-op."""

    def __repr__(self) -> str:
        fields = ((name, getattr(self, name)) for name in self.__struct_fields__)
        shown = (f"{name}={HIDDEN if name in SECRET_FIELDS and value else repr(value)}" for name, value in fields)
        return f"{type(self).__name__}({', '.join(shown)})"


def without_secrets(config: Frozen) -> dict[str, Any]:
    """A config, or a part of it, as JSON for people: every secret in it is ``***``."""
    hidden: dict[str, Any] = _hide(msgspec.to_builtins(config))
    return hidden


def _hide(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: HIDDEN if name in SECRET_FIELDS and it else _hide(it) for name, it in value.items()}
    if isinstance(value, list | tuple):
        return [_hide(it) for it in value]
    return value


_host = re.compile(r"^[A-Za-z0-9._-]+$|^[0-9A-Fa-f:.]+$")


def check_base_url(url: str, path: str = "url") -> None:
    """A base URL: http or https, a host, nothing after the path; ConfigError names ``path``."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(path, f"not a URL: {error}") from None
    if parts.scheme not in {"http", "https"}:
        raise ConfigError(path, "expected http://host[:port] or https://host[:port]")
    if not parts.hostname or not _host.match(parts.hostname) or port == 0:
        raise ConfigError(path, "the host or port is missing or malformed")
    if (
        parts.username is not None
        or parts.query
        or parts.fragment
        or not url.isascii()
        or not url.isprintable()
        or " " in url
    ):
        raise ConfigError(path, "expected no credentials, query, fragment or blanks")


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


MAX_REASON_CHARS = 200  # of msgspec's, which quotes a name that nobody knows, however long it is

T = TypeVar("T")


def decoded(decoder: msgspec.json.Decoder[T], document: bytes) -> T:
    """What ``document`` says; ConfigError with the path and the reason that msgspec gives."""
    try:
        return decoder.decode(document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # ValidationError is a DecodeError
        text = str(error)
        reason, _, path = text.rpartition(" - at `$")
        raise ConfigError("$" + path.rstrip("`") if reason else "$", (reason or text)[:MAX_REASON_CHARS]) from None
