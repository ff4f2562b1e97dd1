"""The address of one replica, the rules for connecting to it, and the pool of connections to it.

Theory of operation of permitted addresses. A host name is resolved for each new connection. All its addresses are
checked before the router connects to one of them by number, so that nothing is resolved again in between. A name with
one address that is not permitted is rejected. Reusing an idle connection costs no check.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
import ssl
from typing import Final
from urllib.parse import urlsplit

from routing.engines import IDLE_S, RANK_HEADER
from routing.http.loop import Deadlines, Timeout, WriteBuffer
from routing.http.request import Request
from routing.http.response import HeaderCache, ResponseHead
from routing.http.tls import describe_os_error
from routing.http.usage import Fingerprint
from routing.log import event
from routing.schema import AddressRules, ReplicaNetworks
from routing.upstream.connection import UpstreamCall, UpstreamConnection

logger = logging.getLogger(__name__)

KEEP_S: Final = IDLE_S - 1.0  # of an idle connection: the router closes it before the engine does
MAX_IDLE: Final = 512  # idle connections
USAGE_REJECTED_S: Final = 600.0  # before an engine that rejected a usage request gets another one

SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})


class Address:
    """The address of a replica, from its base URL, and the request heads that the replica gets.

    ``api_key``: sent to the replica in place of the client's credentials. ``hides_keys``: clients' keys are for this
    router and are not forwarded. ``tls``: used for an https URL. ``networks``: where the router may connect to.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        hides_keys: bool = False,
        tls: ssl.SSLContext | None = None,
        networks: ReplicaNetworks | None = None,
    ) -> None:
        self._identity = (url, api_key, hides_keys, tls, networks)
        self.rules = None if networks is None else AddressRules(networks)  # None: every address is permitted
        self.last_rejected = ""  # the resolved address that was logged last
        parts = urlsplit(url)
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.base = parts.path.rstrip("/").encode()
        self.host_header = parts.netloc.encode()
        self.ssl_context = tls
        self.authorization = b"Authorization: Bearer %b\r\n" % api_key.encode() if api_key else b""
        self.api_key = api_key
        self.hides_keys = hides_keys or api_key is not None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Address) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def head(self, request: Request, rank: int | None = None, *, body_bytes: int) -> bytes:
        """The head of a request for this replica, with the router's framing and request id. ``rank``: data-parallel."""
        head = request.head
        lines = head.lines_with(request.values, anonymous=self.hides_keys)
        if self.hides_keys:
            lines += self.authorization
        if rank is not None:
            lines_without_rank = [line for line in lines.splitlines(keepends=True) if not _is_rank(line)]
            lines = b"%b%b: %d\r\n" % (b"".join(lines_without_rank), RANK_HEADER, rank)
        length = b"Content-Length: %d\r\n" % body_bytes if body_bytes or head.method == b"POST" else b""
        return b"%b %b%b HTTP/1.1\r\nHost: %b\r\nAccept-Encoding: identity\r\n%bX-Request-Id: %b\r\n%b\r\n" % (
            head.method,
            self.base,
            head.target,
            self.host_header,
            lines,
            request.request_id.encode(),
            length,
        )


def _is_rank(line: bytes) -> bool:
    return line.partition(b":")[0].lower().replace(b"_", b"-") == RANK_HEADER.lower()


async def permitted_hosts(address: Address) -> list[str]:
    """The addresses to connect to, in order; the host itself if the configuration has no rules.

    PermissionError if an address is not permitted, OSError if there is none. A name is resolved once.
    """
    if address.rules is None:
        return [address.host]
    hosts = [address.host] if _is_ip(address.host) else await _resolve(address.host, address.port)
    for host in hosts:
        if reason := address.rules.rejection_reason(host):
            if address.last_rejected != host:  # logged once for each address
                address.last_rejected = host
                facts = {"host": address.host, "address": host, "reason": reason}
                event(logger, "replica_address_rejected", level=logging.WARNING, **facts)
            raise PermissionError(errno.EACCES, f"its address is not permitted: {reason}")
    address.last_rejected = ""
    return hosts


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def _resolve(host: str, port: int) -> list[str]:
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(info[4][0]) for info in infos))
    if not addresses:
        raise OSError(errno.ENOENT, "its host name has no address")
    return addresses


class ConnectionPool:
    """The connections to one replica. Retired when the replica left the configuration or got another address."""

    def __init__(
        self,
        name: str,
        address: Address,
        *,
        deadlines: Deadlines,
        write_buffer: WriteBuffer,
        header_cache: HeaderCache[ResponseHead],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.name = name
        self.address = address
        self.is_retired = False
        self.last_end_at = 0.0  # of a complete response, in loop time
        self._deadlines = deadlines
        self._write_buffer = write_buffer
        self._header_cache = header_cache
        self._loop = loop
        self._idle: dict[UpstreamConnection, None] = {}  # in insertion order; the latest is used first
        self._open: set[UpstreamConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._usage_rejected_at: float | None = None  # in loop time
        self.fingerprint = Fingerprint()
        self.lacks_kv_transfer = False  # the engine has prefilled a prompt for another one, without a transfer

    @property
    def connections(self) -> int:
        """Open connections, idle ones included."""
        return len(self._open)

    @property
    def is_in_use(self) -> bool:
        """Whether a connection is open or being made."""
        return bool(self._open or self._tasks)

    @property
    def progress_at(self) -> float:
        """Loop time of the latest body byte of any response; 0 if there was none. O(connections)."""
        return max(self.last_end_at, *(upstream.last_byte_at for upstream in self._open), 0.0)

    def record_progress(self) -> None:
        """A body byte has arrived of a response that another proxy carries."""
        self.last_end_at = self._loop.time()

    def waiting(self, since: float = 0.0) -> list[UpstreamConnection]:
        """Connections that wait for a first byte, of requests sent after ``since`` (loop time); oldest request first.

        O(connections).
        """
        waiting = [
            upstream for upstream in self._open if upstream.waiting_listener is not None and upstream.sent_at >= since
        ]
        return sorted(waiting, key=lambda upstream: upstream.sent_at)

    def silences(self, now: float, since: float = 0.0) -> list[float]:
        """Seconds since the last byte of each stream whose client keeps up, of requests sent after ``since``."""
        return [
            now - last_byte_at
            for upstream in self._open
            if (last_byte_at := upstream.last_byte_at) and upstream.sent_at >= since
        ]

    def silent(self, before: float) -> list[UpstreamCall]:
        """Streams without a byte since ``before`` (loop time), of clients that keep up."""
        return [
            listener
            for upstream in self._open
            if (listener := upstream.streaming_listener) is not None and 0 < upstream.last_byte_at < before
        ]

    @property
    def streaming_prompt_tokens(self) -> int:
        """Tokens of the prompts whose responses are being streamed. O(connections)."""
        return sum(
            listener.prompt_tokens for upstream in self._open if (listener := upstream.streaming_listener) is not None
        )

    @property
    def accepts_usage_requests(self) -> bool:
        """Whether the engine has not rejected a usage request within ``USAGE_REJECTED_S``."""
        rejected_at = self._usage_rejected_at
        return rejected_at is None or self._loop.time() - rejected_at > USAGE_REJECTED_S

    def on_usage_rejected(self) -> bool:
        """Remember that the engine accepted a request only without a usage request; True for the first time."""
        is_first, self._usage_rejected_at = self._usage_rejected_at is None, self._loop.time()
        return is_first

    def take_idle(self) -> UpstreamConnection | None:
        """Take an idle connection, if there is one that is still open."""
        while self._idle:
            upstream = self._idle.popitem()[0]
            if not upstream.transport.is_closing():
                return upstream
        return None

    def connect(self, caller: UpstreamCall, timeout_s: float) -> None:
        """Open a connection and notify ``caller``."""
        task = self._loop.create_task(self._connect(caller, timeout_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def return_idle(self, upstream: UpstreamConnection) -> None:
        if self.is_retired or len(self._idle) >= MAX_IDLE:
            upstream.abort()
            return
        self._idle[upstream] = None
        self._deadlines.arm(upstream, KEEP_S)

    def on_closed(self, upstream: UpstreamConnection) -> None:
        self._idle.pop(upstream, None)
        self._open.discard(upstream)

    def retire(self) -> None:
        """Close idle connections now, and each busy connection after its response."""
        self.is_retired = True
        for upstream in list(self._idle):
            upstream.abort()

    def close(self) -> None:
        """Close all connections at once."""
        self.is_retired = True
        for task in list(self._tasks):
            task.cancel()
        for upstream in list(self._open):
            upstream.abort()

    def new_upstream(self) -> UpstreamConnection:
        return UpstreamConnection(self, self._deadlines, self._write_buffer, self._header_cache)

    async def _open_connection(self) -> UpstreamConnection:
        """Connect to the first of the replica's addresses that accepts; OSError if none does."""
        address, failure = self.address, OSError("no address")
        server_hostname = address.host if address.ssl_context else None
        for host in await permitted_hosts(address):
            try:
                _, upstream = await self._loop.create_connection(
                    self.new_upstream, host, address.port, ssl=address.ssl_context, server_hostname=server_hostname
                )
            except OSError as error:
                failure = error
            else:
                return upstream
        raise failure

    async def _connect(self, caller: UpstreamCall, timeout_s: float) -> None:
        try:
            async with Timeout(self._deadlines, timeout_s):
                upstream = await self._open_connection()
        except TimeoutError:
            caller.on_connect_failed(f"no connection within {timeout_s:g} s", is_local=False)
            return
        except OSError as error:
            caller.on_connect_failed(describe_os_error(error), is_local=error.errno in SHORTAGES)
            return
        except ValueError:  # a host name that cannot be encoded, such as one with an empty label
            caller.on_connect_failed("its host name cannot be resolved", is_local=False)
            return
        self._open.add(upstream)
        caller.on_connected(upstream)
