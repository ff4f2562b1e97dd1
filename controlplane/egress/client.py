"""Clients that carry the rules, and requests with an end: in seconds and in bytes.

The same way out for libraries that make their requests with ``requests``.
"""

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


class GuardedAdapter(BaseAdapter):
    """Sends what a requests.Session prepared, under the rules; a requests.ConnectionError for every way to fail."""

    def __init__(self, rules: Rules, *, deadline_s: float, max_bytes: int) -> None:
        super().__init__()
        self.rules, self.deadline_s, self.max_bytes = rules, deadline_s, max_bytes

    def send(self, request: requests.PreparedRequest, *_: Any, **__: Any) -> requests.Response:
        """One request; a redirect is a failure, as nobody checked where it leads."""
        body = request.body.encode() if isinstance(request.body, str) else request.body
        if body is not None and not isinstance(body, bytes):
            raise requests.ConnectionError("only a body that is there as a whole can be sent", request=request)
        try:
            with guarded_client(self.rules) as client:
                answer = fetch(
                    client,
                    str(request.method),
                    str(request.url),
                    deadline_s=self.deadline_s,
                    max_bytes=self.max_bytes,
                    content=body,
                    headers=_own_headers(request),
                )
        except httpx.HTTPError as error:
            raise requests.ConnectionError(str(error), request=request) from None
        if 300 <= answer.status < 400:
            raise requests.ConnectionError("it redirects, which is not followed", request=request)
        return _response(request, answer)

    def close(self) -> None:
        """Nothing is kept open."""


def guarded_session(rules: Rules, *, deadline_s: float = 5.0, max_bytes: int = 1 << 20) -> requests.Session:
    """A session whose every request goes out under the rules, and takes no proxy or password from the environment."""
    session = requests.Session()
    session.trust_env = False
    for scheme in ("https://", "http://"):
        session.mount(scheme, GuardedAdapter(rules, deadline_s=deadline_s, max_bytes=max_bytes))
    return session


def _own_headers(request: requests.PreparedRequest) -> dict[str, str]:
    """What the caller set, without what is the connection's."""
    theirs = {"accept-encoding", "connection", "user-agent", "content-length"}
    return {str(name): str(value) for name, value in request.headers.items() if name.lower() not in theirs}


def _response(request: requests.PreparedRequest, answer: Answer) -> requests.Response:
    response = requests.Response()
    response.status_code, response.url, response.request = answer.status, str(request.url), request
    response.headers = requests.structures.CaseInsensitiveDict(answer.headers.items())
    response._content = answer.body  # noqa: SLF001 - where requests keeps a body that was read
    response.encoding = "utf-8"
    return response
