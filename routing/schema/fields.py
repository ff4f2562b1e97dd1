"""What all parts of a configuration share: field types, the base class, errors, secrets, URL and address rules.

An IPv6 address may embed an IPv4 address to which a connection really goes (IPv4-mapped, 6to4, Teredo, NAT64 and
IPv4-compatible addresses). Address rules check every embedded address.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Annotated, Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

_SLACK, _BY_PREFIX = "slack_s bounds the additional wait", "affinity_groups follows the traffic of prefixes"
_NO_FETCH = "blocks in a lower cache tier count as cached"
REMOVED_FIELDS: Final = {  # in documents of earlier releases, with what to use instead
    "load_factor": _SLACK,
    "min_bound": _SLACK,
    "auto_replicas": f"{_BY_PREFIX}; replicas names a group's own",
    "share_half_life": _BY_PREFIX,
    "fetch_s": _NO_FETCH,
    "fetch_tokens_per_s": _NO_FETCH,
}

_forms = {  # reasons for people, by msgspec's reason
    f"Object contains unknown field `{name}`": f"{name} was removed; {instead}"
    for name, instead in REMOVED_FIELDS.items()
}


def matching(pattern: str, *, form: str = "", **constraints: Any) -> Meta:
    """Metadata of a string that matches ``pattern`` completely; Python's ``$`` would allow a trailing newline.

    ``form`` describes the pattern in error messages.
    """
    whole = rf"^{pattern}\Z"
    if form:
        _forms[f"Expected `str` matching regex {whole!r}"] = f"expected {form}"
    return Meta(pattern=whole, **constraints)


def explain_reason(reason: str) -> str:
    """The reason for people, where there is one; other reasons as they are."""
    return _forms.get(reason, reason)


def number(unit: str, minimum: float, maximum: float, description: str) -> Meta:
    """Metadata of a number: its unit, its inclusive range, and what it sets."""
    return Meta(ge=minimum, le=maximum, description=description, extra={"unit": unit})


def seconds(description: str, maximum: float = 86_400) -> Meta:
    """Metadata of a duration: above 0, at most ``maximum``, by default a day."""
    return Meta(gt=0, le=maximum, description=description, extra={"unit": "seconds"})


NAME = r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?"
Name = Annotated[str, matching(NAME)]
Model = Annotated[str, Meta(min_length=1, max_length=256)]  # a model name in a client's request
Hex = Annotated[str, matching(r"[0-9a-f]{32,128}")]

HIDDEN = "***"
SECRET_FIELDS = frozenset({"hash_secret", "api_key", "digest", "document"})  # never in a log, a response or a repr


class ConfigError(ValueError):
    """A snapshot that cannot run. ``path`` is a JSON path from the config's root, such as ``$.pools[0].name``."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class Frozen(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all parts of a configuration: immutable, and an unknown field is an error instead of being ignored."""

    def __repr__(self) -> str:
        fields = ((name, getattr(self, name)) for name in self.__struct_fields__)
        texts = (f"{name}={HIDDEN if name in SECRET_FIELDS and value else repr(value)}" for name, value in fields)
        return f"{type(self).__name__}({', '.join(texts)})"


def without_removed(stored: Any) -> Any:
    """A stored document, or a part of one, without the ``REMOVED_FIELDS``."""
    if isinstance(stored, list):
        return [without_removed(item) for item in stored]
    if not isinstance(stored, dict):
        return stored
    return {name: without_removed(value) for name, value in stored.items() if name not in REMOVED_FIELDS}


def without_secrets(config: Frozen) -> dict[str, Any]:
    """A configuration, or a part of it, as JSON values for people: every secret is replaced by ``***``."""
    hidden: dict[str, Any] = _hide(msgspec.to_builtins(config))
    return hidden


def _hide(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: HIDDEN if name in SECRET_FIELDS and item else _hide(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hide(item) for item in value]
    return value


_host = re.compile(r"^[A-Za-z0-9._-]+$|^[0-9A-Fa-f:.]+$")


def check_base_url(url: str, path: str = "url") -> str:
    """The normal form of a base URL, with scheme and host in lower case and without a final slash (RFC 3986).

    ConfigError names ``path``: expected are http or https, a host, and nothing after the path.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(path, f"not a URL: {error}") from None
    if parts.scheme not in {"http", "https"}:
        raise ConfigError(path, "expected http://host[:port] or https://host[:port]")
    if not parts.hostname or not _host.match(parts.hostname) or port == 0:
        raise ConfigError(path, "the host or port is missing or malformed")
    has_printable_ascii_only = url.isascii() and url.isprintable() and " " not in url
    if parts.username is not None or parts.query or parts.fragment or not has_printable_ascii_only:
        raise ConfigError(path, "expected no credentials, query, fragment or blanks")
    return f"{parts.scheme}://{parts.netloc.lower()}{parts.path}".rstrip("/")


IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

# Unspecified, link-local, multicast and broadcast addresses, and the metadata services of cloud providers.
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
    """Networks in CIDR form. For each connection, routers check the address that a replica's host name resolves to."""

    allowed: tuple[str, ...] | None = None  # replicas are in one of these; None: anywhere
    forbidden: tuple[str, ...] = FORBIDDEN_NETWORKS  # never, even within ``allowed``


class AddressRules:
    """Parsed ``ReplicaNetworks``; ConfigError for a text that is not a network."""

    def __init__(self, networks: ReplicaNetworks, path: str = "$.replica_networks") -> None:
        allowed = networks.allowed
        self._allowed = None if allowed is None else _parse_networks(allowed, f"{path}.allowed")
        self._forbidden = _parse_networks(networks.forbidden, f"{path}.forbidden")

    def rejection_reason(self, text: str) -> str | None:
        """Why connections to an address are not allowed; None if they are."""
        try:
            addresses = embedded_addresses(ipaddress.ip_address(text.partition("%")[0]))
        except ValueError:
            return "it is not an IP address"
        if any(is_within(address, self._forbidden) for address in addresses):
            return "its network is forbidden for replicas"
        if self._allowed is not None and not is_within(addresses[-1], self._allowed):
            return "it is outside the networks that replicas may be in"
        return None


def _parse_networks(texts: Iterable[str], path: str) -> tuple[IpNetwork, ...]:
    networks: list[IpNetwork] = []
    for index, text in enumerate(texts):
        try:
            networks.append(ipaddress.ip_network(text))
        except ValueError:
            raise ConfigError(f"{path}[{index}]", f"expected a network such as 10.0.0.0/8, not {text[:64]!r}") from None
    if len(networks) > MAX_NETWORKS:
        raise ConfigError(path, f"{len(networks)} networks, where {MAX_NETWORKS} is the limit")
    return tuple(networks)


def embedded_addresses(address: IpAddress) -> list[IpAddress]:
    """The address and the addresses embedded in it, outermost first; a connection goes to the last one."""
    addresses = [address]
    while isinstance(address, ipaddress.IPv6Address) and (inner := _embedded(address)) is not None:
        addresses.append(inner)
        address = inner
    return addresses


def is_within(address: IpAddress, networks: Iterable[IpNetwork]) -> bool:
    """Whether an address is in one of these networks."""
    return any(address.version == network.version and address in network for network in networks)


def _embedded(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    if address in _NAT64 or (address in _COMPATIBLE and int(address) > 1):
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return None


MAX_REASON_CHARS = 200  # msgspec's message quotes an unknown field name at full length

T = TypeVar("T")


def decode(decoder: msgspec.json.Decoder[T], document: bytes) -> T:
    """Decode ``document``; ConfigError with msgspec's path and reason."""
    try:
        return decoder.decode(document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # ValidationError is a DecodeError
        text = str(error)
        reason, _, path = text.rpartition(" - at `$")
        reason_text = explain_reason(reason or text)[:MAX_REASON_CHARS]
        raise ConfigError("$" + path.rstrip("`") if reason else "$", reason_text) from None


def is_loopback(host: str) -> bool:
    """Whether a host is a loopback address or ``localhost``; other names may resolve differently later."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
