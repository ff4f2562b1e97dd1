"""Standard Webhooks signatures: ``v1,`` + base64 of HMAC-SHA256 over ``id.timestamp.body``.

Source: the specification at github.com/standard-webhooks/standard-webhooks, version 1.0.

POST each alert as JSON to a URL of the user's choice, signed as Standard Webhooks says.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from controlplane.services.checks import origin_of
from telemetry.channels.base import ChannelKind, DeliveryError, Field, Message, Receipt, origin, url
from telemetry.channels.http_post import encoded, open_client, post

PREFIX = "whsec_"
FEWEST_BYTES, MOST_BYTES = 24, 64  # of a secret


def new_secret() -> str:
    """A fresh secret of 32 bytes, in the form that libraries for receivers take."""
    return PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def secret_bytes(secret: str) -> bytes:
    """The key of ``whsec_<base64>``; ValueError for another form or length."""
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except binascii.Error:
        raise ValueError("expected whsec_ and base64") from None
    if not FEWEST_BYTES <= len(key) <= MOST_BYTES:
        raise ValueError(f"expected {FEWEST_BYTES} to {MOST_BYTES} bytes in base64")
    return key


def checked_secret(given: object) -> str:
    """The secret as it is; ValueError for another form or length."""
    secret_bytes(str(given))
    return str(given)


def signature(keys: Iterable[bytes], message_id: str, timestamp_s: int, body: bytes) -> str:
    """The header's value: one signature per key, so that a secret can be changed without losing a message."""
    signed = f"{message_id}.{timestamp_s}.".encode() + body
    digests = (hmac.new(key, signed, hashlib.sha256).digest() for key in keys)
    return " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests)


MAX_BODY_BYTES = 20_000
_BULKY = ("detail", "causes")  # what an alert tells beyond its figures


@dataclass(frozen=True, slots=True)
class WebhookChannel:
    """One receiver. The second key signs too while a secret is being changed."""

    url: str
    keys: tuple[bytes, ...]
    http: httpx.Client

    def send(self, message: Message) -> Receipt:
        """Deliver once. DeliveryError."""
        body = next((body for body in _shorter_and_shorter(message.payload) if len(body) <= MAX_BODY_BYTES), None)
        if body is None:
            raise DeliveryError(f"the message is longer than {MAX_BODY_BYTES} bytes", retryable=False)
        return post(self.http, self.url, body, now=message.at, headers=self._headers(message, body))

    def close(self) -> None:
        """Close the connections."""
        self.http.close()

    def _headers(self, message: Message, body: bytes) -> dict[str, str]:
        timestamp_s = int(message.at.timestamp())
        return {
            "webhook-id": message.id,
            "webhook-timestamp": str(timestamp_s),
            "webhook-signature": signature(self.keys, message.id, timestamp_s, body),
        }


def _shorter_and_shorter(payload: Mapping[str, Any]) -> Iterator[bytes]:
    """The body, then without what is bulky in each of several alerts, then without it anywhere."""
    yield encoded(payload)
    data = dict(payload["data"])
    if "alerts" in data:
        data["alerts"] = [_without_bulk(alert) for alert in data["alerts"]]
        yield encoded({**payload, "data": data})
    yield encoded({**payload, "data": _without_bulk(data)})


def _without_bulk(alert: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in alert.items() if name not in _BULKY}


def open_webhook(config: Mapping[str, Any]) -> WebhookChannel:
    """The channel of a whole config, with connections of its own."""
    secrets = [config["secret"], *([config["previous_secret"]] if "previous_secret" in config else [])]
    return WebhookChannel(config["url"], tuple(map(secret_bytes, secrets)), open_client())


WEBHOOK = ChannelKind(
    "webhook",
    "Webhook",
    "Each alert as JSON to a URL of yours, signed as Standard Webhooks says.",
    (
        Field("url", "URL", "Where the JSON is sent, https://host/path.", url, required=True, secret=True),
        Field(
            "secret",
            "Signing secret",
            "whsec_ and 24 to 64 bytes in base64. Left empty, one is made and shown once.",
            checked_secret,
            secret=True,
            make=new_secret,
        ),
        Field(
            "previous_secret",
            "Previous secret",
            "Signs beside the signing secret while receivers change over.",
            checked_secret,
            secret=True,
        ),
    ),
    open_webhook,
    lambda config: f"{origin(config['url'])}/...",
    lambda config: origin_of(config["url"]),
)
