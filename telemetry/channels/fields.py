"""A setting of a channel: declared once, for its form, for REST and for its README."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

HOST = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?\Z|\[[0-9A-Fa-f:.]+\]\Z|[0-9A-Fa-f:.]+\Z")
ADDRESS = re.compile(r"[^@\s<>,;\"\\]{1,64}@[A-Za-z0-9.-]{1,253}\Z")
MOST_ADDRESSES = 50


class ConfigError(ValueError):
    """A config that no channel of this kind can have; ``field`` names what is wrong with it."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Field:
    """One setting. ``read`` takes what a person or a script gave; ValueError with what was expected."""

    name: str
    label: str
    help: str
    read: Callable[[Any], Any]
    required: bool = False
    secret: bool = False  # sealed, and never shown again
    default: Any = None
    make: Callable[[], Any] | None = None  # where none is given
    choices: tuple[tuple[str, str], ...] = ()

    def completed(self, given: Any) -> Any:
        """The value to keep, None for none. ConfigError."""
        if given is None or given in ("", []):
            if self.required:
                raise ConfigError(self.name, "this is needed")
            return self.make() if self.make is not None else self.default
        try:
            return self.read(given)
        except ValueError as error:
            raise ConfigError(self.name, str(error)) from None


def text(most: int) -> Callable[[Any], str]:
    """A line of printable ASCII, such as a name or a password."""

    def read(given: Any) -> str:
        if not isinstance(given, str) or len(given) > most or not given.isascii() or not given.isprintable():
            raise ValueError(f"expected up to {most} printable ASCII characters")
        return given

    return read


def url(given: Any) -> str:
    """An address of HTTP without a user in it."""
    expected = "expected https://host/path or http://host/path"
    if not isinstance(given, str) or len(given) > 2048 or not given.isascii() or not given.isprintable():
        raise ValueError(expected)
    try:
        parts = urlsplit(given)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or " " in given or parts.username is not None:
        raise ValueError(expected)
    return given


def host(given: Any) -> str:
    """A name or an address."""
    if not isinstance(given, str) or not HOST.match(given):
        raise ValueError("expected a host name or an address, without a port")
    return given.strip("[]")


def port(given: Any) -> int:
    """A number of 1 to 65535, also as text."""
    found = int(given) if isinstance(given, str) and given.strip().isdecimal() else given
    if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= 65_535:
        raise ValueError("expected a port, 1 to 65535")
    return found


def one_of(*names: str) -> Callable[[Any], str]:
    """One of a few words."""

    def read(given: Any) -> str:
        if given not in names:
            raise ValueError(f"expected one of {', '.join(names)}")
        return str(given)

    return read


def address(given: Any) -> str:
    """One e-mail address, without a display name."""
    if not isinstance(given, str) or not given.isascii() or not ADDRESS.match(given.strip()):
        raise ValueError("expected an address such as on-call@example.org")
    return given.strip()


def addresses(given: Any) -> list[str]:
    """Some e-mail addresses, as a list or with commas or lines between them."""
    several = re.split(r"[,\n]", given) if isinstance(given, str) else given
    if not isinstance(several, list) or not 1 <= len(several) <= MOST_ADDRESSES:
        raise ValueError(f"expected 1 to {MOST_ADDRESSES} addresses")
    return list(dict.fromkeys(address(one) for one in several if not isinstance(one, str) or one.strip()))
