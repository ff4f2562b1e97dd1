"""The way to one replica: its kept-alive connections, and the making of new ones."""

from __future__ import annotations

import asyncio
import errno
from typing import Final, Protocol

from routing.http.headers import HeaderCache
from routing.http.loop import Deadlines, WriteBuffer
from routing.http.response import ResponseHead
from routing.http.tls import reason_of
from routing.upstream.address import Address
from routing.upstream.client import permitted_hosts
from routing.upstream.connection import UpstreamConnection

IDLE_S: Final = 4.0  # seconds; below the 5 s after which vLLM's server closes an idle connection
MAX_IDLE: Final = 512  # kept-alive connections
USAGE_REFUSED_S: Final = 600.0  # before an engine that refused to report usage is asked for it again

SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})


class Caller(Protocol):
    """Who wants a connection."""

    def on_connected(self, upstream: UpstreamConnection) -> None:
        """Here it is."""
        ...

    def on_connect_failed(self, reason: str, *, ours: bool) -> None:
        """There is none. ``ours``: for a shortage of the router's own, which says nothing about the replica."""
        ...


class ConnectionPool:
    """One replica as this router reaches it. Retired when its replica left the configuration or moved."""

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
        self._deadlines = deadlines
        self._write_buffer = write_buffer
        self._header_cache = header_cache
        self._loop = loop
        self._idle: dict[UpstreamConnection, None] = {}  # insertion order; the latest is used first
        self._open: set[UpstreamConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.last_end_at = 0.0  # of a complete answer, in loop time
        self._usage_refused_at: float | None = None  # in loop time

    @property
    def connections(self) -> int:
        """How many connections are open, idle ones included."""
        return len(self._open)

    @property
    def is_in_use(self) -> bool:
        """Whether a connection is open or being made."""
        return bool(self._open or self._tasks)

    @property
    def progress_at(self) -> float:
        """When the latest body byte of any answer came, in loop time; 0 if none ever did. O(connections)."""
        return max(self.last_end_at, *(upstream.last_byte_at for upstream in self._open), 0.0)

    def waiting(self, since: float = 0.0) -> list[UpstreamConnection]:
        """Connections on which somebody waits for a first byte, the longest waiting first. O(connections).

        ``since``: of those whose requests were sent after that, in loop time.
        """
        waiting = (it for it in self._open if it.waiting is not None and it.sent_at >= since)
        return sorted(waiting, key=lambda upstream: upstream.sent_at)

    def silences(self, now: float, since: float = 0.0) -> list[float]:
        """The same of streams under way: for how many seconds each has had no byte, where its client keeps up."""
        return [now - at for it in self._open if (at := it.last_byte_at) and it.sent_at >= since]

    @property
    def held_tokens(self) -> int:
        """Of prompts that are being answered. O(connections)."""
        return sum(listener.prompt_tokens for it in self._open if (listener := it.streaming) is not None)

    @property
    def takes_usage_requests(self) -> bool:
        """Whether the engine may be asked for usage: it has not refused that within ``USAGE_REFUSED_S``."""
        at = self._usage_refused_at
        return at is None or self._loop.time() - at > USAGE_REFUSED_S

    def usage_refused(self) -> bool:
        """Remember that the engine took a request only without the router's ask for usage; True for the first time."""
        is_first, self._usage_refused_at = self._usage_refused_at is None, self._loop.time()
        return is_first

    def take_idle(self) -> UpstreamConnection | None:
        """A kept-alive connection, if there is one."""
        while self._idle:
            upstream = self._idle.popitem()[0]
            if upstream.is_usable():
                return upstream
        return None

    def connect(self, caller: Caller, timeout_s: float) -> None:
        """Make a new connection, and tell ``caller``."""
        task = self._loop.create_task(self._connect(caller, timeout_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def return_idle(self, upstream: UpstreamConnection) -> None:
        """Take a connection back after use."""
        if self.is_retired or len(self._idle) >= MAX_IDLE:
            upstream.abandon()
            return
        self._idle[upstream] = None
        self._deadlines.arm(upstream, IDLE_S)

    def new_upstream(self) -> UpstreamConnection:
        """A connection to be, before it is made."""
        return UpstreamConnection(self, self._deadlines, self._write_buffer, self._header_cache)

    def closed(self, upstream: UpstreamConnection) -> None:
        """Forget a connection that has ended."""
        self._idle.pop(upstream, None)
        self._open.discard(upstream)

    def retire(self) -> None:
        """Close what is idle now, and what is busy after its answer."""
        self.is_retired = True
        for upstream in list(self._idle):
            upstream.abandon()

    def close(self) -> None:
        """Close everything at once."""
        self.is_retired = True
        for task in list(self._tasks):
            task.cancel()
        for upstream in list(self._open):
            upstream.abandon()

    async def _connected(self) -> UpstreamConnection:
        """A connection to the first of the replica's addresses that accepts one; OSError where none does."""
        address, failure = self.address, OSError("no address")
        for host in await permitted_hosts(address):
            try:
                _, upstream = await self._loop.create_connection(
                    self.new_upstream,
                    host,
                    address.port,
                    ssl=address.ssl_context,
                    server_hostname=address.host if address.ssl_context else None,
                )
            except OSError as error:
                failure = error
            else:
                return upstream
        raise failure

    async def _connect(self, caller: Caller, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                upstream = await self._connected()
        except TimeoutError:
            caller.on_connect_failed(f"no connection within {timeout_s:g} s", ours=False)
            return
        except OSError as error:
            caller.on_connect_failed(reason_of(error), ours=error.errno in SHORTAGES)
            return
        except ValueError:  # a host that no resolver takes, such as one with an empty label
            caller.on_connect_failed("its host name cannot be resolved", ours=False)
            return
        self._open.add(upstream)
        caller.on_connected(upstream)
