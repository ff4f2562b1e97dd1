"""Connects only to addresses that the rules allow: transports for httpx, and sockets for other protocols.

Theory of operation. httpx's connection pool asks a network backend to connect to a host. Our backend resolves the host
once, checks every address, and gives the stock backend a bare address, so that nothing is resolved again between the
check and the connection. The pool still identifies a connection by host name, and TLS verifies that name.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextvars import ContextVar
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import httpcore
import httpx

from controlplane.egress.addresses import Rules

Resolver = Callable[[str, int], list[str]]

# The system resolver has no deadline, so it runs in threads, and callers stop waiting at their own deadline.
_resolver_threads = ThreadPoolExecutor(max_workers=32, thread_name_prefix="resolve")
deadline: ContextVar[float | None] = ContextVar("deadline", default=None)  # of a request, by time.monotonic()


class EgressDeniedError(httpx.ConnectError):
    """The host has an address that the rules deny."""


def resolve(host: str, port: int) -> list[str]:
    """All addresses of a host, in the system's order; OSError or UnicodeError if there is none."""
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def literal_addresses(host: str) -> list[str]:
    """The address that a literal host denotes, in any form the system accepts (0x7f000001, 127.1); [] for a name."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return []
    return [str(entry[4][0]).partition("%")[0] for entry in entries]


def literal_denial(url: str, rules: Rules) -> str | None:
    """Why the address written in a URL is denied; None if it is allowed, and for a name, which is checked later."""
    reasons = map(rules.denial_reason, literal_addresses(urlsplit(url).hostname or ""))
    return next(filter(None, reasons), None)


def check_addresses(host: str, addresses: Iterable[str], rules: Rules, port: int | None = None) -> list[str]:
    """The addresses if all are allowed at this port; EgressDeniedError otherwise."""
    addresses = list(addresses)
    for address in addresses:
        if reason := rules.denial_reason(address.partition("%")[0], port):
            raise EgressDeniedError(f"{host} is not an allowed destination: {reason}")
    if not addresses:
        raise httpcore.ConnectError(f"{host} has no address")
    return addresses


def remaining_timeout(timeout: float | None) -> float | None:
    """The timeout in seconds, at most the time until the deadline; ReadTimeout after the deadline."""
    ends_at_s = deadline.get()
    if ends_at_s is None:
        return timeout
    left_s = ends_at_s - time.monotonic()
    if left_s <= 0:
        raise httpcore.ReadTimeout("the request exceeded its deadline")
    return left_s if timeout is None else min(timeout, left_s)


class GuardedTransport(httpx.HTTPTransport):
    """httpx's transport with our network backend."""

    def __init__(
        self, rules: Rules, resolver: Resolver, limits: httpx.Limits, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(verify=system_tls(), trust_env=False)
        self._pool = httpcore.ConnectionPool(
            ssl_context=tls or tls_context(rules.authorities),
            max_connections=limits.max_connections,
            max_keepalive_connections=limits.max_keepalive_connections,
            keepalive_expiry=limits.keepalive_expiry,
            network_backend=GuardedBackend(rules, resolver),
        )


class GuardedAsyncTransport(httpx.AsyncHTTPTransport):
    """httpx's asyncio transport with our network backend and a new connection for each request.

    Its callers send one request to each of hundreds of hosts: a pool would scan all its connections for every request
    and response, and vLLM closes connections that are idle for 5 s anyway.
    """

    def __init__(self, rules: Rules, resolver: Resolver) -> None:
        super().__init__(verify=system_tls(), trust_env=False)
        self._pool = _ConnectionPerRequest(rules, resolver)


class _ConnectionPerRequest(httpcore.AsyncConnectionPool):
    """Replaces the pool: opens a connection for one request, and closes it with the response."""

    def __init__(self, rules: Rules, resolver: Resolver) -> None:
        super().__init__()
        self.backend, self.tls = GuardedAsyncBackend(rules, resolver), tls_context(rules.authorities)

    async def handle_async_request(self, request: httpcore.Request) -> httpcore.Response:
        if request.url.scheme not in {b"http", b"https"}:
            raise httpcore.UnsupportedProtocol("only http and https are supported")
        headers = [(name, value) for name, value in request.headers if name.lower() != b"connection"]
        request.headers = [*headers, (b"Connection", b"close")]
        connection = httpcore.AsyncHTTPConnection(
            request.url.origin, ssl_context=self.tls, network_backend=self.backend, keepalive_expiry=0
        )
        try:
            return await connection.handle_async_request(request)
        except BaseException:
            await connection.aclose()
            raise


class GuardedBackend(httpcore.NetworkBackend):
    """Resolves a host once, checks every address, and connects to one of them."""

    def __init__(self, rules: Rules, resolver: Resolver) -> None:
        self.rules = rules
        self.resolver = resolver
        self.inner = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore.NetworkStream:
        """Connect to the first address that accepts."""
        try:
            addresses = resolve_in_thread(self.resolver, host, port).result(remaining_timeout(timeout))
        except FutureTimeoutError:
            raise httpcore.ConnectTimeout(f"resolving {host} took too long") from None
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"{host} cannot be resolved: {error}") from None
        failure: Exception = httpcore.ConnectError(host)
        for address in check_addresses(host, addresses, self.rules, port):
            try:
                stream = self.inner.connect_tcp(
                    address, port, remaining_timeout(timeout), local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
            else:
                return DeadlineStream(stream)
        raise failure


class GuardedAsyncBackend(httpcore.AsyncNetworkBackend):
    """``GuardedBackend`` for asyncio; the caller's ``asyncio.timeout`` is the deadline."""

    def __init__(self, rules: Rules, resolver: Resolver) -> None:
        self.rules = rules
        self.resolver = resolver
        self.inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the signature is httpcore's
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first address that accepts."""
        try:
            addresses = await asyncio.wait_for(
                asyncio.wrap_future(resolve_in_thread(self.resolver, host, port)), timeout
            )
        except TimeoutError:
            raise httpcore.ConnectTimeout(f"resolving {host} took too long") from None
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"{host} cannot be resolved: {error}") from None
        failure: Exception = httpcore.ConnectError(host)
        for address in check_addresses(host, addresses, self.rules, port):
            try:
                return await self.inner.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure


class DeadlineStream(httpcore.NetworkStream):
    """A connection on which every wait ends with the request's deadline, so that trickled bytes cannot extend it."""

    def __init__(self, inner: httpcore.NetworkStream) -> None:
        self.inner = inner

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self.inner.read(max_bytes, remaining_timeout(timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self.inner.write(buffer, remaining_timeout(timeout))

    def close(self) -> None:
        self.inner.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return DeadlineStream(self.inner.start_tls(ssl_context, server_hostname, remaining_timeout(timeout)))

    def get_extra_info(self, info: str) -> Any:
        return self.inner.get_extra_info(info)


def resolve_in_thread(resolver: Resolver, host: str, port: int) -> Future[list[str]]:
    """Resolve a host in a background thread."""
    return _resolver_threads.submit(resolver, host, port)


def system_tls() -> ssl.SSLContext:
    """A context with the system's certificate authorities, or those of ``SSL_CERT_FILE`` and ``SSL_CERT_DIR``."""
    return tls_context(None)


@cache
def tls_context(authorities: str | None) -> ssl.SSLContext:
    """``system_tls`` plus the authorities of a PEM file; cached, because loading hundreds is slow."""
    context = httpx.create_ssl_context(trust_env=True)
    if authorities is not None:
        context.load_verify_locations(cafile=authorities)
    return context


def guarded_socket(
    host: str, port: int, rules: Rules, *, timeout_s: float, resolver: Resolver = resolve
) -> socket.socket:
    """A socket connected to a checked address of the host within ``timeout_s``.

    EgressDeniedError if the rules deny one of its addresses, OSError for every other failure.
    """
    token = deadline.set(time.monotonic() + timeout_s)
    try:
        stream = GuardedBackend(rules, resolver).connect_tcp(host, port)
    except httpcore.TimeoutException as error:
        raise TimeoutError(str(error)) from None
    except httpcore.ConnectError as error:
        raise OSError(str(error)) from None
    finally:
        deadline.reset(token)
    connection: socket.socket = stream.get_extra_info("socket")
    connection.settimeout(timeout_s)
    return connection
