"""HTTP clients that apply the egress rules, a deadline and a size limit: httpx (sync, asyncio) and ``requests``."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import requests
from requests.adapters import BaseAdapter

from controlplane.egress.addresses import Rules
from controlplane.egress.transport import GuardedAsyncTransport, GuardedTransport, Resolver, deadline, resolve

CONNECT_TIMEOUT_S = 2.0
# Identity only: a compressed body could expand to a thousand times its size before the limit applies.
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "warmpath"}
_CONNECTION_HEADERS = frozenset({"accept-encoding", "connection", "user-agent", "content-length"})


class ResponseTooLargeError(httpx.ReadError):
    """The response is over the limit, or compressed although identity was requested."""


@dataclass(frozen=True, slots=True)
class FetchedResponse:
    """A whole response of any status, redirects included."""

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
    """A client for threads, used with ``fetch``; the caller closes it. ``tls`` replaces the default authorities."""
    transport = GuardedTransport(rules, resolver, limits or httpx.Limits(), tls)
    return httpx.Client(transport=transport, trust_env=False, follow_redirects=False, headers=_HEADERS)


def guarded_async_client(rules: Rules, *, resolver: Resolver = resolve) -> httpx.AsyncClient:
    """A client for asyncio, used with ``fetch_async``; it keeps no connection open."""
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
) -> FetchedResponse:
    """Send one request and read the whole response; it ends within ``deadline_s``, whatever the peer does.

    Every failure is an httpx.HTTPError, EgressDeniedError and ResponseTooLargeError included.
    """
    token = deadline.set(time.monotonic() + deadline_s)
    try:
        with client.stream(method, url, content=content, headers=headers, timeout=_timeouts(deadline_s)) as response:
            _check_encoding(response)
            body = bytearray()
            for chunk in response.iter_raw():
                body += chunk
                _check_size(body, max_bytes)
            return FetchedResponse(response.status_code, response.headers, bytes(body))
    except httpx.InvalidURL as error:
        raise httpx.UnsupportedProtocol(str(error)) from None
    finally:
        deadline.reset(token)


async def fetch_async(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    *,
    deadline_s: float,
    max_bytes: int,
    content: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> FetchedResponse:
    """``fetch`` for asyncio."""
    try:
        stream = client.stream(method, url, content=content, headers=headers, timeout=_timeouts(deadline_s))
        async with asyncio.timeout(deadline_s), stream as response:
            _check_encoding(response)
            body = bytearray()
            async for chunk in response.aiter_raw():
                body += chunk
                _check_size(body, max_bytes)
            return FetchedResponse(response.status_code, response.headers, bytes(body))
    except httpx.InvalidURL as error:
        raise httpx.UnsupportedProtocol(str(error)) from None
    except TimeoutError:
        raise httpx.ReadTimeout("the request exceeded its deadline") from None


def _timeouts(deadline_s: float) -> httpx.Timeout:
    return httpx.Timeout(deadline_s, connect=min(CONNECT_TIMEOUT_S, deadline_s))


def _check_encoding(response: httpx.Response) -> None:
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise ResponseTooLargeError("the response is compressed, although identity was requested")


def _check_size(body: bytearray, max_bytes: int) -> None:
    if len(body) > max_bytes:
        raise ResponseTooLargeError(f"the response is longer than {max_bytes} bytes")


class GuardedAdapter(BaseAdapter):
    """Transport adapter of ``requests`` that applies the rules; every failure is a requests.ConnectionError."""

    def __init__(self, rules: Rules, *, deadline_s: float, max_bytes: int) -> None:
        super().__init__()
        self.rules, self.deadline_s, self.max_bytes = rules, deadline_s, max_bytes

    def send(self, request: requests.PreparedRequest, *_: Any, **__: Any) -> requests.Response:
        """Send one request; a redirect is a failure, because its target was not checked."""
        body = request.body.encode() if isinstance(request.body, str) else request.body
        if body is not None and not isinstance(body, bytes):
            raise requests.ConnectionError("streamed request bodies are not supported", request=request)
        headers = {k: str(v) for k, v in request.headers.items() if k.lower() not in _CONNECTION_HEADERS}
        limits: dict[str, Any] = {"deadline_s": self.deadline_s, "max_bytes": self.max_bytes}
        try:
            with guarded_client(self.rules) as client:
                fetched = fetch(client, str(request.method), str(request.url), content=body, headers=headers, **limits)
        except httpx.HTTPError as error:
            raise requests.ConnectionError(str(error), request=request) from None
        if 300 <= fetched.status < 400:
            raise requests.ConnectionError("redirects are not followed", request=request)
        response = requests.Response()
        response.status_code, response.url, response.request = fetched.status, str(request.url), request
        response.headers = requests.structures.CaseInsensitiveDict(fetched.headers.items())
        response._content = fetched.body  # noqa: SLF001 - where requests keeps a body that was read
        response.encoding = "utf-8"
        return response

    def close(self) -> None:
        """No connection stays open."""


def guarded_session(rules: Rules, *, deadline_s: float = 5.0, max_bytes: int = 1 << 20) -> requests.Session:
    """A session that applies the rules and takes no proxy or password from the environment."""
    session = requests.Session()
    session.trust_env = False
    for scheme in ("https://", "http://"):
        session.mount(scheme, GuardedAdapter(rules, deadline_s=deadline_s, max_bytes=max_bytes))
    return session
