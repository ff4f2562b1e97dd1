"""The vectors of a semantic cache in the store, for the other processes of all routers and for later ones.

Theory of operation. The store has one stream for each task group, with the latest ``max_entries`` vectors. A process
appends the vectors of the responses that it stored, and adds those of others to its own index, which alone is searched.
It reads the stream from its beginning when the group's first request comes, then what is new every ``REFRESH_S``.

Texts can be reconstructed from embeddings, so vectors are encrypted like entries, under a key that the store does not
have. This rules out a vector index of the server itself.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from time import monotonic, time
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from routing.response_cache.embeddings import MAX_DIMENSIONS, VectorIndex
from routing.schema import derived_key

if TYPE_CHECKING:
    from routing.response_cache.embeddings import Vector
    from routing.response_cache.store import Store

REFRESH_S: Final = 5.0
LIFETIME_S: Final = 7 * 86_400  # of the stream, without a new vector
MAX_UNSHARED: Final = 256  # vectors that wait while the store fails; the oldest are dropped
BATCH: Final = 50  # vectors of one read, about 1 ms of work
NONCE_BYTES: Final = 12
DTYPE: Final = np.dtype("<f4")

_Fields = tuple[bytes, str, float, bytes]  # scope, name of the entry, Unix time of its expiry, numbers
_decode: Final = msgspec.msgpack.Decoder(_Fields).decode
_encode: Final = msgspec.msgpack.encode


class SharedVectors:
    """One group's vectors in the store. ``name``: of the stream. ``on_read`` is called after each batch."""

    def __init__(
        self, name: str, hash_secret: str, store: Store, index: VectorIndex, on_read: Callable[[], None]
    ) -> None:
        self.name = name
        self._cipher = AESGCM(derived_key(hash_secret, "semantic cache vectors"))
        self._store = store
        self._index = index
        self._on_read = on_read
        self._unshared: deque[bytes] = deque(maxlen=MAX_UNSHARED)
        self._after = "0"  # the last vector that was read
        self._refresh_at = 0.0
        self._is_sharing = False

    def add(self, scope: bytes, entry: str, vector: Vector, expires_s: float) -> None:
        """Share a vector of this process's index, with the next ``share``."""
        data = _encode((scope, entry, expires_s, vector.astype(DTYPE).tobytes()))
        nonce = os.urandom(NONCE_BYTES)
        self._unshared.append(nonce + self._cipher.encrypt(nonce, data, self.name.encode()))

    def should_share(self) -> bool:
        """Whether the store has to be read or written now."""
        return not self._is_sharing and (bool(self._unshared) or monotonic() >= self._refresh_at)

    def forget(self) -> None:
        """Drop the vectors that were not shared yet, because entries were purged."""
        self._unshared.clear()

    async def share(self) -> None:
        """Write new vectors to the store and read those of others; what fails is tried again later."""
        if self._is_sharing:
            return
        self._is_sharing, self._refresh_at = True, monotonic() + REFRESH_S
        try:
            await self._write()
            while await self._read() == BATCH:
                pass
        finally:
            self._is_sharing = False

    async def _write(self) -> None:
        written = list(self._unshared)
        if not written:
            return
        limit = "MAXLEN", "~", self._index.max_entries
        commands: list[tuple[str | int | bytes, ...]] = [
            ("XADD", self.name, *limit, "*", "v", data) for data in written
        ]
        if await self._store.execute([*commands, ("EXPIRE", self.name, LIFETIME_S)]) is None:
            return
        for data in written:
            if self._unshared and self._unshared[0] is data:
                self._unshared.popleft()

    async def _read(self) -> int:
        """Add the next vectors to the index; how many the store had."""
        replies = await self._store.execute([("XRANGE", self.name, f"({self._after}", "+", "COUNT", BATCH)])
        records: list[tuple[bytes, dict[bytes, bytes]]] = replies[0] if replies else []
        for number, fields in records:
            self._take(fields.get(b"v", b""))
            self._after = number.decode()
        self._on_read()
        return len(records)

    def _take(self, data: bytes) -> None:
        """Add a vector to the index, unless it is there, has expired, is of another model or was changed."""
        try:
            text = self._cipher.decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], self.name.encode())
            scope, entry, expires_s, numbers = _decode(text)
        except (InvalidTag, msgspec.DecodeError, ValueError):
            self._store.errors["invalid_vector"] += 1
            return
        vector: Any = np.frombuffer(numbers, DTYPE)
        if 0 < len(vector) <= MAX_DIMENSIONS and expires_s > time() and self._index.may_add(scope, entry, vector):
            self._index.put(scope, entry, vector, expires_s, time())
