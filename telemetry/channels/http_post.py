"""One POST of JSON under the rules for webhooks, and what every way that it can end means for a delivery."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from controlplane.egress import EgressDeniedError, ResponseTooLargeError, fetch, guarded_client, webhook_rules
from telemetry.channels.base import DeliveryError, Receipt

DEADLINE_S = 15.0
MAX_ANSWER_BYTES = 1 << 20
LONGEST_WAIT_S = 86_400.0  # of a Retry-After that we honour
KEPT_CHARACTERS = 200  # of an answer, for the log
WORTH_A_RETRY = {408, 425, 429}


def encoded(value: Any) -> bytes:
    """Compact JSON in UTF-8."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def open_client() -> httpx.Client:
    """A client that carries the rules, follows no redirect and uses no proxy; close it."""
    return guarded_client(webhook_rules())


def post(http: httpx.Client, url: str, body: bytes, *, now: datetime, headers: Mapping[str, str]) -> Receipt:
    """POST once; DeliveryError, retryable on timeouts, 408, 425, 429 and 5xx; never names the URL."""
    try:
        answer = fetch(
            http,
            "POST",
            url,
            deadline_s=DEADLINE_S,
            max_bytes=MAX_ANSWER_BYTES,
            content=body,
            headers={"content-type": "application/json", **headers},
        )
    except httpx.HTTPError as error:
        raise _unreached(error) from None  # its text may name the URL
    said = beginning(answer.body)
    if not 200 <= answer.status < 300:
        raise _refused(answer.status, said, answer.headers.get("retry-after"), now)
    return Receipt(answer.status, said)


def beginning(body: bytes) -> str:
    """The first printable characters of an answer, on one line."""
    line = " ".join(body[: 8 * KEPT_CHARACTERS].decode("utf-8", "replace").split())
    return "".join(character for character in line if character.isprintable())[:KEPT_CHARACTERS]


def _unreached(error: httpx.HTTPError) -> DeliveryError:
    if isinstance(error, EgressDeniedError):
        return DeliveryError("its address is one that channels may not reach", retryable=False)
    if isinstance(error, ResponseTooLargeError):
        return DeliveryError("the answer was too long or packed", retryable=False)
    if isinstance(error, httpx.TimeoutException):
        return DeliveryError(f"no answer within {DEADLINE_S:g} s", retryable=True)
    if isinstance(error, httpx.ConnectError):
        return DeliveryError("it cannot be reached", retryable=True)
    if isinstance(error, httpx.UnsupportedProtocol):
        return DeliveryError("its URL cannot be used", retryable=False)
    return DeliveryError(f"the exchange failed ({type(error).__name__})", retryable=True)


def _refused(status: int, said: str, retry_after: str | None, now: datetime) -> DeliveryError:
    retryable = status in WORTH_A_RETRY or status >= 500
    reason = "it redirects, which is not followed" if 300 <= status < 400 else f"it answered with status {status}"
    wait_s = _seconds(retry_after, now) if retryable else None
    gone = status == 410
    return DeliveryError(reason, retryable=retryable, status=status, answer=said, retry_after_s=wait_s, gone=gone)


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
