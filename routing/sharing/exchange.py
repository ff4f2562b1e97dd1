"""The exchange of updates with all routers of a fleet, beside requests and never on their path.

Theory of operation. Every ``PERIOD_S`` a router publishes what has changed, on one channel for the whole fleet, by its
transport: a Redis-compatible server, or datagrams between workers. Nothing is stored: a server that is flushed loses
nothing, and one whose memory is full still delivers. A router without peers publishes heartbeats only. Each worker of a
router is a router here, with an identity that begins with what they have in common.

The router hears its own messages too, which shows how old its view is without comparing clocks: if the newest one that
came back was sent more than ``SILENT_S`` ago, whatever the cause, it counts no peers, and decides as if it were alone.
Bytes are limited: ``MAX_BYTES_PER_S`` published, prompts that exceed it are left out.

Messages are sealed with a key that a server does not have: the identity of the router's process, a sequence number, a
nonce and the update in MessagePack, encrypted with AES-256-GCM. Channel, identity and number are authenticated with it.
Key and channel follow from the fleet's ``hash_secret``, so fleets that share a server do not see each other, and
messages of anybody without the key are ignored.
"""

from __future__ import annotations

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
from routing.observability.metrics import PREFIX, header, labels
from routing.schema import derived_key
from routing.sharing.transports import MAX_MESSAGE_BYTES, Transport
from routing.sharing.view import MAX_ANSWER_BYTES, PERIOD_S, SILENT_S, WHOLE_S, OwnState, SharedView, Update
from routing.types import TargetId

MAX_BYTES_PER_S: Final = 4 << 20
BURST_S: Final = 0.25  # of these bytes

VERSION: Final = 1
IDENTITY_BYTES: Final = 8
ROUTER_BYTES: Final = 4  # of these: what the processes of one router have in common
_HEADER: Final = Layout(f"!{IDENTITY_BYTES}sQ")
_NONCE_BYTES: Final = 12

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Update).decode


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

    def __init__(self, transport: Transport, router: str = "") -> None:
        """``router``: what the processes of one router have in common, in hexadecimal; "": there is only one."""
        self.transport = transport
        self._router = bytes.fromhex(router)[:ROUTER_BYTES]
        self._seal: Seal | None = None  # None: there is no configuration yet
        self._secret = ""
        self._identity = b""
        self._own: OwnState | None = None
        self.view: SharedView | None = None
        self._clock = monotonic  # the load tracker's, once it is bound
        self._sequence = 0
        self._sent_s: deque[tuple[int, float]] = deque(maxlen=256)  # numbers of own messages, and when they were sent
        self._returned_s = -inf  # when the newest own message that came back was sent
        self._whole_s = -inf  # when the last whole update was sent
        self._budget_bytes, self._budget_s = 0.0, -inf
        self._periodic = Periodic(Background.SHARING, PERIOD_S, self._run, reads_first=True)
        self.published_bytes = self.received_bytes = self.published = self.received = 0
        self.errors: Counter[str] = transport.errors

    def bind(self, identity: str, loads: LoadTracker, residency: Residency) -> None:
        """Share the state of a router. ``identity``: different each time its process starts, in hexadecimal."""
        self._identity = (self._router + bytes.fromhex(identity))[:IDENTITY_BYTES].rjust(IDENTITY_BYTES, b"\0")
        self._clock = loads.clock
        self._own, self.view = OwnState(loads, residency), SharedView(loads, residency)
        self.view.identity = self._identity

    def configure(self, hash_secret: str, targets: Iterable[TargetId]) -> None:
        """Share the loads of these targets with routers that have this secret; starts the exchange at first."""
        own, view, configured = self._own, self.view, set(targets)
        if own is None or view is None:
            raise ValueError("not bound to a router")
        own.configure(configured)
        view.configure(configured)
        if hash_secret != self._secret:
            self._secret, self._seal = hash_secret, Seal(hash_secret)
            self.transport.join(self._seal.channel, self._on_message)
        self._periodic.start()

    @property
    def age_s(self) -> float | None:
        """How old the view of peers may be; None while there is none."""
        age_s = self._clock() - self._returned_s
        return age_s if age_s <= SILENT_S else None

    @property
    def peers(self) -> int:
        """Other routers that this process hears; the processes of one router count once, its own not."""
        peers = {} if self.view is None else self.view.peers
        routers = {identity[:ROUTER_BYTES] for identity, peer in peers.items() if peer.is_counted}
        return len(routers - {self._identity[:ROUTER_BYTES]})

    @property
    def not_published(self) -> int:
        """Prompts that were not published, because too many bytes were."""
        return 0 if self._own is None else self._own.not_published

    def lines(self) -> Iterator[str]:
        """Prometheus text."""
        if self.view is None:
            return
        if self.transport.reaches_routers:
            yield from header("shared_state_peers", "gauge", "Other routers that this one hears, whose loads count.")
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
        if self.view is not None and self.view.counted and self._seal is not None and self._own is not None:
            self._own.configure(())
            self._publish(self._seal, self._own, self._clock(), is_whole=True)
        self._seal = None
        self.transport.close()

    # --- every period ---

    def _run(self) -> None:
        own, view, seal, now_s = self._own, self.view, self._seal, self._clock()
        if own is None or view is None or seal is None:
            return
        view.expire(now_s, is_connected=now_s - self._returned_s <= SILENT_S)
        view.restore()
        own.set_peers(view.counted)
        is_whole = now_s - self._whole_s >= WHOLE_S
        if self.transport.is_ready(now_s, self._returned_s) and (view.counted or is_whole):
            self._publish(seal, own, now_s, is_whole=is_whole)
            max_bytes = min(MAX_ANSWER_BYTES, self.transport.max_bytes)
            answer = view.answer(now_s, max_bytes) if self._budget_bytes >= max_bytes else None
            if answer is not None:
                self._send(seal, answer, now_s)

    def _publish(self, seal: Seal, own: OwnState, now_s: float, *, is_whole: bool) -> None:
        elapsed_s = min(BURST_S, now_s - self._budget_s)
        self._budget_s = now_s
        self._budget_bytes = min(BURST_S * MAX_BYTES_PER_S, self._budget_bytes + elapsed_s * MAX_BYTES_PER_S)
        max_bytes = min(self._budget_bytes, self.transport.max_bytes)
        update = own.take(now_s, is_whole=is_whole, max_bytes=max_bytes)
        if update is None:
            return
        if is_whole:
            self._whole_s = now_s
            update.asks = self.view is not None and self.view.asks
        self._send(seal, update, now_s)

    def _send(self, seal: Seal, update: Update, now_s: float) -> None:
        self._sequence += 1
        data = seal.close(Message(self._identity, self._sequence, update))
        self._budget_bytes -= len(data)
        self._sent_s.append((self._sequence, now_s))
        self.published += 1
        self.published_bytes += len(data)
        self.transport.send(data)

    def _on_message(self, data: bytes) -> None:
        if self._seal is None or self.view is None:
            return
        now_s = self._clock()
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
            self._returned_s = sent_s.popleft()[1]
