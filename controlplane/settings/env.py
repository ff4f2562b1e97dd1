"""Reads settings from the environment. An invalid value raises ImproperlyConfigured, which names the variable.

Every ``WARMPATH_<NAME>`` may be given as ``WARMPATH_<NAME>_FILE`` instead, the path of a file with the value.
"""

import ipaddress
import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from django.core.exceptions import ImproperlyConfigured
from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

from controlplane.database.base import TimeoutConnection

T = TypeVar("T")
PREFIX = "WARMPATH_"
# Seconds. ``timeout``: a request waits this long for a connection. ``reconnect_timeout`` is short because the pool
# doubles the pause after each failure: after a long outage it would otherwise reconnect much too late.
POOL_TIMEOUTS = {"timeout": 5, "reconnect_timeout": 1}
CONNECT_TIMEOUT_S = 5
GRACE_S = 2.0  # the client waits this much longer than the server's statement timeout
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def text(name: str, default: str | None = None) -> str:
    """Value of ``WARMPATH_<name>``, of its file, or the default; ImproperlyConfigured if there is none."""
    variable = PREFIX + name
    if path := os.environ.get(f"{variable}_FILE"):
        try:
            return Path(path).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ImproperlyConfigured(f"{variable}_FILE: cannot read {path}: {error.strerror}") from None
    value = os.environ.get(variable) or default
    if value is None:
        raise ImproperlyConfigured(f"{variable} (or {variable}_FILE) must be set")
    return value


def number(name: str, default: float, *, low: float, high: float) -> float:
    """A number from ``low`` to ``high``, inclusive."""
    value = _converted(name, text(name, str(default)), float, "a number")
    if not low <= value <= high:
        raise ImproperlyConfigured(f"{PREFIX}{name}: expected {low:g} to {high:g}, not {value:g}")
    return value


def flag(name: str, *, default: bool) -> bool:
    """``1 true yes on`` or ``0 false no off``."""
    values = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    value = text(name, "1" if default else "0").lower()
    if value not in values:
        raise ImproperlyConfigured(f"{PREFIX}{name}: expected one of {', '.join(values)}, not {value!r}")
    return values[value]


def words(name: str, default: str = "") -> list[str]:
    """A comma-separated list; spaces are stripped, empty items dropped."""
    return [word for word in (part.strip() for part in text(name, default).split(",")) if word]


def networks(name: str, default: str = "") -> list[Network]:
    """A list of networks in CIDR notation."""
    return [
        _converted(name, word, ipaddress.ip_network, "a network such as 10.0.0.0/8") for word in words(name, default)
    ]


def authorities(name: str) -> str:
    """Path of a PEM file of certificate authorities, or ""; ImproperlyConfigured for a file without certificates."""
    path = text(name, "")
    try:
        if path:
            ssl.create_default_context(cafile=path)
    except OSError as error:
        raise ImproperlyConfigured(f"{PREFIX}{name}: cannot use {path}: {error.strerror or error}") from None
    return path


def database(url: str, *, pool: int = 0) -> dict[str, Any]:
    """Django's DATABASES entry for a ``postgresql://`` URL; libpq's other parameters are passed on.

    ``pool`` is the largest number of connections of a process. With 0, for an external pooler, each request opens a
    connection, and only the client applies the timeouts, because the pooler's sessions are shared.
    """
    if not url.startswith(("postgresql://", "postgres://")):
        raise ImproperlyConfigured(f"{PREFIX}DATABASE_URL: expected postgresql://...; only PostgreSQL is supported")
    try:
        parts = conninfo_to_dict(url)
    except ProgrammingError as error:
        raise ImproperlyConfigured(f"{PREFIX}DATABASE_URL: {error}") from None
    names = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}
    entry: dict[str, Any] = {names[key]: str(value) for key, value in parts.items() if key in names}
    options: dict[str, Any] = {key: value for key, value in parts.items() if key not in names}
    statement_s = number("DATABASE_TIMEOUT_S", 15, low=1, high=3600)
    if pool:
        options["pool"] = {
            "min_size": 0,
            "max_size": pool,
            "connection_class": TimeoutConnection,
            **POOL_TIMEOUTS,
        }
        options["options"] = f"{_timeouts(statement_s)} {options.get('options', '')}".strip()
    entry["OPTIONS"] = {"connect_timeout": CONNECT_TIMEOUT_S, "response_timeout_s": statement_s + GRACE_S, **options}
    return {"ENGINE": "controlplane.database", **entry}


def _timeouts(statement_s: float) -> str:
    """Server options: the timeouts of statements and of idle transactions."""
    names = ("statement_timeout", "idle_in_transaction_session_timeout")
    return " ".join(f"-c {name}={statement_s * 1000:.0f}" for name in names)


def _converted(name: str, value: str, convert: Callable[[str], T], expected: str) -> T:
    try:
        return convert(value)
    except ValueError:
        raise ImproperlyConfigured(f"{PREFIX}{name}: expected {expected}, not {value!r}") from None
