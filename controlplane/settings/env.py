"""Reads the environment, and fails loudly: a setting that cannot be used stops the start and names itself.

Every ``WARMPATH_<NAME>`` may be given as ``WARMPATH_<NAME>_FILE`` instead, the path of a file that holds the value.
"""

import ipaddress
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from django.core.exceptions import ImproperlyConfigured
from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

T = TypeVar("T")
PREFIX = "WARMPATH_"
# Seconds. A request waits so long for a connection; an attempt to make one is given up so soon, because its pauses
# double, and after a long absence of the database the next one would be as long again.
POOL_PATIENCE = {"timeout": 5, "reconnect_timeout": 1}
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


def database(url: str, *, pool: int = 0) -> dict[str, Any]:
    """Django's DATABASES entry of a ``postgresql://`` URL; anything libpq understands in it is passed on.

    ``pool`` is how many connections a process keeps at most; 0 opens one for each request, as behind a pooler.
    """
    if not url.startswith(("postgresql://", "postgres://")):
        raise ImproperlyConfigured(f"{PREFIX}DATABASE_URL: expected postgresql://...; PostgreSQL is the one database")
    try:
        parts = conninfo_to_dict(url)
    except ProgrammingError as error:
        raise ImproperlyConfigured(f"{PREFIX}DATABASE_URL: {error}") from None
    names = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}
    entry: dict[str, Any] = {names[key]: str(value) for key, value in parts.items() if key in names}
    entry["OPTIONS"] = {key: value for key, value in parts.items() if key not in names}
    if pool:
        entry["OPTIONS"]["pool"] = {"min_size": 0, "max_size": pool, **POOL_PATIENCE}
    return {"ENGINE": "django.db.backends.postgresql", **entry}


def _converted(name: str, value: str, convert: Callable[[str], T], expected: str) -> T:
    try:
        return convert(value)
    except ValueError:
        raise ImproperlyConfigured(f"{PREFIX}{name}: expected {expected}, not {value!r}") from None
