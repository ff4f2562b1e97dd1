"""The exchange of updates through a Redis-compatible server, beside requests and never on their path.

Theory of operation. Every ``PERIOD_S`` the router publishes what has changed, on one channel for the whole fleet, and
it subscribes to that channel over a connection of its own. Nothing is stored: a server that is flushed loses nothing,
and one whose memory is full still delivers. A router without peers publishes heartbeats only.

The router hears its own messages too, which shows how old its view is without comparing clocks: if the newest one that
came back was sent more than ``SILENT_S`` ago, whatever the cause, it counts no peers, and decides as if it were alone.
Connections are replaced when they are lost, and when nothing has come back for ``REPLACE_S``. Bytes are limited:
``MAX_BYTES_PER_S`` published, prompts that exceed it are left out, and ``MAX_UNACKNOWLEDGED`` messages on their way to
the server.

Messages are sealed with a key that the server does not have: the identity of the router's process, a sequence number, a
nonce and the update in MessagePack, encrypted with AES-256-GCM. Channel, identity and number are authenticated with it.
Key and channel follow from the fleet's ``hash_secret``, so fleets that share a server do not see each other, and
messages of anybody without the key are ignored.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from math import inf
from struct import Struct as Layout
from struct import error
from time import monotonic
from typing import Final, NamedTuple

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from routing.balancing.load_tracker import LoadTracker
from routing.balancing.residency import Residency
from routing.http.tasks import Background, Periodic
from routing.log import event
from routing.observability.metrics import PREFIX, header, labels
from routing.response_cache.store_connection import Address, Reply, StoreConnection, command
from routing.schema import derived_key
from routing.sharing.view import PERIOD_S, SILENT_S, WHOLE_S, OwnState, SharedView, Update
from routing.types import TargetId

CONNECT_S: Final = 1.0
FIRST_PAUSE_S: Final = 0.1  # before connecting again, doubled up to LAST_PAUSE_S
LAST_PAUSE_S: Final = 2.0
REPLACE_S: Final = 3.0  # without a message of its own that came back
MAX_UNACKNOWLEDGED: Final = 16
MAX_BYTES_PER_S: Final = 4 << 20
BURST_S: Final = 0.25  # of these bytes
MAX_MESSAGE_BYTES: Final = 2 << 20  # of a peer: larger ones are not opened

VERSION: Final = 1
IDENTITY_BYTES: Final = 8
_HEADER: Final = Layout(f"!{IDENTITY_BYTES}sQ")
_NONCE_BYTES: Final = 12

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Update).decode

logger = logging.getLogger(__name__)


class Message(NamedTuple):
    """An update and its origin."""

    identity: bytes
    sequence: int
    update: Update


class Seal:
    """Seals and opens messages of one fleet."""

    def __init__(self, hash_secret: str) -> None:
        name = f"{VERSION} {sys.byteorder}".encode()  # of hashes, whose bytes are this machine's
        digest = blake2b(name, digest_size=8, key=derived_key(hash_secret, "shared state names")).hexdigest()
        self.channel = f"warmpath-state:{digest}".encode()
        self._cipher = AESGCM(derived_key(hash_secret, "shared state"))

    def close(self, message: Message) -> bytes:
        """A message as bytes."""
        header, nonce = _HEADER.pack(message.identity, message.sequence), os.urandom(_NONCE_BYTES)
        return header + nonce + self._cipher.encrypt(nonce, _encode(message.update), self.channel + header)

    def open(self, data: bytes) -> Message | None:
        """The message; None if it is not one of this fleet's."""
        try:
            identity, sequence = origin_of(data)
            header, nonce = data[: _HEADER.size], data[_HEADER.size : _HEADER.size + _NONCE_BYTES]
            text = self._cipher.decrypt(nonce, data[_HEADER.size + _NONCE_BYTES :], self.channel + header)
            return Message(identity, sequence, _decode(text))
        except (InvalidTag, ValueError, error, msgspec.MsgspecError):
            return None


def origin_of(data: bytes) -> tuple[bytes, int]:
    """Identity and sequence number that a message claims; struct.error if it is too short."""
    identity, sequence = _HEADER.unpack_from(data)
    return identity, sequence


class Exchange:
    """One router's part of the exchange. Methods never raise for a fault of the server or of a peer."""

    def __init__(self, url: str) -> None:
        """ValueError for a URL that is none of redis, rediss and unix."""
        self._address = Address.of(url)
        self._seal: Seal | None = None  # None: there is no configuration yet
        self._secret = ""
        self._identity = b""
        self._own: OwnState | None = None
        self.view: SharedView | None = None
        self._clock = monotonic  # the load tracker's, once it is bound
        self._publishing: StoreConnection | None = None
        self._subscribing: StoreConnection | None = None
        self._connect_at_s, self._pause_s = -inf, FIRST_PAUSE_S
        self._sequence = 0
        self._sent_s: deque[tuple[int, float]] = deque(maxlen=256)  # numbers of own messages, and when they were sent
        self._returned_s = -inf  # when the newest own message that came back was sent
        self._opened_s = -inf  # when the connections were opened
        self._whole_s = -inf  # when the last whole update was sent
        self._is_connected_logged = self._is_lost_logged = False
        self._unacknowledged = 0
        self._budget_bytes, self._budget_s = 0.0, -inf
        self._periodic = Periodic(Background.SHARING, PERIOD_S, self._run, reads_first=True)
        self.published_bytes = self.received_bytes = self.published = self.received = 0
        self.errors: Counter[str] = Counter()

    def bind(self, identity: str, loads: LoadTracker, residency: Residency) -> None:
        """Share the state of a router. ``identity``: different each time its process starts, in hexadecimal."""
        self._identity = bytes.fromhex(identity)[:IDENTITY_BYTES].rjust(IDENTITY_BYTES, b"\0")
        self._clock = loads.clock
        self._own, self.view = OwnState(loads, residency), SharedView(loads, residency)

    def configure(self, hash_secret: str, targets: Iterable[TargetId]) -> None:
        """Share the loads of these targets with routers that have this secret; starts the exchange at first."""
        own, view, configured = self._own, self.view, set(targets)
        if own is None or view is None:
            raise ValueError("not bound to a router")
        own.configure(configured)
        view.configure(configured)
        if hash_secret != self._secret:
            self._secret, self._seal = hash_secret, Seal(hash_secret)
            self._disconnect(ConnectionAbortedError())
        self._periodic.start()

    @property
    def age_s(self) -> float | None:
        """How old the view of peers may be; None while there is none."""
        age_s = self._clock() - self._returned_s
        return age_s if age_s <= SILENT_S else None

    @property
    def peers(self) -> int:
        """Peers that count."""
        return 0 if self.view is None else self.view.counted

    @property
    def not_published(self) -> int:
        """Prompts that were not published, because too many bytes were."""
        return 0 if self._own is None else self._own.not_published

    def lines(self) -> Iterator[str]:
        """Prometheus text."""
        if self.view is None:
            return
        yield from header("shared_state_peers", "gauge", "Other routers that this one hears, and whose loads count.")
        yield f"{PREFIX}shared_state_peers {self.peers}"
        text = "Age of what this router knows of its peers, at most; none while the server is not reached."
        yield from header("shared_state_age_seconds", "gauge", text)
        if (age_s := self.age_s) is not None:
            yield f"{PREFIX}shared_state_age_seconds {age_s:.3f}"
        for name, text, values in (
            ("bytes", "Bytes of messages about shared state.", (self.published_bytes, self.received_bytes)),
            ("messages", "Messages about shared state.", (self.published, self.received)),
        ):
            yield from header(f"shared_state_{name}_total", "counter", text)
            for direction, value in zip(("published", "received"), values, strict=True):
                yield f"{PREFIX}shared_state_{name}_total{{{labels(direction=direction)}}} {value}"
        text = "What was lost, by kind: updates and prompts of peers, prompts of this router, commands, connections."
        yield from header("shared_state_losses_total", "counter", text)
        losses = {"updates": self.view.lost, "prompts_not_published": self.not_published, **self.errors}
        for kind, count in losses.items():
            yield f"{PREFIX}shared_state_losses_total{{{labels(kind=kind)}}} {count}"

    def close(self) -> None:
        """Tell peers that no request runs here any more, and stop."""
        self._periodic.stop()
        if self.peers and self._seal is not None and self._own is not None:
            self._own.configure(())
            self._publish(self._seal, self._own, self._clock(), is_whole=True)
        self._seal = None  # what happens to the connections from now on is not an error
        for connection in (self._publishing, self._subscribing):
            if connection is not None:
                connection.close()

    # --- every period ---

    def _run(self) -> None:
        own, view, seal, now_s = self._own, self.view, self._seal, self._clock()
        if own is None or view is None or seal is None:
            return
        view.expire(now_s, is_connected=now_s - self._returned_s <= SILENT_S)
        own.set_peers(view.counted)
        if not self._is_connected(seal, now_s):
            return
        is_whole = now_s - self._whole_s >= WHOLE_S
        if (view.counted or is_whole) and self._unacknowledged < MAX_UNACKNOWLEDGED:
            self._publish(seal, own, now_s, is_whole=is_whole)

    def _publish(self, seal: Seal, own: OwnState, now_s: float, *, is_whole: bool) -> None:
        elapsed_s = min(BURST_S, now_s - self._budget_s)
        self._budget_s = now_s
        self._budget_bytes = min(BURST_S * MAX_BYTES_PER_S, self._budget_bytes + elapsed_s * MAX_BYTES_PER_S)
        update = own.take(now_s, is_whole=is_whole, max_bytes=self._budget_bytes)
        connection = self._publishing
        if update is None or connection is None:
            return
        if is_whole:
            self._whole_s = now_s
        self._sequence += 1
        data = seal.close(Message(self._identity, self._sequence, update))
        self._budget_bytes -= len(data)
        self._sent_s.append((self._sequence, now_s))
        self._unacknowledged += 1
        self.published += 1
        self.published_bytes += len(data)
        connection.send(command(b"PUBLISH", seal.channel, data), self._on_published)

    def _on_published(self, reply: Reply) -> None:
        self._unacknowledged -= 1
        if isinstance(reply, Exception):
            self.errors["publish"] += 1
            self._disconnect(reply)

    # --- the connections ---

    def _is_connected(self, seal: Seal, now_s: float) -> bool:
        """Whether both connections exist; opens them if it is time."""
        publishing, subscribing = self._publishing, self._subscribing
        if publishing is None or subscribing is None:
            if now_s >= self._connect_at_s:
                self._connect(seal, now_s)
            return False
        if publishing.is_opening or subscribing.is_opening:
            return False
        if now_s - max(self._returned_s, self._opened_s) > REPLACE_S:
            self._disconnect(TimeoutError())
            return False
        return True

    def _connect(self, seal: Seal, now_s: float) -> None:
        self._connect_at_s = now_s + self._pause_s
        self._pause_s = min(LAST_PAUSE_S, 2 * self._pause_s)
        self._opened_s = now_s
        self._publishing = StoreConnection(self._address, CONNECT_S, self._on_lost)
        self._subscribing = StoreConnection(self._address, CONNECT_S, self._on_lost, self._on_message)
        self._subscribing.send(command(b"SUBSCRIBE", seal.channel), None)

    def _on_lost(self, _was_open: bool) -> None:
        errors = [connection.error for connection in (self._publishing, self._subscribing) if connection is not None]
        self._disconnect(next((error for error in errors if error is not None), ConnectionResetError()))

    def _disconnect(self, reason: Exception) -> None:
        """Close both connections; the next period opens new ones."""
        connections, self._publishing, self._subscribing = (self._publishing, self._subscribing), None, None
        if connections == (None, None) or self._seal is None:
            return
        self.errors["connection"] += 1
        if not self._is_lost_logged:
            self._is_lost_logged, self._is_connected_logged = True, False
            text = f"{type(reason).__name__}: {reason}"[:200]
            event(logger, "shared_state_lost", level=logging.WARNING, peers=self.peers, reason=text)
        self._connect_at_s = max(self._connect_at_s, self._clock() + self._pause_s)
        for connection in connections:
            if connection is not None:
                connection.abort(reason)

    def _on_message(self, reply: list[bytes]) -> None:
        if reply[0] != b"message" or len(reply) != 3 or self._seal is None or self.view is None:
            return
        data, now_s = reply[2], self._clock()
        try:
            identity, sequence = origin_of(data)
        except error:
            self.errors["message"] += 1
            return
        if identity == self._identity:
            self._on_returned(sequence)
            return
        message = self._seal.open(data) if len(data) <= MAX_MESSAGE_BYTES else None
        if message is None:
            self.errors["message"] += 1
            return
        self.received += 1
        self.received_bytes += len(data)
        if not self.view.apply(identity, sequence, message.update, now_s):
            self.errors["order"] += 1

    def _on_returned(self, sequence: int) -> None:
        """A message of this router came back; anybody could have published its beginning, so the number is checked."""
        sent_s = self._sent_s
        while sent_s and sent_s[0][0] < sequence:
            sent_s.popleft()
        if sent_s and sent_s[0][0] == sequence:
            if not self._is_connected_logged:
                self._is_connected_logged, self._is_lost_logged = True, False
                event(logger, "shared_state_connected")
            self._returned_s, self._pause_s = sent_s.popleft()[1], FIRST_PAUSE_S
