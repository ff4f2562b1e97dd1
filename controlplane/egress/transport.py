"""Connecting to addresses that were checked, and to no others.

Theory of operation. httpx asks its connection pool, and the pool asks a network backend to connect to a host. Ours
resolves that host once, judges every address, and hands the stock backend a bare address, so that nothing is
resolved again between the check and the connection. The pool still knows the host by its name: a kept connection
is reused for that name alone, and TLS verifies that name.

The same way out for libraries that bring a protocol of their own and only need a connection.
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

import httpcore
import httpx

from controlplane.egress.addresses import Rules

Resolver = Callable[[str, int], list[str]]

# The system's resolver takes no deadline, so it waits in threads of its own, which nobody waits for.
_lookups = ThreadPoolExecutor(max_workers=32, thread_name_prefix="resolve")
deadline: ContextVar[float | None] = ContextVar("deadline", default=None)  # time.monotonic() at which a request ends


class EgressRefusedError(httpx.ConnectError):
    """The host has an address that requests of this purpose may not reach."""


def resolve(host: str, port: int) -> list[str]:
    """Every address of a host, in the system's order; OSError or UnicodeError when there is none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def written_addresses(host: str) -> list[str]:
    """The address that a host spells, in whichever form the system reads (0x7f000001, 127.1); [] for a name."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return []
    return [str(entry[4][0]).partition("%")[0] for entry in found]


def checked(host: str, addresses: Iterable[str], rules: Rules, port: int | None = None) -> list[str]:
    """The addresses, if every one of them is allowed at this port; EgressRefusedError otherwise."""
    addresses = list(addresses)
    for address in addresses:
        if reason := rules.refusal(address.partition("%")[0], port):
            raise EgressRefusedError(f"{host} may not be reached: {reason}")
    if not addresses:
        raise httpcore.ConnectError(f"{host} has no address")
    return addresses


def remaining(timeout: float | None) -> float | None:
    """A timeout in seconds, cut to what is left of the request; ReadTimeout when nothing is."""
    ends = deadline.get()
    if ends is None:
        return timeout
    left = ends - time.monotonic()
    if left <= 0:
        raise httpcore.ReadTimeout("the whole request took too long")
    return left if timeout is None else min(timeout, left)


class GuardedTransport(httpx.HTTPTransport):
    """httpx's transport, connecting only where the rules allow."""

    def __init__(
        self, rules: Rules, resolver: Resolver, limits: httpx.Limits, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(verify=system_tls(), trust_env=False)
        self._pool = httpcore.ConnectionPool(
            ssl_context=tls or verifying(rules.authorities),
            max_connections=limits.max_connections,
            max_keepalive_connections=limits.max_keepalive_connections,
            keepalive_expiry=limits.keepalive_expiry,
            network_backend=GuardedBackend(rules, resolver),
        )


class GuardedAsyncTransport(httpx.AsyncHTTPTransport):
    """The same for asyncio, a connection for each request.

    What asks here asks hundreds of hosts for one thing each: a pool goes through all its connections for every
    request and every answer. Nor would a kept connection live: vLLM closes one that is idle for 5 s.
    """

    def __init__(self, rules: Rules, resolver: Resolver) -> None:
        super().__init__(verify=system_tls(), trust_env=False)
        self._pool = _OneEach(rules, resolver)


class _OneEach(httpcore.AsyncConnectionPool):
    """In the place of a pool: connects, asks that this be the only request, and is rid of the connection after it."""

    def __init__(self, rules: Rules, resolver: Resolver) -> None:
        super().__init__()
        self.backend, self.tls = GuardedAsyncBackend(rules, resolver), verifying(rules.authorities)

    async def handle_async_request(self, request: httpcore.Request) -> httpcore.Response:
        """Answer one request; the connection goes when its answer is closed."""
        if request.url.scheme not in {b"http", b"https"}:
            raise httpcore.UnsupportedProtocol("only http and https are spoken")
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
    """Resolve once, check every address, connect to one of those."""

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
        """Connect to the first of the host's addresses that answers."""
        try:
            found = lookup(self.resolver, host, port).result(remaining(timeout))
        except FutureTimeoutError:
            raise httpcore.ConnectTimeout(f"resolving {host} took too long") from None
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"{host} cannot be resolved: {error}") from None
        failure: Exception = httpcore.ConnectError(host)
        for address in checked(host, found, self.rules, port):
            try:
                stream = self.inner.connect_tcp(address, port, remaining(timeout), local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
            else:
                return TimedStream(stream)
        raise failure


class GuardedAsyncBackend(httpcore.AsyncNetworkBackend):
    """The same for asyncio; the whole request's deadline is the caller's ``asyncio.timeout``."""

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
        """Connect to the first of the host's addresses that answers."""
        try:
            found = await asyncio.wait_for(asyncio.wrap_future(lookup(self.resolver, host, port)), timeout)
        except TimeoutError:
            raise httpcore.ConnectTimeout(f"resolving {host} took too long") from None
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"{host} cannot be resolved: {error}") from None
        failure: Exception = httpcore.ConnectError(host)
        for address in checked(host, found, self.rules, port):
            try:
                return await self.inner.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure


class TimedStream(httpcore.NetworkStream):
    """A connection whose every wait ends with the request's deadline, so that a trickle of bytes cannot outlast it."""

    def __init__(self, inner: httpcore.NetworkStream) -> None:
        self.inner = inner

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Some bytes; none at the end."""
        return self.inner.read(max_bytes, remaining(timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """All of the buffer."""
        self.inner.write(buffer, remaining(timeout))

    def close(self) -> None:
        """Close the connection."""
        self.inner.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        """The same connection with TLS on it."""
        return TimedStream(self.inner.start_tls(ssl_context, server_hostname, remaining(timeout)))

    def get_extra_info(self, info: str) -> Any:
        """What the pool asks of a socket, such as whether it is readable."""
        return self.inner.get_extra_info(info)


def lookup(resolver: Resolver, host: str, port: int) -> Future[list[str]]:
    """Every address of a host, found in a thread that nobody has to wait for."""
    return _lookups.submit(resolver, host, port)


def system_tls() -> ssl.SSLContext:
    """Verifies certificates; ``SSL_CERT_FILE`` and ``SSL_CERT_DIR`` may name authorities of the operator's own."""
    return verifying(None)


@cache
def verifying(authorities: str | None) -> ssl.SSLContext:
    """The same, with those of a file besides; read once, because a system has hundreds."""
    context = httpx.create_ssl_context(trust_env=True)
    if authorities is not None:
        context.load_verify_locations(cafile=authorities)
    return context


def guarded_socket(
    host: str, port: int, rules: Rules, *, timeout_s: float, resolver: Resolver = resolve
) -> socket.socket:
    """A connection to an address of the host that was checked, within ``timeout_s``.

    EgressRefusedError where any of its addresses is not allowed, OSError for every other way to fail.
    """
    ends = time.monotonic() + timeout_s
    try:
        found = checked(host, lookup(resolver, host, port).result(timeout_s), rules, port)
    except FutureTimeoutError:
        raise TimeoutError("resolving took too long") from None
    except UnicodeError:
        raise OSError("it cannot be resolved") from None
    except EgressRefusedError:
        raise
    except httpcore.ConnectError as error:
        raise OSError(str(error)) from None
    failure = OSError("no address")
    for address in found:
        try:
            return socket.create_connection((address, port), max(ends - time.monotonic(), 0.01))
        except OSError as error:
            failure = error
    raise failure
