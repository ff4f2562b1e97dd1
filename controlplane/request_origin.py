"""The current request's client address, id and token, for the audit log, rate limits and JSON log lines.

Where a proxy is declared (``WARMPATH_BEHIND_TLS_PROXY``), it appends its client's address to ``X-Forwarded-For``. Only
the last address there was seen by the proxy; the ones before it are claims of the client. A request that the proxy
forwards without the header has the proxy's address, so clients cannot be told apart; this is logged once and shown on
the audit page.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import re
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Event, Lock

from django.conf import settings
from django.http import HttpRequest

_SHARED_TOKEN = re.compile(r"/shared/[^/\s]+")
MAX_ADDRESS_LENGTH = 45  # characters of an IPv6 address
log = logging.getLogger(__name__)

# Set after the proxy forwards the first request without its client's address.
forwarded_for_missing = Event()
_warning_lock = Lock()


def client_address(request: HttpRequest) -> str:
    """The peer's address, or the client's as the declared proxy reports it; "" where even the peer is unknown."""
    if settings.BEHIND_TLS_PROXY:
        forwarded = request.headers.get("X-Forwarded-For", "").rpartition(",")[2].strip()
        if forwarded:
            return _without_port(forwarded)[:MAX_ADDRESS_LENGTH]
        if lacks_forwarded_for(request):
            _warn_once()
    return str(request.META.get("REMOTE_ADDR") or "")[:MAX_ADDRESS_LENGTH]


def rate_limit_network(address: str) -> str:
    """The network that rate limits count: an IPv4 address, or the /64 of an IPv6 address, which one client has."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address
    return address if ip.version == 4 else str(ipaddress.ip_network((ip, 64), strict=False))


def lacks_forwarded_for(request: HttpRequest) -> bool:
    """Whether the declared proxy forwarded this request without its client's address."""
    forwarded = "X-Forwarded-Proto" in request.headers
    return settings.BEHIND_TLS_PROXY and forwarded and not request.headers.get("X-Forwarded-For", "").strip(" ,")


def _warn_once() -> None:
    with _warning_lock:
        if forwarded_for_missing.is_set():
            return
        forwarded_for_missing.set()
    log.warning(
        "The TLS proxy sends X-Forwarded-Proto but no X-Forwarded-For: the audit log and rate limits see the proxy's "
        "address for all clients. Configure the proxy to append the client's address to X-Forwarded-For."
    )


def _without_port(address: str) -> str:
    """The IP address of ``192.0.2.1:443`` and ``[2001:db8::1]:443``, which some proxies send."""
    host = address[1:].partition("]")[0] if address.startswith("[") else address
    if host.count(":") == 1:
        host = host.partition(":")[0]
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return address


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request came from. A field is "" where it is unknown, as in a worker's task."""

    address: str = ""  # of the client
    request_id: str = ""
    token: str = ""  # the key_id of the API token


_origin: ContextVar[Origin] = ContextVar("origin", default=Origin())  # noqa: B039 - it is frozen


def set_origin(origin: Origin) -> None:
    _origin.set(origin)


def current_origin() -> Origin:
    return _origin.get()


def without_tokens(text: str) -> str:
    """A text with URL paths, without the tokens that paths of read-only links contain."""
    return _SHARED_TOKEN.sub("/shared/***", text)


class OneLineRefusals(logging.Filter):
    """Removes tokens from paths, and the traceback of a request that was refused (4xx), which says nothing new."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(without_tokens(arg) if isinstance(arg, str) else arg for arg in record.args)
        if getattr(record, "status_code", 500) < 500:
            record.exc_info = None
        return True


class JsonFormatter(logging.Formatter):
    """Formats a log record as one JSON object: ``at``, ``level``, ``logger``, ``message``, and ``request_id`` and
    ``exception`` where there is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = {"at": at, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        if request_id := current_origin().request_id:
            fields["request_id"] = request_id
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)
