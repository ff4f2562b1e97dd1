"""An engine's KV event publisher on loopback ZeroMQ sockets, whose messages can be lost, damaged or replayed."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Iterable
from typing import Any

import msgspec
import zmq

from routing.kv_events.decoding import REMOVED, KvEvent

TOPIC = b"kv@engine@tiny"
BLOCK = 4  # tokens


def stored(hashes: list[int], tokens: list[int], parent: int | None = None, **fields: Any) -> dict[str, Any]:
    """A BlockStored event of blocks of ``BLOCK`` tokens."""
    known = {"block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens, "block_size": BLOCK}
    return {"type": "BlockStored", **known, "medium": "GPU", "extra_keys": [None] * len(hashes), **fields}


def removed(*hashes: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", "group_idx": 0}


def removed_event(*hashes: Any, medium: str = "GPU", group: int = 0) -> KvEvent:
    """A BlockRemoved event as decoded."""
    return KvEvent(REMOVED, list(hashes), medium=medium, group=group)


CLEARED = {"type": "AllBlocksCleared"}


def payload_of(events: Iterable[Any], rank: int = 0, at_s: float | None = None) -> bytes:
    return msgspec.msgpack.encode([time.time() if at_s is None else at_s, list(events), rank])


class KvPublisher:
    """A publisher, with a replay endpoint if ``replays``. Use it on a running loop."""

    def __init__(self, *, replays: bool = True) -> None:
        self.context = zmq.Context()
        self.sent: list[tuple[bytes, bytes]] = []
        self.answers_replays = True
        self.replays = 0  # requests received
        self.endpoint = "tcp://127.0.0.1:*"
        self.replay_endpoint: str | None = None
        self.start()
        if replays:
            self.router = self.context.socket(zmq.ROUTER)
            self.router.setsockopt(zmq.SNDHWM, 0)
            self.router.bind("tcp://127.0.0.1:*")
            self.replay_endpoint = self.router.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")
            asyncio.get_running_loop().add_reader(self.router.FD, self._answer)

    def start(self) -> None:
        """Bind; after ``stop`` to the same port."""
        self.pub = self.context.socket(zmq.XPUB)
        self.pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.pub.bind(self.endpoint)
        self.endpoint = self.pub.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")

    def stop(self) -> None:
        """End all connections, as when the process ends; its messages are gone."""
        self.pub.close(0)
        self.sent.clear()

    def has_subscriber(self) -> bool:
        """Whether a subscription has arrived since the last call that returned True."""
        try:
            return self.pub.recv(zmq.NOBLOCK)[:1] == b"\x01"
        except zmq.Again:
            return False

    def publish(self, *events: Any, is_lost: bool = False, payload: bytes | None = None) -> None:
        """Send a message, or lose it on the way."""
        number = struct.pack(">Q", len(self.sent))
        body = payload_of(events) if payload is None else payload
        self.sent.append((number, body))
        if not is_lost:
            self.pub.send_multipart([TOPIC, number, body])

    def close(self) -> None:
        if self.replay_endpoint is not None:
            asyncio.get_running_loop().remove_reader(self.router.FD)
        self.context.destroy(0)

    def _answer(self) -> None:
        while True:
            try:
                client, _, first = self.router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.replays += 1
            if not self.answers_replays:
                continue
            for number, payload in self.sent:
                if number >= first:
                    self.router.send_multipart([client, b"", TOPIC, number, payload])
            self.router.send_multipart([client, b"", b"", b"\xff" * 8, b""])
