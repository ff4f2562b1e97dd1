"""Clients that carry the rules, and requests with an end: in seconds and in bytes."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass

import httpx

from .addresses import Rules
from .transport import GuardedAsyncTransport, GuardedTransport, Resolver, deadline, resolve

CONNECT_TIMEOUT_S = 2.0
# Asked for as is: an answer that unpacks to a thousand times its size would be in memory before it could be refused.
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "warmpath"}


class AnswerTooLargeError(httpx.ReadError):
    """The answer is longer than it may be, or packed although that was not asked for."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, whatever its status; redirects are answers too."""

    status: int
    headers: httpx.Headers
    body: bytes


def guarded_client(
    rules: Rules,
    *,
    resolver: Resolver = resolve,
    limits: httpx.Limits | None = None,
    tls: ssl.SSLContext | None = None,
) -> httpx.Client:
    """A client for threads; close it, or use it in a ``with``. Requests are made by ``fetch``.

    ``tls`` says which authorities are believed; without it, those of the system.
    """
    transport = GuardedTransport(rules, resolver, limits or httpx.Limits(), tls)
    return httpx.Client(transport=transport, trust_env=False, follow_redirects=False, headers=_HEADERS)


def guarded_async_client(rules: Rules, *, resolver: Resolver = resolve) -> httpx.AsyncClient:
    """The same for asyncio, for ``fetch_async``; it keeps no connection."""
    transport = GuardedAsyncTransport(rules, resolver)
    return httpx.AsyncClient(transport=transport, trust_env=False, follow_redirects=False, headers=_HEADERS)


def fetch(
    client: httpx.Client,
    method: str,
    url: str,
    *,
    deadline_s: float,
    max_bytes: int,
    content: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """One request, over within ``deadline_s`` whatever the other side does.

    An httpx.HTTPError for every way that it can fail, EgressRefusedError and AnswerTooLargeError among them.
    """
    mark = deadline.set(time.monotonic() + deadline_s)
    try:
        with client.stream(method, url, content=content, headers=headers, timeout=_timeouts(deadline_s)) as response:
            _refuse_packed(response)
            body = bytearray()
            for chunk in response.iter_raw():
                body += chunk
                _refuse_long(body, max_bytes)
            return Answer(response.status_code, response.headers, bytes(body))
    except httpx.InvalidURL as error:
        raise httpx.UnsupportedProtocol(str(error)) from None
    finally:
        deadline.reset(mark)


async def fetch_async(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    *,
    deadline_s: float,
    max_bytes: int,
    content: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """The same for asyncio."""
    try:
        asked = client.stream(method, url, content=content, headers=headers, timeout=_timeouts(deadline_s))
        async with asyncio.timeout(deadline_s), asked as response:
            _refuse_packed(response)
            body = bytearray()
            async for chunk in response.aiter_raw():
                body += chunk
                _refuse_long(body, max_bytes)
            return Answer(response.status_code, response.headers, bytes(body))
    except httpx.InvalidURL as error:
        raise httpx.UnsupportedProtocol(str(error)) from None
    except TimeoutError:
        raise httpx.ReadTimeout("the whole request took too long") from None


def _timeouts(deadline_s: float) -> httpx.Timeout:
    return httpx.Timeout(deadline_s, connect=min(CONNECT_TIMEOUT_S, deadline_s))


def _refuse_packed(response: httpx.Response) -> None:
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise AnswerTooLargeError("the answer is packed, which was not asked for")


def _refuse_long(body: bytearray, max_bytes: int) -> None:
    if len(body) > max_bytes:
        raise AnswerTooLargeError(f"the answer is longer than {max_bytes} bytes")
