"""A setting of a channel: declared once, for its form, for REST and for its README.

What a channel is, and what it is given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol
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
    secret: bool = False  # encrypted, and never shown again
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


class DeliveryError(Exception):
    """A message that did not arrive. The text is for people and names no URL and no secret."""

    def __init__(
        self,
        reason: str,
        *,
        retryable: bool,
        status: int | None = None,
        answer: str = "",
        retry_after_s: float | None = None,
        gone: bool = False,
    ) -> None:
        super().__init__(reason)
        self.retryable = retryable
        self.status = status  # of the answer, where there was one
        self.answer = answer  # the beginning of its text
        self.retry_after_s = retry_after_s  # the receiver's wish
        self.gone = gone  # the receiver wants nothing any more: disable the channel


@dataclass(frozen=True, slots=True)
class Receipt:
    """What the receiver said when it took a message."""

    status: int | None = None  # of HTTP or SMTP
    answer: str = ""  # the beginning of its text


@dataclass(frozen=True, slots=True)
class Message:
    """What is delivered. ``id`` is the same at every attempt, so that a receiver can drop a duplicate."""

    id: str
    at: datetime  # of this attempt
    payload: Mapping[str, Any]  # {"type", "timestamp", "data"}: channels/README.md

    @property
    def data(self) -> Mapping[str, Any]:
        """What the message is about."""
        found: Mapping[str, Any] = self.payload["data"]
        return found

    @property
    def state(self) -> str:
        """``firing``, ``repeated``, ``acknowledged``, ``resolved``, ``test`` or ``notice``."""
        return str(self.data.get("state", "notice"))

    @property
    def alerts(self) -> Sequence[Mapping[str, Any]]:
        """Every alert that it tells of; none for a test or a notice."""
        several = self.data.get("alerts")
        if several is not None:
            return [dict(one) for one in several]
        return [self.data] if self.data.get("alert") is not None else []


class Sender(Protocol):
    """An open channel. It knows nothing of retries: the outbox reads ``DeliveryError.retryable``."""

    def send(self, message: Message) -> Receipt:
        """Deliver once. DeliveryError."""

    def close(self) -> None:
        """Let go of connections."""


@dataclass(frozen=True, slots=True)
class ChannelKind:
    """A kind of channel. ``fields`` are declared here alone: forms, REST and documents follow."""

    name: str
    label: str
    about: str  # one sentence
    fields: Sequence[Field]
    open: Callable[[Mapping[str, Any]], Sender]
    target: Callable[[Mapping[str, Any]], str]  # where a config sends to, as far as that may be shown
    destination: Callable[[Mapping[str, Any]], str]  # whom its secrets are for, in one spelling: they go to no other
    check: Callable[[Mapping[str, Any]], None] = field(default=lambda _: None)  # what fields forbid each other
    refresh: Callable[[Sender, Sequence[Mapping[str, Any]], datetime], None] | None = None  # for receivers that forget

    def complete(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """A whole config of what a person gave; ConfigError."""
        names = [one.name for one in self.fields]
        if unknown := sorted(set(given) - set(names)):
            raise ConfigError(unknown[0], f"there is no such field; there are {', '.join(names)}")
        found = {one.name: one.completed(given.get(one.name)) for one in self.fields}
        config = {name: value for name, value in found.items() if value is not None}
        self.check(config)
        return config

    def public(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """What may be shown of a config: where it leads, what is no secret, and which secrets are set."""
        shown = {one.name: config[one.name] for one in self.fields if not one.secret and one.name in config}
        hidden = [one.name for one in self.fields if one.secret and one.name in config]
        return {"target": self.target(config), **shown, "secrets": hidden}

    def secrets(self, config: Mapping[str, Any]) -> list[str]:
        """Texts that nothing may repeat, the longest first: of a URL also what comes after its host."""
        found = [str(config[one.name]) for one in self.fields if one.secret and one.name in config]
        paths = [after for url in found if "://" in url and len(after := url[len(origin(url)) :]) > 1]
        return sorted(found + paths, key=len, reverse=True)


def origin(url: str) -> str:
    """Scheme and host of a URL: its path is often a secret itself (S13)."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"
