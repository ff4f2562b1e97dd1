"""DNS discovery: the A, AAAA or SRV records of one name."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Annotated, Any, Self

import dns.exception
import dns.nameserver
import dns.rdata
import dns.resolver
from msgspec import Meta

from controlplane.discovery.targets import (
    PollError,
    PollLimits,
    PollResult,
    Port,
    Scheme,
    SchemeChoice,
    SourceSettings,
    Target,
    base_url,
    collect,
    printable,
)
from controlplane.egress import Rules
from routing.schema import ConfigError


class Record(StrEnum):
    """Record type. A and AAAA are not combined: an engine with both addresses would become two replicas."""

    A = "A"
    AAAA = "AAAA"
    SRV = "SRV"


class DnsSettings(SourceSettings, frozen=True):
    """Name, record type and name server."""

    host: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9.])?\Z",
            description="The name to resolve, such as vllm.prod.svc.cluster.local.",
        ),
    ]
    record: Annotated[
        Record,
        Meta(
            description="A and AAAA give addresses; SRV gives host names, which stay the same when an address changes."
        ),
    ] = Record.A
    port: Port = 8000
    scheme: SchemeChoice = Scheme.HTTP
    server: Annotated[
        str,
        Meta(
            max_length=60,
            description="Address of the name server, such as 10.0.0.2 or 10.0.0.2:5353; empty: the system's resolver.",
        ),
    ] = ""

    def checked(self, rules: Rules) -> Self:
        if self.server and (refusal := rules.denial_reason(name_server(self.server)[0])):
            raise ConfigError("server", f"{refusal}; WARMPATH_FLEET_NETWORKS lists the allowed networks")
        return self


class DnsKind:
    name = "dns"
    label = "DNS"
    help = "The addresses or SRV records of one name, for a headless service or DNS records of your own."
    settings: type[SourceSettings] = DnsSettings
    secret = ""

    def poll(self, settings: Any, secret: str, limits: PollLimits) -> PollResult:  # noqa: ARG002 - DNS needs none
        """Resolve the name once, within the deadline."""
        return collect(targets(_resolve(settings, limits), settings), limits)


def targets(records: Iterable[Any], settings: DnsSettings) -> Iterator[Target]:
    """Records as targets. SRV records carry the port; their target "." means that there is no service."""
    for record in records:
        if settings.record is not Record.SRV:
            yield _target(str(record.address), settings.port, settings)
        elif host := record.target.to_text(omit_final_dot=True).lower().rstrip("."):
            yield _target(host, record.port, settings)


def _target(host: str, port: int, settings: DnsSettings) -> Target:
    url = base_url(settings.scheme, host, port)
    return Target(key=url.partition("://")[2], url=url)


def _resolve(settings: DnsSettings, limits: PollLimits) -> Iterable[dns.rdata.Rdata]:
    host, record = settings.host, settings.record.value
    try:
        resolver = _resolver(settings, limits)
        return list(resolver.resolve(host, record, lifetime=limits.deadline_s, search=not settings.server))
    except dns.resolver.NXDOMAIN:
        raise PollError(f"DNS name {host} does not exist (NXDOMAIN).") from None
    except dns.resolver.NoAnswer:
        raise PollError(f"{host} has no {record} record.") from None
    except dns.exception.Timeout:
        raise PollError(f"No name server responded within {limits.deadline_s:g} s.") from None
    except dns.resolver.NoNameservers as error:
        raise PollError(f"The name server failed: {printable(error, 200)}") from None
    except (dns.exception.DNSException, OSError, UnicodeError, ValueError) as error:
        raise PollError(f"DNS: {printable(error, 200) or type(error).__name__}") from None


def _resolver(settings: DnsSettings, limits: PollLimits) -> dns.resolver.Resolver:
    """The system's resolver, or one for the configured server if the egress rules allow its address."""
    if not settings.server:
        return dns.resolver.Resolver()
    try:
        settings.checked(limits.rules)  # the allowed networks may have changed since the settings were saved
        address, port = name_server(settings.server)
    except ConfigError as error:
        raise PollError(f"Invalid name server: {error.reason}.") from None
    resolver = dns.resolver.Resolver(configure=False)
    resolver.nameservers = [dns.nameserver.Do53Nameserver(address, port)]
    return resolver


def name_server(text: str) -> tuple[str, int]:
    """Address and port of a name server; ConfigError."""
    host, _, port = text.rpartition(":") if text.count(":") == 1 or text.startswith("[") else (text, "", "53")
    address = host.strip("[]")
    try:
        ipaddress.ip_address(address)
        if 0 < int(port) < 65_536:
            return address, int(port)
    except ValueError:
        pass
    raise ConfigError("server", f"expected an IP address, or address:port, not {printable(text)}")
