"""What a channel is, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol


class ConfigError(ValueError):
    """A config that no channel of this kind can have; ``field`` names what is wrong with it."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class DeliveryError(Exception):
    """A message that did not arrive. The text is for people and names no URL and no secret."""

    def __init__(
        self,
        reason: str,
        *,
        retryable: bool,
        status: int | None = None,
        retry_after_s: float | None = None,
        gone: bool = False,
    ) -> None:
        super().__init__(reason)
        self.retryable = retryable
        self.status = status  # of the answer, where there was one
        self.retry_after_s = retry_after_s  # the receiver's wish
        self.gone = gone  # the receiver wants nothing any more: disable the channel


@dataclass(frozen=True, slots=True)
class Message:
    """What is delivered. ``id`` is the same at every attempt, so that a receiver can drop a duplicate."""

    id: str
    at: datetime  # of this attempt
    payload: Mapping[str, Any]


class Sender(Protocol):
    """An open channel. It knows nothing of retries: the outbox reads ``DeliveryError.retryable``."""

    def send(self, message: Message) -> int | None:
        """Deliver once; the receiver's status, None where there is no such thing. DeliveryError."""

    def close(self) -> None:
        """Let go of connections."""


@dataclass(frozen=True, slots=True)
class ChannelKind:
    """A kind of channel."""

    name: str
    label: str
    complete: Callable[[Mapping[str, Any]], dict[str, Any]]  # what a person gave -> a whole config; ConfigError
    public: Callable[[Mapping[str, Any]], dict[str, Any]]  # a config -> what may be shown of it
    open: Callable[[Mapping[str, Any]], Sender]
