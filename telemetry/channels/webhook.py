"""Channel that POSTs each alert as JSON to a URL, signed as Standard Webhooks specifies.

A signature is ``v1,`` + base64 of HMAC-SHA256 over ``id.timestamp.body``. Source: the specification at
github.com/standard-webhooks/standard-webhooks, version 1.0.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from django.conf import settings

from controlplane.services.checks import origin_of
from telemetry.channels.base import ChannelKind, Config, DeliveryError, Field, Message, Receipt, origin, url
from telemetry.channels.http_post import open_client, post, to_json

PREFIX = "whsec_"
MIN_BYTES, MAX_BYTES = 24, 64  # of a secret
MAX_BODY_BYTES = 20_000
_OPTIONAL = ("detail", "causes")  # of an alert: left out of a body that is too long


def new_secret() -> str:
    """A random secret of 32 bytes, in the form that libraries for receivers accept."""
    return PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def secret_bytes(secret: str) -> bytes:
    """The key of ``whsec_<base64>``; ValueError for another form or length."""
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except binascii.Error:
        raise ValueError("expected whsec_ and base64") from None
    if not MIN_BYTES <= len(key) <= MAX_BYTES:
        raise ValueError(f"expected {MIN_BYTES} to {MAX_BYTES} bytes in base64")
    return key


def _checked_secret(value: object) -> str:
    secret_bytes(str(value))
    return str(value)


def signature(keys: Iterable[bytes], message_id: str, timestamp_s: int, body: bytes) -> str:
    """The header's value: one signature per key, so that a secret can be rotated without losing a message."""
    signed = f"{message_id}.{timestamp_s}.".encode() + body
    digests = (hmac.new(key, signed, hashlib.sha256).digest() for key in keys)
    return " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests)


def _send(config: Config, message: Message) -> Receipt:
    payload = {**message.payload, "data": _with_urls(message.data, settings.PUBLIC_URL)}
    body = next((body for body in _bodies(payload) if len(body) <= MAX_BODY_BYTES), None)
    if body is None:
        raise DeliveryError(f"the message is longer than {MAX_BODY_BYTES} bytes", retryable=False)
    keys = [secret_bytes(config[name]) for name in ("secret", "previous_secret") if name in config]
    timestamp_s = int(message.at.timestamp())
    headers = {
        "webhook-id": message.id,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": signature(keys, message.id, timestamp_s, body),
    }
    with open_client() as http:
        return post(http, config["url"], body, now=message.at, headers=headers)


def _with_urls(data: Mapping[str, Any], site: str) -> dict[str, Any]:
    """The data of a message, or one of its alerts, with URLs for the paths of ``links``; unchanged without a site."""
    changes: dict[str, Any] = {}
    if site and "links" in data:
        changes["links"] = {
            name: f"{site}{path}" if path.startswith("/") else path for name, path in data["links"].items()
        }
    if "alerts" in data:
        changes["alerts"] = [_with_urls(alert, site) for alert in data["alerts"]]
    return {**data, **changes}


def _bodies(payload: Mapping[str, Any]) -> Iterator[bytes]:
    """The body, then without optional parts in each of several alerts, then without them anywhere."""
    yield to_json(payload)
    data = dict(payload["data"])
    if "alerts" in data:
        data["alerts"] = [_without_optional(alert) for alert in data["alerts"]]
        yield to_json({**payload, "data": data})
    yield to_json({**payload, "data": _without_optional(data)})


def _without_optional(alert: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in alert.items() if name not in _OPTIONAL}


WEBHOOK = ChannelKind(
    "webhook",
    "Webhook",
    "POSTs each alert as JSON to a URL, signed as Standard Webhooks specifies.",
    (
        Field("url", "URL", "URL that receives the JSON, https://host/path.", url, required=True, secret=True),
        Field(
            "secret",
            "Signing secret",
            "whsec_ and 24 to 64 bytes in base64. If empty, one is generated and shown once.",
            _checked_secret,
            secret=True,
            make=new_secret,
        ),
        Field(
            "previous_secret",
            "Previous secret",
            "Signs in addition to the signing secret until receivers use the new one.",
            _checked_secret,
            secret=True,
        ),
    ),
    _send,
    lambda config: f"{origin(config['url'])}/...",
    lambda config: origin_of(config["url"]),
)
