"""Replicas by the addresses, or the SRV records, of one name."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Annotated, Any

import dns.exception
import dns.nameserver
import dns.rdata
import dns.resolver
from msgspec import Meta

from controlplane.discovery.targets import (
    Bounds,
    Found,
    PollError,
    Port,
    Scheme,
    SchemeChoice,
    SourceSettings,
    Target,
    base_url,
    gather,
    shown,
)


class Record(StrEnum):
    """What is asked for. Not both kinds of addresses at once: an engine with two would be two replicas."""

    A = "A"
    AAAA = "AAAA"
    SRV = "SRV"


class DnsSettings(SourceSettings, frozen=True):
    """A name, and where its answers come from."""

    host: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9.])?\Z",
            description="The name that is asked for, such as vllm.prod.svc.cluster.local.",
        ),
    ]
    record: Annotated[
        Record, Meta(description="A and AAAA answer addresses; SRV answers names, which survive a new address.")
    ] = Record.A
    port: Port = 8000
    scheme: SchemeChoice = Scheme.HTTP
    server: Annotated[
        str,
        Meta(
            max_length=60,
            description="The name server's address, such as 10.0.0.2 or 10.0.0.2:5353; empty: the system's own.",
        ),
    ] = ""


class DnsKind:
    """A name in DNS."""

    name = "dns"
    label = "DNS"
    help = "The addresses of one name, or its SRV records: for a headless service, or names that you keep yourself."
    settings: type[SourceSettings] = DnsSettings
    secret = ""

    def look(self, settings: Any, secret: str, bounds: Bounds) -> Found:  # noqa: ARG002 - it has none
        """Ask once, within the deadline."""
        return gather(targets(_ask(settings, bounds), settings), bounds)


def targets(answer: Iterable[Any], settings: DnsSettings) -> Iterator[Target]:
    """The records of an answer as targets. SRV records say their port themselves; a bare dot is nobody."""
    for record in answer:
        if settings.record is not Record.SRV:
            yield _at(str(record.address), settings.port, settings)
        elif host := record.target.to_text(omit_final_dot=True).lower().rstrip("."):
            yield _at(host, record.port, settings)


def _at(host: str, port: int, settings: DnsSettings) -> Target:
    url = base_url(settings.scheme, host, port)
    return Target(key=url.partition("://")[2], url=url)


def _ask(settings: DnsSettings, bounds: Bounds) -> Iterable[dns.rdata.Rdata]:
    host, record = settings.host, settings.record.value
    try:
        resolver = _resolver(settings, bounds)
        return list(resolver.resolve(host, record, lifetime=bounds.deadline_s, search=not settings.server))
    except dns.resolver.NXDOMAIN:
        raise PollError(f"There is no name {host} in DNS.") from None
    except dns.resolver.NoAnswer:
        raise PollError(f"{host} has no {record} record.") from None
    except dns.exception.Timeout:
        raise PollError(f"No name server answered within {bounds.deadline_s:g} s.") from None
    except dns.resolver.NoNameservers as error:
        raise PollError(f"The name server could not answer: {shown(error, 200)}") from None
    except (dns.exception.DNSException, OSError, UnicodeError, ValueError) as error:
        raise PollError(f"DNS: {shown(error, 200) or type(error).__name__}") from None


def _resolver(settings: DnsSettings, bounds: Bounds) -> dns.resolver.Resolver:
    """The system's, or one that asks the server that is set; that one is judged like everything connected to."""
    if not settings.server:
        return dns.resolver.Resolver()
    address, port = _server(settings.server)
    if refusal := bounds.rules.refusal(address):
        raise PollError(f"The name server may not be asked: {refusal}.")
    resolver = dns.resolver.Resolver(configure=False)
    resolver.nameservers = [dns.nameserver.Do53Nameserver(address, port)]
    return resolver


def _server(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":") if text.count(":") == 1 or text.startswith("[") else (text, "", "53")
    address = host.strip("[]")
    try:
        ipaddress.ip_address(address)
        return address, int(port)
    except ValueError:
        raise PollError(f"{shown(text)} is no address of a name server.") from None
