"""POSTs JSON under the egress rules for webhooks, and maps every outcome to a receipt or a DeliveryError."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import MappingProxyType
from typing import Any

import httpx

from controlplane.egress import EgressDeniedError, ResponseTooLargeError, fetch, guarded_client, webhook_rules
from telemetry.channels.base import DeliveryError, Receipt

DEADLINE_S = 15.0
MAX_MESSAGE_S = 25.0  # until the last request of a message is sent; with two deadlines less than the outbox's lease
EMPTY: Mapping[str, str] = MappingProxyType({})
MAX_RESPONSE_BYTES = 1 << 20
MAX_RETRY_AFTER_S = 86_400.0
BEGINNING_BYTES = 1600  # of a response; the log has fewer, cut after secrets were removed
NOTHING = r"(?!)"  # matches nothing
RETRYABLE = {408, 425, 429}
_SECONDS = re.compile(r"\d+(\.\d+)?", re.ASCII)
_RETRY_AFTER = re.compile(rf'"retry_after": ?({_SECONDS.pattern})', re.ASCII)  # in JSON, as Discord sends it


def to_json(value: Any) -> bytes:
    """Compact JSON in UTF-8."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def open_client() -> httpx.Client:
    """A client that enforces the rules, follows no redirect and uses no proxy; close it."""
    return guarded_client(webhook_rules())


def post(
    http: httpx.Client,
    url: str,
    body: bytes,
    *,
    now: datetime,
    headers: Mapping[str, str] = EMPTY,
    method: str = "POST",
    expect: str = "",
    reject: str = NOTHING,
) -> Receipt:
    """Send once; DeliveryError, retryable for timeouts, 408, 425, 429 and 5xx. It never names the URL.

    A response with status 2xx is a failure too, and retryable, if it lacks the text ``expect`` or matches ``reject``.
    """
    headers = {"content-type": "application/json", **headers}
    try:
        response = fetch(
            http, method, url, deadline_s=DEADLINE_S, max_bytes=MAX_RESPONSE_BYTES, content=body, headers=headers
        )
    except httpx.HTTPError as error:
        raise _connection_error(error) from None  # its text may name the URL
    text = beginning(response.body)
    if not 200 <= response.status < 300:
        raise _status_error(response.status, text, response.headers.get("retry-after"), now)
    whole = response.body.decode("utf-8", "replace")
    if expect not in whole or re.search(reject, whole):
        reason = f"the response lacks {expect}" if expect not in whole else "the response is an error"
        raise DeliveryError(reason, retryable=True, status=response.status, response=text)
    return Receipt(response.status, text)


def post_each(
    requests: Iterable[tuple[str, Any]], *, now: datetime, headers: Mapping[str, str] = EMPTY, expect: str = ""
) -> Receipt:
    """POST (URL, JSON) one after the other; the last receipt. A retry sends all of them again."""
    receipt, ends_s = Receipt(), time.monotonic() + MAX_MESSAGE_S
    with open_client() as http:
        for url, value in requests:
            if time.monotonic() > ends_s:
                raise DeliveryError("timed out before all alerts of this message were sent", retryable=True)
            receipt = post(http, url, to_json(value), now=now, headers=headers, expect=expect)
    return receipt


def beginning(body: bytes) -> str:
    """The first printable characters of a response, on one line."""
    line = " ".join(body[:BEGINNING_BYTES].decode("utf-8", "replace").split())
    return "".join(character for character in line if character.isprintable())


_CONNECTION_ERRORS = (  # exception, reason, whether to retry; the first that matches
    (EgressDeniedError, "its address is not allowed for channels", False),
    (ResponseTooLargeError, "the response was too long or compressed", False),
    (httpx.ConnectError, "connection failed", True),
    (httpx.UnsupportedProtocol, "its URL cannot be used", False),
)


def _connection_error(error: httpx.HTTPError) -> DeliveryError:
    if isinstance(error, httpx.TimeoutException):
        return DeliveryError(f"no response within {DEADLINE_S:g} s", retryable=True)
    for kind, reason, is_retryable in _CONNECTION_ERRORS:
        if isinstance(error, kind):
            return DeliveryError(reason, retryable=is_retryable)
    return DeliveryError(f"the request failed ({type(error).__name__})", retryable=True)


def _status_error(status: int, text: str, retry_after: str | None, now: datetime) -> DeliveryError:
    if retry_after is None and (match := _RETRY_AFTER.search(text)):
        retry_after = match[1]
    is_retryable = status in RETRYABLE or status >= 500
    reason = "it redirects, which is not followed" if 300 <= status < 400 else f"it responded with status {status}"
    return DeliveryError(
        reason,
        retryable=is_retryable,
        status=status,
        response=text,
        retry_after_s=_retry_after_s(retry_after, now) if is_retryable else None,
        gone=status == 410,
    )


def _retry_after_s(value: str | None, now: datetime) -> float | None:
    """A Retry-After header, which is seconds or a date; None for neither."""
    if value is None:
        return None
    if _SECONDS.fullmatch(value.strip()):
        return min(float(value), MAX_RETRY_AFTER_S)
    try:
        at = parsedate_to_datetime(value)
    except ValueError:
        return None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return min(max((at - now).total_seconds(), 0.0), MAX_RETRY_AFTER_S)
