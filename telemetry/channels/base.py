"""The interface of a kind of channel: its settings, the message that it delivers, and receipts and errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from secrets import token_hex
from typing import Any
from urllib.parse import unquote, urlsplit

from telemetry.models import Topic

HOST = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?\Z|\[[0-9A-Fa-f:.]+\]\Z|[0-9A-Fa-f:.]+\Z")
ADDRESS = re.compile(r"[^@\s<>,;\"\\]{1,64}@[A-Za-z0-9.-]{1,253}\Z")
MAX_ADDRESSES = 50
MIN_TOKEN = 12  # characters of a part of a URL or a header that is removed from logs
_SEPARATORS = re.compile(r"[\s/?&=:]+")
_HEADER_VALUE = re.compile(r"^[^\s:]+: ((?:.* )?(\S+))$", re.MULTILINE)  # the whole one, and without a scheme
Config = Mapping[str, Any]


class ConfigError(ValueError):
    """An invalid config; ``field`` names the invalid setting."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Field:
    """One setting. ``read`` checks and converts a value; ValueError says what was expected."""

    name: str
    label: str
    help: str
    read: Callable[[Any], Any]
    required: bool = False
    secret: bool = False  # encrypted, and never shown again
    default: Any = None
    make: Callable[[], Any] | None = None  # generates a missing value
    choices: tuple[tuple[str, str], ...] = ()
    rows: int = 1  # of its input on pages; with several, the value may have several lines

    def complete(self, value: Any) -> Any:
        """The value to store, None for none. ConfigError."""
        if value is None or value in ("", []):
            if self.required:
                raise ConfigError(self.name, "this is required")
            return self.make() if self.make is not None else self.default
        try:
            return self.read(value)
        except ValueError as error:
            raise ConfigError(self.name, str(error)) from None


def text(limit: int) -> Callable[[Any], str]:
    """A line of printable ASCII, such as a name or a password."""

    def read(value: Any) -> str:
        if not isinstance(value, str) or len(value) > limit or not value.isascii() or not value.isprintable():
            raise ValueError(f"expected up to {limit} printable ASCII characters")
        return value

    return read


def url(value: Any) -> str:
    """An HTTP URL without credentials."""
    expected = "expected https://host/path or http://host/path"
    if not isinstance(value, str) or len(value) > 2048 or not value.isascii() or not value.isprintable():
        raise ValueError(expected)
    try:
        parts = urlsplit(value)
        is_valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid or " " in value or parts.username is not None:
        raise ValueError(expected)
    return value


def host(value: Any) -> str:
    if not isinstance(value, str) or not HOST.match(value):
        raise ValueError("expected a host name or an IP address, without a port")
    return value.strip("[]")


def port(value: Any) -> int:
    """A port, as a number or as text."""
    number = int(value) if isinstance(value, str) and value.strip().isdecimal() else value
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= 65_535:
        raise ValueError("expected a port, 1 to 65535")
    return number


def one_of(*names: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in names:
            raise ValueError(f"expected one of {', '.join(names)}")
        return str(value)

    return read


def address(value: Any) -> str:
    """One e-mail address, without a display name."""
    if not isinstance(value, str) or not value.isascii() or not ADDRESS.match(value.strip()):
        raise ValueError("expected an address such as on-call@example.org")
    return value.strip()


def addresses(value: Any) -> list[str]:
    """E-mail addresses, as a list or separated by commas or newlines."""
    items = re.split(r"[,\n]", value) if isinstance(value, str) else value
    if not isinstance(items, list) or not 1 <= len(items) <= MAX_ADDRESSES:
        raise ValueError(f"expected 1 to {MAX_ADDRESSES} addresses")
    return list(dict.fromkeys(address(item) for item in items if not isinstance(item, str) or item.strip()))


def source_field(things: str, ended: str) -> Field:
    """The name of this installation in the keys of what it opens elsewhere, such as incidents that are resolved."""
    return Field(
        "source",
        "Source",
        f"Source of the {things}; distinguishes them from those of another installation. Generated if empty. After a "
        f"change, open {things} must be {ended} by hand.",
        text(100),
        make=lambda: f"warmpath-{token_hex(4)}",
    )


class DeliveryError(Exception):
    """A failed delivery. The text is for people and contains no URL and no secret."""

    def __init__(
        self,
        reason: str,
        *,
        retryable: bool,
        status: int | None = None,
        response: str = "",
        retry_after_s: float | None = None,
        gone: bool = False,
    ) -> None:
        super().__init__(reason)
        self.retryable = retryable
        self.status = status  # of the response, if there was one
        self.response = response  # the beginning of its text
        self.retry_after_s = retry_after_s  # of the response
        self.gone = gone  # the receiver wants no more messages: the channel is disabled


@dataclass(frozen=True, slots=True)
class Receipt:
    """The receiver's response to a delivered message."""

    status: int | None = None  # of HTTP or SMTP
    response: str = ""  # the beginning of its text


@dataclass(frozen=True, slots=True)
class Message:
    """A message to deliver. ``id`` is the same at every attempt, so that a receiver can drop a duplicate."""

    id: str
    at: datetime  # of this attempt
    payload: Mapping[str, Any]  # {"type", "timestamp", "data"}: channels/README.md

    @property
    def data(self) -> Mapping[str, Any]:
        data: Mapping[str, Any] = self.payload["data"]
        return data

    @property
    def state(self) -> str:
        """``firing``, ``repeated``, ``acknowledged``, ``resolved``; else the kind of message, such as ``test``."""
        return str(self.data.get("state", "notice"))

    @property
    def alerts(self) -> Sequence[Mapping[str, Any]]:
        """The alerts in the message; none in other messages."""
        alerts = self.data.get("alerts")
        if alerts is not None:
            return [dict(alert) for alert in alerts]
        return [self.data] if self.data.get("alert") is not None else []


@dataclass(frozen=True, slots=True)
class ChannelKind:
    """A kind of channel. Forms, REST and documents are derived from ``fields``."""

    name: str
    label: str
    about: str  # one sentence
    fields: Sequence[Field]
    send: Callable[[Config, Message], Receipt]  # delivers once; DeliveryError
    target: Callable[[Config], str]  # where a config sends to, without secrets
    destination: Callable[[Config], str]  # canonical address that its secrets may be sent to
    topics: tuple[str, ...] = tuple(Topic)  # what it can send besides alerts without opening an incident
    check: Callable[[Config], None] = field(default=lambda _: None)  # of fields in combination; ConfigError
    # Sends firing alerts again, to receivers that forget alerts which are not repeated. None: not needed
    resend: Callable[[Config, Sequence[Mapping[str, Any]], datetime], None] | None = None
    preview: Callable[[Config], str] | None = None  # what a config sends for an example; ConfigError

    def complete(self, values: Config) -> dict[str, Any]:
        """A complete config of some values; ConfigError."""
        names = [field.name for field in self.fields]
        if unknown := sorted(set(values) - set(names)):
            raise ConfigError(unknown[0], f"unknown field; expected one of {', '.join(names)}")
        completed = {field.name: field.complete(values.get(field.name)) for field in self.fields}
        config = {name: value for name, value in completed.items() if value is not None}
        self.check(config)
        return config

    def public(self, config: Config) -> dict[str, Any]:
        """A config without its secrets, and the names of the secrets that are set."""
        shown = {field.name: config[field.name] for field in self.fields if not field.secret and field.name in config}
        hidden = [field.name for field in self.fields if field.secret and field.name in config]
        return {"target": self.target(config), **shown, "secrets": hidden}

    def secrets(self, config: Config) -> list[str]:
        """Texts to remove from logs, the longest first: also the path of a URL, its tokens, and values of headers."""
        secrets = [str(config[field.name]) for field in self.fields if field.secret and field.name in config]
        values = [text[len(origin(text)) :] if text.startswith(("http://", "https://")) else text for text in secrets]
        parts = [part for value in values for part in _SEPARATORS.split(value) if len(part) >= MIN_TOKEN]
        headers = [
            value for text in secrets for whole_and_end in _HEADER_VALUE.findall(text) for value in whole_and_end
        ]
        shown = [form for text in [*values, *headers, *parts] for form in (text, unquote(text)) if len(form) > 1]
        return sorted({*secrets, *shown}, key=len, reverse=True)


def origin(url: str) -> str:
    """Scheme and host of a URL: its path is often a secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"
