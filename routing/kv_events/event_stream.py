"""The ZeroMQ sockets of one engine: subscription, connection monitor and replay.

Theory of operation. ZeroMQ's own thread connects, receives and queues messages, so the event loop only takes them from
its queues, without waiting. ``pump`` takes one message at a time and yields after each event. A socket's descriptor
becomes readable once for several messages, so ``pump`` ends only when all sockets are empty.

A connection that sends nothing for ``HEARTBEAT_TIMEOUT_MS``, not even heartbeats, counts as lost. ZeroMQ reconnects by
itself to the same address; ``subscriptions.py`` opens the stream again after a while, because the address may change.

Bounds. ZeroMQ queues at most ``MAX_QUEUED`` messages of at most ``MAX_PAYLOAD_BYTES``; further ones are dropped by the
publisher, which is a gap like any other.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterator
from typing import Any, Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from routing.kv_events.decoding import MAX_PAYLOAD_BYTES
from routing.kv_events.message_order import MessageOrder

MAX_QUEUED: Final = 1000
MAX_REPLAYED: Final = 12_000  # vLLM keeps 10,000 messages for replays
REPLAY_TIMEOUT_S: Final = 0.75  # without a message; vLLM looks for requests every 0.1 s
HEARTBEAT_MS: Final = 1000
HEARTBEAT_TIMEOUT_MS: Final = 3000
RECONNECT_MS: Final = 100
MAX_RECONNECT_MS: Final = 2000
NUMBER: Final = struct.Struct(">Q")
END_OF_REPLAY: Final = b"\xff" * NUMBER.size
MONITORED: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class EventStream:
    """Sockets to one engine, from ``open`` to ``close``."""

    def __init__(self, context: zmq.Context[Any], order: MessageOrder, on_readable: Callable[[], None]) -> None:
        self.order = order
        self._context = context
        self._on_readable = on_readable
        self._loop = asyncio.get_running_loop()
        self._subscription: zmq.Socket[Any] | None = None
        self._monitor: zmq.Socket[Any] | None = None
        self._replay: zmq.Socket[Any] | None = None
        self._replay_endpoint: str | None = None
        self._replay_due_at = 0.0  # loop time at which the replay has failed
        self.disconnected_at = self._loop.time()  # loop time since when there is no connection

    @property
    def is_open(self) -> bool:
        """Whether there are sockets."""
        return self._subscription is not None

    @property
    def is_replaying(self) -> bool:
        """Whether a replay was requested and has not ended."""
        return self._replay is not None

    def open(self, endpoint: str, replay_endpoint: str | None, topic: str) -> None:
        """Connect in the background; zmq.ZMQError if an endpoint is invalid."""
        self.disconnected_at = self._loop.time()
        self._replay_endpoint = replay_endpoint
        socket = self._subscription = self._new_socket(zmq.SUB, MAX_QUEUED)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
        socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._monitor = socket.get_monitor_socket(MONITORED)
        self._watch(socket)
        self._watch(self._monitor)
        socket.connect(endpoint)

    def close(self) -> None:
        """Close all sockets; the order of messages continues with the next connection."""
        self._close_replay()
        if self._subscription is not None and self._monitor is not None:
            for socket in (self._monitor, self._subscription):
                self._loop.remove_reader(socket.FD)
            self._subscription.disable_monitor()
            self._monitor.close(0)
            self._subscription.close(0)
        self._monitor = self._subscription = None
        self.order.on_disconnected()

    def pump(self) -> Iterator[None]:
        """Take everything that has arrived; yields after each event."""
        yield from self._take_connection_events()
        self._request_replay()
        while True:
            message = self._receive(self._subscription)
            replayed = self._receive(self._replay)
            if message is not None:
                yield from self._on_message(message)
            if replayed is not None:
                yield from self._on_replayed(replayed)
            self._request_replay()
            if message is None and replayed is None:
                return
            yield

    def check_replay(self) -> Iterator[None]:
        """Give up a replay that does not respond."""
        if self._replay is not None and self._loop.time() >= self._replay_due_at:
            self._close_replay()
            yield from self.order.on_replay_failed()
            self._request_replay()

    # --- messages ---

    def _on_message(self, frames: list[bytes]) -> Iterator[None]:
        """Take a published message: topic, number and payload; others are ignored."""
        if len(frames) == 3 and len(frames[1]) == NUMBER.size:
            yield from self.order.on_message(NUMBER.unpack(frames[1])[0], frames[2])

    def _on_replayed(self, frames: list[bytes]) -> Iterator[None]:
        """Take a replayed message, whose last two frames are number and payload."""
        self._replay_due_at = self._loop.time() + REPLAY_TIMEOUT_S
        if len(frames) < 2 or len(frames[-2]) != NUMBER.size:
            return
        if frames[-2] == END_OF_REPLAY:
            self._close_replay()
            yield from self.order.on_replay_ended()
        else:
            yield from self.order.on_replayed(NUMBER.unpack(frames[-2])[0], frames[-1])

    def _take_connection_events(self) -> Iterator[None]:
        while (frames := self._receive(self._monitor)) is not None:
            if parse_monitor_message(frames)["event"] == zmq.EVENT_DISCONNECTED:
                self.disconnected_at = self._loop.time()
                self._close_replay()
                self.order.on_disconnected()
            else:
                self.disconnected_at = float("inf")
                self.order.on_connected()
            yield

    # --- sockets ---

    def _request_replay(self) -> None:
        """Send the request that is due, on a socket of its own, so that no earlier response is mixed in."""
        first, self.order.replay_from = self.order.replay_from, None
        if first is None or self._replay_endpoint is None:
            return
        self._close_replay()
        socket = self._replay = self._new_socket(zmq.DEALER, MAX_REPLAYED)
        self._watch(socket)
        socket.connect(self._replay_endpoint)
        socket.send_multipart([b"", NUMBER.pack(first)], flags=zmq.NOBLOCK)
        self._replay_due_at = self._loop.time() + REPLAY_TIMEOUT_S

    def _close_replay(self) -> None:
        if self._replay is not None:
            self._loop.remove_reader(self._replay.FD)
            self._replay.close(0)
            self._replay = None

    def _new_socket(self, kind: int, max_queued: int) -> zmq.Socket[Any]:
        socket: zmq.Socket[Any] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.RCVHWM, max_queued)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
        return socket

    def _watch(self, socket: zmq.Socket[Any]) -> None:
        self._loop.add_reader(socket.FD, self._on_readable)

    def _receive(self, socket: zmq.Socket[Any] | None) -> list[bytes] | None:
        """The next message; None if there is none."""
        if socket is None:
            return None
        try:
            return socket.recv_multipart(flags=zmq.NOBLOCK)
        except zmq.Again:
            return None
