"""Reads the environment, and fails loudly: a setting that cannot be used stops the start and names itself.

Every ``WARMPATH_<NAME>`` may be given as ``WARMPATH_<NAME>_FILE`` instead, the path of a file that holds the value.
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

from controlplane.database.connection import PatientConnection

T = TypeVar("T")
PREFIX = "WARMPATH_"
# Seconds. A request waits so long for a connection; an attempt to make one is given up so soon, because its pauses
# double, and after a long absence of the database the next one would be as long again.
POOL_PATIENCE = {"timeout": 5, "reconnect_timeout": 1}
CONNECT_S = 5
GRACE_S = 2.0  # that a client waits for a server beyond what that was given for a statement
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def text(name: str, default: str | None = None) -> str:
    """The value of ``WARMPATH_<name>``, of the file it names, or the default; ImproperlyConfigured if there is none."""
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
    """A number within ``low`` and ``high``, both included."""
    value = _converted(name, text(name, str(default)), float, "a number")
    if not low <= value <= high:
        raise ImproperlyConfigured(f"{PREFIX}{name}: expected {low:g} to {high:g}, not {value:g}")
    return value


def flag(name: str, *, default: bool) -> bool:
    """``1 true yes on`` or ``0 false no off``."""
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    value = text(name, "1" if default else "0").lower()
    if value not in words:
        raise ImproperlyConfigured(f"{PREFIX}{name}: expected one of {', '.join(words)}, not {value!r}")
    return words[value]


def words(name: str, default: str = "") -> list[str]:
    """A list separated by commas; blanks are dropped."""
    return [word for word in (part.strip() for part in text(name, default).split(",")) if word]


def networks(name: str, default: str = "") -> list[Network]:
    """A list of networks in CIDR form."""
    return [
        _converted(name, word, ipaddress.ip_network, "a network such as 10.0.0.0/8") for word in words(name, default)
    ]


def authorities(name: str) -> str:
    """The path of a PEM file of certificates, or ""; ImproperlyConfigured for a file that has none."""
    path = text(name, "")
    try:
        if path:
            ssl.create_default_context(cafile=path)
    except OSError as error:
        raise ImproperlyConfigured(f"{PREFIX}{name}: cannot use {path}: {error.strerror or error}") from None
    return path


def database(url: str, *, pool: int = 0) -> dict[str, Any]:
    """Django's DATABASES entry of a ``postgresql://`` URL; anything libpq understands in it is passed on.

    ``pool`` is how many connections a process keeps at most; 0 opens one for each request, as behind a pooler, which
    has sessions of its own: the server is then told nothing of timeouts, and the client alone keeps to them.
    """
    if not url.startswith(("postgresql://", "postgres://")):
        raise ImproperlyConfigured(f"{PREFIX}DATABASE_URL: expected postgresql://...; PostgreSQL is the one database")
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
            "connection_class": PatientConnection,
            **POOL_PATIENCE,
        }
        options["options"] = f"{_timeouts(statement_s)} {options.get('options', '')}".strip()
    entry["OPTIONS"] = {"connect_timeout": CONNECT_S, "patience_s": statement_s + GRACE_S, **options}
    return {"ENGINE": "controlplane.database", **entry}


def _timeouts(statement_s: float) -> str:
    """What the server does by itself: ends statements that take too long, and sessions whose client fell asleep."""
    names = ("statement_timeout", "idle_in_transaction_session_timeout")
    return " ".join(f"-c {name}={statement_s * 1000:.0f}" for name in names)


def _converted(name: str, value: str, convert: Callable[[str], T], expected: str) -> T:
    try:
        return convert(value)
    except ValueError:
        raise ImproperlyConfigured(f"{PREFIX}{name}: expected {expected}, not {value!r}") from None
