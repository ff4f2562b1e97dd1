"""The connections to one engine: subscription and replay.

Theory of operation. ``pump`` does non-blocking sends and receives, and yields after every ``STEP_MESSAGES``. Nothing
wakes the event loop when messages arrive: ``subscriptions.py`` calls ``pump`` at a fixed interval, so that all messages
of one interval cost one wake-up and one system call.

Liveness. After ``PING_S`` without bytes from the engine a PING is sent, and if nothing has arrived ``PONG_S`` later the
connection counts as lost. Its end and errors are detected immediately. ``subscriptions.py`` opens the stream again.
Bytes are no sign of life without messages: a message that has not ended after ``MESSAGE_S`` ends the connection, and so
does an engine that serves prompts without publishing anything, or whose numbers have gap after gap (``order.fault``).

Bounds. Unread bytes wait in the kernel's buffers and then in the engine's, which drops messages above its own limit: a
gap like any other. One call of ``pump`` reads about ``MAX_READ_BYTES`` of each connection.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from typing import Final

from routing.kv_events.decoding import MAX_PAYLOAD_BYTES
from routing.kv_events.message_order import MessageOrder
from routing.kv_events.zmtp import PING, ProtocolError, Receiver, greeting_and_ready, message

REPLAY_TIMEOUT_S: Final = 0.75  # without a message; vLLM looks for requests every 0.1 s
PING_S: Final = 0.3
PONG_S: Final = 0.45
CONNECT_S: Final = 2.0  # until the engine has sent READY
MESSAGE_S: Final = 5.0  # from the first byte of a message to its last
RECEIVED_BYTES: Final = 262_144  # of one system call
MAX_READ_BYTES: Final = 1 << 20
MAX_UNSENT_BYTES: Final = 65_536  # of a peer that sends PINGs and does not read
STEP_MESSAGES: Final = 8  # between two yields, about 0.1 ms
NUMBER: Final = struct.Struct(">Q")
END_OF_REPLAY: Final = b"\xff" * NUMBER.size

Host = tuple[str, int]


class Connection:
    """A TCP connection that speaks ZMTP; OSError or ProtocolError from its methods mean that it is lost."""

    def __init__(self, host: Host, socket_type: bytes, first: bytes, now_s: float) -> None:
        self.receiver = Receiver(MAX_PAYLOAD_BYTES)
        self.received_s = now_s
        self.read_bytes = 0
        self._message_s: float | None = None  # since when a message has been incomplete; None: none is
        self.is_drained = True  # whether the latest system call has probably emptied the kernel's buffer
        self._to_send = greeting_and_ready(socket_type)
        self._first = first  # to send once the peer is ready; empty: it was sent
        self._pinged_s: float | None = None  # None: no PING waits for a reply
        family = socket.AF_INET6 if ":" in host[0] else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.connect_ex(host)  # it ends in the background; ``send`` and ``recv`` say whether it failed

    def close(self) -> None:
        """Close the connection; unsent and unread bytes are lost."""
        self._socket.close()

    def receive(self, now_s: float) -> bool:
        """Read from the socket; whether bytes arrived. ``pump`` reads at most ``MAX_READ_BYTES`` in one call."""
        if self._to_send:
            self._flush()
        if self.read_bytes >= MAX_READ_BYTES:
            return False
        try:
            data = self._socket.recv(RECEIVED_BYTES)
        except BlockingIOError:
            return False
        if not data:
            raise ConnectionResetError
        self.received_s, self._pinged_s = now_s, None
        self.read_bytes += len(data)
        self.is_drained = len(data) < RECEIVED_BYTES
        self.receiver.feed(data)
        return True

    def next_message(self) -> list[bytes] | None:
        """The next message of the received bytes; None if there is none."""
        frames, receiver = self.receiver.next_message(), self.receiver
        if frames is not None or not receiver.is_in_message:
            self._message_s = None
        elif self._message_s is None:
            self._message_s = self.received_s
        if receiver.replies or (self._first and receiver.is_ready):
            if receiver.is_ready:
                self._to_send, self._first = self._to_send + self._first, b""
            self._to_send += b"".join(receiver.replies)
            receiver.replies.clear()
            self._flush()
            if len(self._to_send) > MAX_UNSENT_BYTES:
                raise ProtocolError("the peer does not read")
        return frames

    def check(self, now_s: float) -> None:
        """Send a PING to a silent peer; TimeoutError without a reply in ``PONG_S``, or a READY in ``CONNECT_S``.

        ProtocolError if a message does not end.
        """
        if self._message_s is not None and now_s - self._message_s > MESSAGE_S:
            raise ProtocolError(f"a message did not end within {MESSAGE_S:g} s")
        if not self.receiver.is_ready:
            is_lost = now_s - self.received_s > CONNECT_S
        elif self._pinged_s is None:
            is_lost = False
            if now_s - self.received_s >= PING_S:
                self._pinged_s = now_s
                self._to_send += PING
                self._flush()
        else:
            is_lost = now_s - self._pinged_s > PONG_S
        if is_lost:
            raise TimeoutError

    def _flush(self) -> None:
        try:
            sent = self._socket.send(self._to_send)
        except BlockingIOError:
            return
        self._to_send = self._to_send[sent:]


class EventStream:
    """Connections to one engine, from ``open`` to ``close``. Times are of the router's clock."""

    def __init__(self, order: MessageOrder, clock: Callable[[], float]) -> None:
        self.order = order
        self._clock = clock
        self._subscription: Connection | None = None
        self._replay: Connection | None = None
        self._replay_host: Host | None = None
        self._is_connected = False
        self._messages = 0  # taken
        self.fault = ""  # why the latest connection ended, if it was not the network; "" after a message

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, or an attempt."""
        return self._subscription is not None

    @property
    def is_connected(self) -> bool:
        """Whether the engine has sent READY."""
        return self._is_connected

    @property
    def is_urgent(self) -> bool:
        """Whether the engine's next bytes are awaited: it is being connected to, or a replay is in progress."""
        return self._replay is not None or (self._subscription is not None and not self._is_connected)

    def open(self, host: Host, replay_host: Host | None, topic: str) -> None:
        """Connect in the background; OSError if that is impossible."""
        self._replay_host = replay_host
        self._subscription = Connection(host, b"SUB", message([b"\x01" + topic.encode()]), self._clock())

    def close(self) -> None:
        """Close all connections; the order of messages continues with the next one."""
        self._close_replay()
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None
        self._is_connected = False
        self.order.on_disconnected()

    def pump(self) -> Iterator[None]:
        """Take what has arrived; yields after every ``STEP_MESSAGES``, and within large ones."""
        try:
            yield from self._take_published()
        except OSError:
            self.close()
        except ProtocolError as error:
            self.close()
            self.fault = str(error)
        if self.is_connected and (fault := self.order.fault):
            self.close()
            self.fault = fault
        try:
            yield from self._take_replayed()
        except (OSError, ProtocolError):
            yield from self._give_up_replay()

    def _take_published(self) -> Iterator[None]:
        connection, now_s = self._subscription, self._clock()
        if connection is None:
            return
        connection.read_bytes = 0
        while connection.receive(now_s):
            while (frames := connection.next_message()) is not None:
                self._note_ready(connection)
                if len(frames) == 3 and len(frames[1]) == NUMBER.size:
                    yield from self.order.on_message(NUMBER.unpack(frames[1])[0], frames[2])
                self._messages += 1
                if self._messages % STEP_MESSAGES == 0:
                    yield
                if connection is not self._subscription:  # it was closed meanwhile
                    return
            self._note_ready(connection)
            if self._is_connected and connection.is_drained:  # the rest comes with the next call
                break
        connection.check(now_s)

    def _note_ready(self, connection: Connection) -> None:
        if connection.receiver.is_ready and not self._is_connected:
            self._is_connected = True
            self.order.on_connected()

    def _take_replayed(self) -> Iterator[None]:
        """Take replayed messages, whose last two frames are number and payload."""
        self._request_replay()
        connection, now_s = self._replay, self._clock()
        if connection is None:
            return
        connection.read_bytes = 0
        while connection.receive(now_s):
            while (frames := connection.next_message()) is not None:
                if len(frames) < 2 or len(frames[-2]) != NUMBER.size:
                    continue
                if frames[-2] == END_OF_REPLAY:
                    self._close_replay()
                    yield from self.order.on_replay_ended()
                else:
                    yield from self.order.on_replayed(NUMBER.unpack(frames[-2])[0], frames[-1])
                    self._messages += 1
                    if self._messages % STEP_MESSAGES == 0:
                        yield
                if self.order.replay_from is not None:
                    self._request_replay()
                if connection is not self._replay:
                    return
        if now_s - connection.received_s >= REPLAY_TIMEOUT_S:
            yield from self._give_up_replay()

    def _give_up_replay(self) -> Iterator[None]:
        self._close_replay()
        yield from self.order.on_replay_failed()
        self._request_replay()

    def _request_replay(self) -> None:
        """Send the request that is due, on a connection of its own, so that no earlier response is mixed in."""
        first, self.order.replay_from = self.order.replay_from, None
        if first is None or self._replay_host is None:
            return
        self._close_replay()
        request = message([b"", NUMBER.pack(first)])
        self._replay = Connection(self._replay_host, b"DEALER", request, self._clock())

    def _close_replay(self) -> None:
        if self._replay is not None:
            self._replay.close()
            self._replay = None
