"""How the messages of a fleet reach all of its routers: through a Redis-compatible server, or between workers.

Theory of operation. A transport carries bytes to every router of the fleet, its own included, or drops them: nothing
waits for a router that is silent, and no method raises for a fault. It counts what it drops. What a message says, and
who is a peer, is none of its concern.

The server has one channel for the fleet; a router publishes over one connection and subscribes over another. They are
replaced when they are lost, and when none of the router's own messages has come back for ``REPLACE_S``.

Workers of one router that have no server send datagrams to each other. Every place for a worker has a pair of sockets
from the start: all workers hold the end into which they write, and the worker in that place the end from which it
reads. So no message passes through another process; the kernel bounds what waits for a worker that does not read, and
further datagrams are dropped.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from typing import Final, Protocol

from routing.log import event
from routing.response_cache.store_connection import Address, Reply, StoreConnection, command

CONNECT_S: Final = 1.0
FIRST_PAUSE_S: Final = 0.1  # before connecting again, doubled up to LAST_PAUSE_S
LAST_PAUSE_S: Final = 2.0
REPLACE_S: Final = 3.0  # without a message of its own that came back
MAX_UNACKNOWLEDGED: Final = 16
MAX_MESSAGE_BYTES: Final = 2 << 20  # of a peer: larger ones are not opened
QUEUE_BYTES: Final = 208 << 10  # for one worker, with what the kernel needs for each datagram; usual without privileges
MAX_DATAGRAM_BYTES: Final = 96 << 10  # of prompts: several such messages fit into the queue
_MAX_READ: Final = 64  # datagrams before the event loop does other work

logger = logging.getLogger(__name__)

OnMessage = Callable[[bytes], None]


class Transport(Protocol):
    """The way to all routers of a fleet."""

    reaches_routers: bool  # not only workers of one router
    max_bytes: int  # of the prompts in a message
    errors: Counter[str]  # what was lost, by kind

    def join(self, channel: bytes, on_message: OnMessage) -> None:
        """Receive the messages of a channel from now on."""
        ...

    def is_ready(self, now_s: float, returned_s: float) -> bool:
        """Whether a message may be sent now; called every period. ``returned_s``: when the last that came back was."""
        ...

    def send(self, data: bytes) -> None:
        """Send a message to all routers of the channel."""
        ...

    def close(self) -> None:
        """Send nothing more, once everything is sent."""
        ...


class ServerTransport:
    """Through a server: PUBLISH and SUBSCRIBE."""

    def __init__(self, url: str) -> None:
        """ValueError for a URL that is none of redis, rediss and unix."""
        self.reaches_routers, self.max_bytes = True, MAX_MESSAGE_BYTES
        self.errors: Counter[str] = Counter()
        self.unacknowledged = 0
        self._address = Address.of(url)
        self._channel = b""
        self._on_message: OnMessage | None = None  # None: nothing was joined, or this is closed
        self._publishing: StoreConnection | None = None
        self._subscribing: StoreConnection | None = None
        self._now_s = self._connect_at_s = -inf
        self._pause_s = FIRST_PAUSE_S
        self._opened_s = -inf  # when the connections were opened
        self._is_connected_logged = self._is_lost_logged = False

    def join(self, channel: bytes, on_message: OnMessage) -> None:
        """Receive the messages of a channel."""
        self._channel, self._on_message = channel, on_message
        self._disconnect(ConnectionAbortedError())

    def is_ready(self, now_s: float, returned_s: float) -> bool:
        """Whether both connections exist, and not too much is on its way; opens them if it is time."""
        publishing, subscribing, self._now_s = self._publishing, self._subscribing, now_s
        if publishing is None or subscribing is None:
            if now_s >= self._connect_at_s:
                self._connect(now_s)
            return False
        if publishing.is_opening or subscribing.is_opening:
            return False
        if returned_s > self._opened_s:
            self._pause_s = FIRST_PAUSE_S
            if not self._is_connected_logged:
                self._is_connected_logged, self._is_lost_logged = True, False
                event(logger, "shared_state_connected")
        if now_s - max(returned_s, self._opened_s) > REPLACE_S:
            self._disconnect(TimeoutError())
            return False
        return self.unacknowledged < MAX_UNACKNOWLEDGED

    def send(self, data: bytes) -> None:
        """Publish a message."""
        if self._publishing is not None:
            self.unacknowledged += 1
            self._publishing.send(command(b"PUBLISH", self._channel, data), self._on_published)

    def close(self) -> None:
        """Close both connections once everything is sent."""
        self._on_message = None  # what happens to the connections from now on is not an error
        for connection in (self._publishing, self._subscribing):
            if connection is not None:
                connection.close()

    def _connect(self, now_s: float) -> None:
        self._pause_s = min(LAST_PAUSE_S, 2 * self._pause_s)
        self._opened_s = now_s
        self._connect_at_s = now_s + self._pause_s
        self._publishing = StoreConnection(self._address, CONNECT_S, self._on_connection_lost)
        self._subscribing = StoreConnection(self._address, CONNECT_S, self._on_connection_lost, self._on_reply)
        self._subscribing.send(command(b"SUBSCRIBE", self._channel), None)

    def _on_published(self, reply: Reply) -> None:
        self.unacknowledged -= 1
        if isinstance(reply, Exception):
            self.errors["publish"] += 1
            self._disconnect(reply)

    def _on_connection_lost(self, _was_open: bool) -> None:
        errors = [connection.error for connection in (self._publishing, self._subscribing) if connection is not None]
        self._disconnect(next((error for error in errors if error is not None), ConnectionResetError()))

    def _disconnect(self, reason: Exception) -> None:
        """Close both connections; the next period opens new ones."""
        connections, self._publishing, self._subscribing = (self._publishing, self._subscribing), None, None
        if connections == (None, None) or self._on_message is None:
            return
        self.errors["connection"] += 1
        if not self._is_lost_logged:
            self._is_lost_logged, self._is_connected_logged = True, False
            text = f"{type(reason).__name__}: {reason}"[:200]
            event(logger, "shared_state_lost", level=logging.WARNING, reason=text)
        self._connect_at_s = max(self._connect_at_s, self._now_s + self._pause_s)
        for connection in connections:
            if connection is not None:
                connection.abort(reason)

    def _on_reply(self, reply: list[bytes]) -> None:
        if reply[0] == b"message" and len(reply) == 3 and self._on_message is not None:
            self._on_message(reply[2])


class WorkerTransport:
    """To the workers of one router, by datagrams."""

    def __init__(
        self, receiving: socket.socket, sending: Sequence[socket.socket], is_running: Callable[[int], bool]
    ) -> None:
        """``sending``: to each worker's place, this one's included; ``is_running``: whether one is there and reads."""
        self.reaches_routers, self.max_bytes = False, MAX_DATAGRAM_BYTES
        self.errors: Counter[str] = Counter()
        self._receiving, self._sending, self._is_running = receiving, sending, is_running
        self._buffer = memoryview(bytearray(2 * QUEUE_BYTES))  # the kernel doubles it, which bounds a datagram
        self._on_message: OnMessage | None = None  # None: this does not read

    def join(self, channel: bytes, on_message: OnMessage) -> None:  # noqa: ARG002 - messages of others cannot be opened
        """Receive messages."""
        if self._on_message is None:
            asyncio.get_running_loop().add_reader(self._receiving, self._read)
        self._on_message = on_message

    def is_ready(self, now_s: float, returned_s: float) -> bool:  # noqa: ARG002 - there is nothing to open
        """True."""
        return self._on_message is not None

    def send(self, data: bytes) -> None:
        """Send a message to each worker that runs, this one included."""
        for place, end in enumerate(self._sending):
            if self._is_running(place):
                try:
                    end.send(data)
                except OSError:  # most often because its queue is full
                    self.errors["datagram"] += 1

    def close(self) -> None:
        """Read nothing more."""
        if self._on_message is not None:
            asyncio.get_running_loop().remove_reader(self._receiving)
            self._on_message = None

    def _read(self) -> None:
        with suppress(BlockingIOError):
            for _ in range(_MAX_READ):
                size = self._receiving.recv_into(self._buffer)
                if self._on_message is not None:
                    self._on_message(bytes(self._buffer[:size]))


class WorkerQueue:
    """The sockets of one place for a worker: it reads from one end, and all workers write into the other."""

    def __init__(self) -> None:
        self.receiving, self.sending = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sending.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, QUEUE_BYTES)
        for end in (self.receiving, self.sending):
            end.setblocking(False)

    def clear(self) -> None:
        """Drop what a worker that has exited did not read."""
        with suppress(BlockingIOError):
            while True:
                self.receiving.recv(1)  # drops the rest of the datagram too

    def close(self) -> None:
        """Close both ends in this process."""
        self.receiving.close()
        self.sending.close()
