"""POST each alert as JSON to a URL of the user's choice, signed as Standard Webhooks says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import httpx

from controlplane.egress import AnswerTooLargeError, EgressRefusedError, fetch, guarded_client, webhook_rules
from telemetry.channels.base import ChannelKind, ConfigError, DeliveryError, Message
from telemetry.channels.webhook.signature import new_secret, secret_bytes, signature

DEADLINE_S = 15.0
MAX_BODY_BYTES = 20_000
MAX_ANSWER_BYTES = 1 << 20
LONGEST_WAIT_S = 86_400.0  # of a Retry-After that we honour
FIELDS = ("url", "secret", "previous_secret")
WORTH_A_RETRY = {408, 425, 429}


@dataclass(frozen=True, slots=True)
class WebhookChannel:
    """One receiver. ``previous_secret`` signs too while a secret is being changed."""

    url: str
    keys: tuple[bytes, ...]
    http: httpx.Client  # guarded: it carries the egress rules, follows no redirect, uses no proxy

    def send(self, message: Message) -> int | None:
        """Deliver once; DeliveryError, retryable on timeouts, 408, 425, 429 and 5xx; never names the URL."""
        body = json.dumps(message.payload, separators=(",", ":"), ensure_ascii=False).encode()
        if len(body) > MAX_BODY_BYTES:
            raise DeliveryError(f"the message is longer than {MAX_BODY_BYTES} bytes", retryable=False)
        try:
            answer = fetch(
                self.http,
                "POST",
                self.url,
                deadline_s=DEADLINE_S,
                max_bytes=MAX_ANSWER_BYTES,
                content=body,
                headers=self._headers(message, body),
            )
        except httpx.HTTPError as error:
            raise _unreached(error) from None  # its text may name the URL
        if not 200 <= answer.status < 300:
            raise _refused(answer.status, answer.headers.get("retry-after"), message.at)
        return answer.status

    def close(self) -> None:
        """Close the connections."""
        self.http.close()

    def _headers(self, message: Message, body: bytes) -> dict[str, str]:
        timestamp_s = int(message.at.timestamp())
        return {
            "content-type": "application/json",
            "webhook-id": message.id,
            "webhook-timestamp": str(timestamp_s),
            "webhook-signature": signature(self.keys, message.id, timestamp_s, body),
        }


def _unreached(error: httpx.HTTPError) -> DeliveryError:
    if isinstance(error, EgressRefusedError):
        return DeliveryError("its address is one that webhooks may not reach", retryable=False)
    if isinstance(error, AnswerTooLargeError):
        return DeliveryError("the answer was too long or packed", retryable=False)
    if isinstance(error, httpx.TimeoutException):
        return DeliveryError(f"no answer within {DEADLINE_S:g} s", retryable=True)
    if isinstance(error, httpx.ConnectError):
        return DeliveryError("it cannot be reached", retryable=True)
    if isinstance(error, httpx.UnsupportedProtocol):
        return DeliveryError("its URL cannot be used", retryable=False)
    return DeliveryError(f"the exchange failed ({type(error).__name__})", retryable=True)


def _refused(status: int, retry_after: str | None, now: datetime) -> DeliveryError:
    retryable = status in WORTH_A_RETRY or status >= 500
    reason = "it redirects, which is not followed" if 300 <= status < 400 else f"it answered with status {status}"
    wait_s = _seconds(retry_after, now) if retryable else None
    return DeliveryError(reason, retryable=retryable, status=status, retry_after_s=wait_s, gone=status == 410)


def _seconds(retry_after: str | None, now: datetime) -> float | None:
    """Retry-After, which is seconds or a date; None for neither."""
    if retry_after is None:
        return None
    if retry_after.strip().isdecimal():
        return min(float(retry_after), LONGEST_WAIT_S)
    try:
        at = parsedate_to_datetime(retry_after)
    except ValueError:
        return None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return min(max((at - now).total_seconds(), 0.0), LONGEST_WAIT_S)


def complete(given: Mapping[str, Any]) -> dict[str, Any]:
    """A whole config: the URL is needed, a secret is made where none is given. ConfigError."""
    if unknown := sorted(set(given) - set(FIELDS)):
        raise ConfigError(unknown[0], f"there is no such field; there are {', '.join(FIELDS)}")
    config: dict[str, Any] = {"url": _checked_url(given.get("url")), "secret": given.get("secret") or new_secret()}
    if given.get("previous_secret"):
        config["previous_secret"] = given["previous_secret"]
    for field in ("secret", "previous_secret"):
        _check_secret(field, config.get(field))
    return config


def _check_secret(field: str, secret: object) -> None:
    if secret is None:
        return
    try:
        secret_bytes(str(secret))
    except ValueError as error:
        raise ConfigError(field, str(error)) from None


def _checked_url(url: object) -> str:
    expected = "expected https://host/path or http://host/path"
    if not isinstance(url, str) or len(url) > 2048 or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError("url", expected)
    try:
        parts = urlsplit(url)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.username is not None:
        raise ConfigError("url", expected)
    return url


def public(config: Mapping[str, Any]) -> dict[str, Any]:
    """What may be shown: the host. The path of a webhook's URL is often a secret itself (S13)."""
    parts = urlsplit(config["url"])
    return {"host": parts.hostname, "scheme": parts.scheme, "rotating": "previous_secret" in config}


def open_webhook(config: Mapping[str, Any]) -> WebhookChannel:
    """The channel of a whole config, with connections of its own."""
    secrets = [config["secret"], *([config["previous_secret"]] if "previous_secret" in config else [])]
    return WebhookChannel(config["url"], tuple(map(secret_bytes, secrets)), guarded_client(webhook_rules()))


WEBHOOK = ChannelKind("webhook", "Webhook", complete, public, open_webhook)
