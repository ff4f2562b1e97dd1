"""The vectors of semantic caches: a bounded index in memory, and its exchange with other processes through the store.

Theory of operation. The index is exact: the vectors of a scope are the rows of matrices. It holds no text.

The store has one stream for each task group, with the latest ``max_entries`` vectors. A process appends the vectors of
the responses that it stored, and adds those of others to its own index, which alone is searched. It reads the stream
from its beginning when the group's first request comes, then what is new every ``REFRESH_S``.

Texts can be reconstructed from embeddings, so vectors are encrypted like entries, under a key that the store does not
have. This rules out a vector index of the server itself. Needs numpy.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict, deque
from collections.abc import Callable
from time import monotonic, time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from routing.response_cache.embeddings import MAX_DIMENSIONS, Vector, similarity_of
from routing.schema import derived_key

if TYPE_CHECKING:
    import re

    from routing.response_cache.store import Store

FIRST_ROWS: Final = 4
BLOCK_ROWS: Final = 512  # of a block, which is never copied once it is full
ROW_OVERHEAD: Final = 400  # bytes of a vector in memory beside its numbers: its entry's name, twice a number, a slot
SCOPE_OVERHEAD: Final = 1500  # of a scope: its digest, its arrays and its dictionary
MAX_LOOP_NUMBERS: Final = 1 << 20  # numbers to multiply on the event loop, 0.2 ms; more of them are in a thread
CANDIDATES: Final = 3  # nearest vectors, of which the first may point at an entry that is gone
REFRESH_S: Final = 5.0
LIFETIME_S: Final = 7 * 86_400  # of the stream, without a new vector
MAX_UNSHARED: Final = 256  # vectors that wait while the store fails; the oldest are dropped
BATCH: Final = 20  # vectors of one read, about 1 ms of work
NONCE_BYTES: Final = 12
DTYPE: Final = np.dtype("<f4")

_Fields = tuple[bytes, str, float, bytes]  # scope, name of the entry, Unix time of its expiry, numbers
_decode: Final = msgspec.msgpack.Decoder(_Fields).decode
_encode: Final = msgspec.msgpack.encode


class Match(NamedTuple):
    """A vector's entry, and its similarity with the vector that was searched for."""

    name: str
    similarity: float


class _Scope:
    """The vectors of one scope: rows of blocks, in no order. Copying all of them to grow would block the event loop."""

    def __init__(self, dimensions: int) -> None:
        self.names: list[str] = []
        self.rows: dict[str, int] = {}
        self.blocks = [np.empty((FIRST_ROWS, dimensions), dtype=np.float32)]
        self.times = np.zeros((FIRST_ROWS, 2))  # Unix time of expiry, and when it was used last

    @property
    def bytes(self) -> int:
        """Estimated memory."""
        numbers = sum([block.nbytes for block in self.blocks])
        return numbers + self.times.nbytes + ROW_OVERHEAD * len(self.times) + SCOPE_OVERHEAD

    def fits(self, vector: Vector) -> bool:
        """Whether a vector has as many numbers as the others."""
        return self.blocks[0].shape[1:] == vector.shape

    def vector(self, row: int) -> Vector:
        """The vector in a row, as a view."""
        found: Vector = self.blocks[row // BLOCK_ROWS][row % BLOCK_ROWS]
        return found

    def put(self, name: str, vector: Vector, expires_s: float, now: float) -> None:
        row = self.rows.get(name)
        if row is None:
            row = self.rows[name] = len(self.names)
            self.names.append(name)
            if row == len(self.times):
                self._grow()
        self.vector(row)[:] = vector
        self.times[row] = expires_s, now

    def _grow(self) -> None:
        last = self.blocks[-1]
        if len(last) < BLOCK_ROWS:
            self.blocks[-1] = np.concatenate((last, np.empty_like(last)))
        else:
            self.blocks.append(np.empty_like(last))
        self.times = np.concatenate((self.times, np.zeros((sum(map(len, self.blocks)) - len(self.times), 2))))

    def remove(self, name: str) -> None:
        """Remove a vector; the last one takes its row."""
        row, last = self.rows.pop(name), len(self.names) - 1
        if row != last:
            moved = self.names[row] = self.names[last]
            self.rows[moved] = row
            self.vector(row)[:] = self.vector(last)
            self.times[row] = self.times[last]
        self.names.pop()

    def least_recent(self) -> str:
        """The entry whose vector was used least recently."""
        return self.names[int(np.argmin(self.times[: len(self.names), 1]))]

    async def nearest(self, vector: Vector, now: float) -> list[Match]:
        """The most similar vectors that have not expired, best first; the first one counts as used."""
        used = len(self.names)
        blocks = [block[: used - BLOCK_ROWS * at] for at, block in enumerate(self.blocks) if BLOCK_ROWS * at < used]
        parts = blocks, self.times[:used, 0] <= now, vector
        large = used * len(vector) > MAX_LOOP_NUMBERS
        rows = await asyncio.to_thread(_nearest_rows, *parts) if large else _nearest_rows(*parts)
        found = [
            Match(self.names[row], similarity_of(self.vector(row), vector))  # in a thread's time, rows may have moved
            for row in rows
            if row < len(self.names) and self.times[row, 0] > now
        ]
        found.sort(key=lambda match: -match.similarity)
        if found:
            self.times[self.rows[found[0].name], 1] = now
        return found


def _nearest_rows(blocks: list[npt.NDArray[np.float32]], expired: npt.NDArray[np.bool_], vector: Vector) -> list[int]:
    """The rows of the ``CANDIDATES`` most similar vectors."""
    similarities = np.concatenate([block @ vector for block in blocks])
    similarities[expired] = -np.inf
    if len(similarities) <= CANDIDATES:
        return list(range(len(similarities)))
    return [int(row) for row in np.argpartition(-similarities, CANDIDATES)[:CANDIDATES]]


class VectorIndex:
    """The vectors of one task group, by scope; at most ``max_entries``."""

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self.bytes = 0
        self._scopes: OrderedDict[bytes, _Scope] = OrderedDict()  # the most recently used last
        self._entries = 0

    def __len__(self) -> int:
        return self._entries

    def __contains__(self, scope: bytes) -> bool:
        return scope in self._scopes

    def may_add(self, scope: bytes, name: str, vector: Vector) -> bool:
        """Whether a vector of another process is new here, and of the model of the others in its scope."""
        found = self._scopes.get(scope)
        return found is None or (name not in found.rows and found.fits(vector))

    async def nearest(self, scope: bytes, vector: Vector, now: float) -> list[Match]:
        """The most similar vectors of a scope, best first. ``now``: Unix time."""
        found = self._scopes.get(scope)
        if found is None or not found.fits(vector):
            return []
        self._scopes.move_to_end(scope)
        return await found.nearest(vector, now)

    def put(self, scope: bytes, name: str, vector: Vector, expires_s: float, now: float) -> None:
        """Add the vector of an entry, or replace it; the least recently used vectors make room."""
        found = self._scopes.get(scope)
        if found is not None and not found.fits(vector):  # the pool serves another model now
            self._drop(scope)
            found = None
        if found is None:
            found = self._scopes[scope] = _Scope(len(vector))
            self.bytes += found.bytes
        before, entries = found.bytes, len(found.names)
        found.put(name, vector, expires_s, now)
        self.bytes += found.bytes - before
        self._entries += len(found.names) - entries
        self._scopes.move_to_end(scope)
        while self._entries > self.max_entries:
            oldest, found = next(iter(self._scopes.items()))
            self.remove(oldest, found.least_recent())

    def remove(self, scope: bytes, name: str) -> None:
        """Remove a vector whose entry is gone."""
        found = self._scopes.get(scope)
        if found is None or name not in found.rows:
            return
        if len(found.names) == 1:
            self._drop(scope)
        else:
            found.remove(name)
            self._entries -= 1

    def remove_matching(self, pattern: re.Pattern[str]) -> None:
        """Remove the vectors of the entries whose names a pattern matches."""
        for scope, found in list(self._scopes.items()):
            for name in [name for name in found.names if pattern.match(name)]:
                self.remove(scope, name)

    def shrink(self) -> None:
        """Free memory: remove the less recently used half of the least recently used scope."""
        scope, found = next(iter(self._scopes.items()))
        self._drop(scope)
        if (kept := len(found.names) // 2) > 1:
            rows = np.argsort(-found.times[: len(found.names), 1], kind="stable")[:kept]
            self._scopes[scope] = half = _Scope(found.blocks[0].shape[1])
            self._scopes.move_to_end(scope, last=False)
            for row in rows:
                expires_s, used_s = found.times[row]
                half.put(found.names[row], found.vector(row), expires_s, used_s)
            self.bytes += half.bytes
            self._entries += kept

    def _drop(self, scope: bytes) -> None:
        found = self._scopes.pop(scope)
        self.bytes -= found.bytes
        self._entries -= len(found.names)


# --- sharing ---


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
