"""The address that a request came from, as far as the proxy in front may be believed.

Where a proxy is declared (``WARMPATH_BEHIND_TLS_PROXY``), it appends its client's address to ``X-Forwarded-For``, and
the last address there is the one that the proxy itself saw; what stands before it is the client's own word. A request
that the proxy forwards without the header has the proxy's address: people cannot be told apart, which is logged once
and shown on the audit page.

Where the present request came from, for the audit log: known at the door, needed by the services.
"""

from __future__ import annotations

import ipaddress
import logging
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock

from django.conf import settings
from django.http import HttpRequest

LONGEST = 45  # characters of an IPv6 address
log = logging.getLogger(__name__)


class _Warning:
    """Whether this process was forwarded a request without the address of its client; logged once."""

    def __init__(self) -> None:
        self.given = False
        self._lock = Lock()

    def give(self) -> None:
        with self._lock:
            first, self.given = not self.given, True
        if first:
            log.warning(
                "The proxy in front sends X-Forwarded-Proto and no X-Forwarded-For: all clients have its address, in "
                "the audit log and for the limits on sign-ins and requests. Have it append the client's address."
            )


header_missing = _Warning()


def client_address(request: HttpRequest) -> str:
    """The peer, or the client that the declared proxy names; "" where not even the peer is known."""
    if settings.BEHIND_TLS_PROXY:
        named = request.headers.get("X-Forwarded-For", "").rpartition(",")[2].strip()
        if named:
            return _without_port(named)[:LONGEST]
        if is_hidden_by_proxy(request):
            header_missing.give()
    return str(request.META.get("REMOTE_ADDR") or "")[:LONGEST]


def neighbourhood(address: str) -> str:
    """What limits count an address as: itself, or for IPv6 its /64, which is one customer's."""
    try:
        known = ipaddress.ip_address(address)
    except ValueError:
        return address
    return address if known.version == 4 else str(ipaddress.ip_network((known, 64), strict=False))


def is_hidden_by_proxy(request: HttpRequest) -> bool:
    """Whether the declared proxy forwarded this request without saying for whom: its address says nothing then."""
    forwarded = "X-Forwarded-Proto" in request.headers
    return settings.BEHIND_TLS_PROXY and forwarded and not request.headers.get("X-Forwarded-For", "").strip(" ,")


def _without_port(named: str) -> str:
    """``192.0.2.1:443`` and ``[2001:db8::1]:443``, which some proxies send, as the address alone."""
    host = named[1:].partition("]")[0] if named.startswith("[") else named
    if host.count(":") == 1:
        host = host.partition(":")[0]
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return named


@dataclass(frozen=True, slots=True)
class Origin:
    """Each is "" where there is none, as in a worker's task."""

    address: str = ""  # of the client, as far as it can be known
    request_id: str = ""
    token: str = ""  # the key_id of the API token that was used


_origin: ContextVar[Origin] = ContextVar("origin", default=Origin())  # noqa: B039 - it is frozen


def set_origin(origin: Origin) -> None:
    """Remember where this request came from."""
    _origin.set(origin)


def present_origin() -> Origin:
    """Where this request came from."""
    return _origin.get()
