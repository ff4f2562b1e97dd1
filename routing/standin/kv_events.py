"""Publishes KV events of the modelled engine as vLLM 0.32 does, with ``--kv-events-config``; needs pyzmq.

One message for each engine step that stored or evicted blocks. Messages are numbered from 0, and the last
``buffer_steps`` of them are sent again on request.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import zmq

from routing.simulation.engine import CacheChange, CacheCleared, StoredBlocks
from routing.standin.replica import KvEventsConfig
from routing.standin.requests import TOKEN_BYTES, token_ids

END: Final = b"\xff" * 8
_number: Final = struct.Struct(">Q")


class KvEventPublisher:
    """The sockets of a publisher; a port of ``*`` takes any free one."""

    def __init__(self, config: KvEventsConfig, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._topic = config.topic.encode()
        self._next = 0
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)  # number and payload
        self._context = zmq.Context()
        self._pub = self._socket(zmq.PUB)
        self._pub.setsockopt(zmq.SNDHWM, config.hwm)
        endpoint = _open(self._pub, config.endpoint)
        self._replay: zmq.Socket[Any] | None = None
        replay_endpoint = None
        if config.replay_endpoint is not None:
            self._replay = self._socket(zmq.ROUTER)
            self._replay.setsockopt(zmq.SNDHWM, 0)
            self._replay.bind(config.replay_endpoint)
            replay_endpoint = _bound(self._replay)
            asyncio.get_running_loop().add_reader(self._replay.FD, self._send_replays)
        self.config = msgspec.structs.replace(config, endpoint=endpoint, replay_endpoint=replay_endpoint)

    def publish(self, changes: Sequence[CacheChange]) -> None:
        """Publish the changes of one step, if there are any."""
        events = [event for change in changes if (event := self._event(change)) is not None]
        if not events:
            return
        number, payload = _number.pack(self._next), msgspec.msgpack.encode([time.time(), events, 0])
        self._next += 1
        self._sent.append((number, payload))
        self._pub.send_multipart([self._topic, number, payload])

    def close(self) -> None:
        """Close the sockets at once."""
        if self._replay is not None:
            asyncio.get_running_loop().remove_reader(self._replay.FD)
        self._context.destroy(0)

    def _socket(self, kind: int) -> zmq.Socket[Any]:
        socket: zmq.Socket[Any] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        return socket

    def _event(self, change: CacheChange) -> dict[str, Any] | None:
        """The event of one change; None for a block that never had a hash."""
        if isinstance(change, StoredBlocks):
            return self._stored(change)
        if isinstance(change, CacheCleared):
            return {"type": "AllBlocksCleared"}
        if isinstance(change, int):
            return {"type": "BlockRemoved", "block_hashes": [change], "medium": "GPU", "group_idx": 0}
        return None

    def _stored(self, stored: StoredBlocks) -> dict[str, Any]:
        size = self._block_tokens * TOKEN_BYTES
        end = stored.first + len(stored.keys)
        extra_keys = [
            ["cache_salt", stored.salt] if stored.salt and not at else None for at in range(stored.first, end)
        ]
        return {
            "type": "BlockStored",
            "block_hashes": list(stored.keys),
            "parent_block_hash": stored.parent,
            "token_ids": token_ids(stored.data[stored.first * size : end * size]),
            "block_size": self._block_tokens,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": extra_keys,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }

    def _send_replays(self) -> None:
        """Send the messages from a requested number on, and the end mark."""
        replay = self._replay
        while replay is not None:
            try:
                client, *frames = replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 2 or len(frames[1]) != _number.size:
                continue
            for number, payload in self._sent:
                if number >= frames[1]:
                    replay.send_multipart([client, b"", self._topic, number, payload])
            replay.send_multipart([client, b"", b"", END, b""])


def _open(socket: zmq.Socket[Any], endpoint: str) -> str:
    """Bind or connect by vLLM's rule; the endpoint with the port that was taken."""
    if "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://")):
        socket.bind(endpoint)
        return _bound(socket)
    socket.connect(endpoint)
    return endpoint


def _bound(socket: zmq.Socket[Any]) -> str:
    """The endpoint that a socket is bound to."""
    return bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")
