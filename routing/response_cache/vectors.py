"""The vectors of semantic caches: a bounded index in memory, and its exchange with other processes through the store.

Theory of operation. The index is exact: the vectors of a group are the rows of a matrix. It holds no text.

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

INDEX_BYTES: Final = 256 << 20  # of all groups of this process
ROW_OVERHEAD: Final = 400  # bytes of a vector in memory beside its numbers: its entry's name, scope and places
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


class _Place(NamedTuple):
    scope: bytes
    row: int


class VectorIndex:
    """The vectors of one task group, by scope; at most ``max_entries``, of which the most recently used stay.

    They are the rows of one matrix. The system gives it memory when rows are first written, and it is never copied to
    grow, which would block the event loop.
    """

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self._clear(0)

    def _clear(self, dimensions: int) -> None:
        """Begin anew with vectors of this size."""
        row_bytes = dimensions * DTYPE.itemsize + ROW_OVERHEAD
        rows = min(self.max_entries, INDEX_BYTES // row_bytes) if dimensions else 0
        self._matrix = np.empty((rows, dimensions), dtype=np.float32)
        self._expires_s = np.zeros(rows)  # Unix time
        self._unused = list(reversed(range(rows)))
        self._used_rows = 0  # so far
        self._places: OrderedDict[str, _Place] = OrderedDict()  # by entry, the most recently used last
        self._scopes: dict[bytes, dict[int, str]] = {}  # entries by row

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, scope: bytes) -> bool:
        return scope in self._scopes

    @property
    def dimensions(self) -> int:
        """Numbers of each vector; 0: there was none."""
        return int(self._matrix.shape[1])

    @property
    def memory_bytes(self) -> int:
        """Estimated memory."""
        return self._used_rows * (self.dimensions * DTYPE.itemsize + ROW_OVERHEAD)

    def may_add(self, name: str, vector: Vector) -> bool:
        """Whether a vector of another process is new here, and of the model of the others."""
        return name not in self._places and self.dimensions in {0, len(vector)}

    def resize(self, max_entries: int) -> None:
        """Keep this many vectors at most, those used last, and free the memory of the others."""
        matrix, expires_s, kept = self._matrix, self._expires_s, list(self._places.items())
        self.max_entries = max_entries
        self._clear(self.dimensions)
        for name, place in kept[-len(self._matrix) :] if len(self._matrix) else ():
            self.put(place.scope, name, matrix[place.row], float(expires_s[place.row]))

    def put(self, scope: bytes, name: str, vector: Vector, expires_s: float) -> None:
        """Add the vector of an entry, or replace it; the least recently used vectors make room."""
        if len(vector) != self.dimensions:  # the pool serves another model now
            self._clear(len(vector))
        self.remove(name)
        if not self._unused and self._places:
            self.remove(next(iter(self._places)))
        if not self._unused:
            return
        row = self._unused.pop()
        self._used_rows = max(self._used_rows, row + 1)
        self._matrix[row], self._expires_s[row] = vector, expires_s
        self._places[name] = _Place(scope, row)
        self._scopes.setdefault(scope, {})[row] = name

    def remove(self, name: str) -> None:
        """Remove the vector of an entry, if there is one."""
        place = self._places.pop(name, None)
        if place is None:
            return
        names = self._scopes[place.scope]
        del names[place.row]
        if not names:
            del self._scopes[place.scope]
        self._unused.append(place.row)

    def remove_matching(self, pattern: re.Pattern[str]) -> None:
        """Remove the vectors of the entries whose names a pattern matches."""
        for name in [name for name in self._places if pattern.match(name)]:
            self.remove(name)

    async def nearest(self, scope: bytes, vector: Vector, now: float) -> list[Match]:
        """The most similar vectors of a scope that have not expired, best first; the first one counts as used."""
        names = self._scopes.get(scope)
        if names is None or len(vector) != self.dimensions:
            return []
        matrix, expires_s = self._matrix, self._expires_s
        rows = np.fromiter(names, dtype=np.intp, count=len(names))
        parts = matrix[: self._used_rows], rows, expires_s[rows] <= now, vector
        is_large = len(rows) * len(vector) > MAX_LOOP_NUMBERS
        nearest = await asyncio.to_thread(_nearest_rows, *parts) if is_large else _nearest_rows(*parts)
        found = [
            Match(names[row], similarity_of(matrix[row], vector))  # in a thread's time, rows may have changed
            for row in nearest
            if row in names and expires_s[row] > now
        ]
        found.sort(key=lambda match: -match.similarity)
        if found and found[0].name in self._places:
            self._places.move_to_end(found[0].name)
        return found


def _nearest_rows(
    matrix: npt.NDArray[np.float32], rows: npt.NDArray[np.intp], expired: npt.NDArray[np.bool_], vector: Vector
) -> list[int]:
    """Those of the rows that have the ``CANDIDATES`` most similar vectors."""
    copies = 2 * len(rows) < len(matrix)  # most rows are of other scopes
    similarities = matrix[rows] @ vector if copies else (matrix @ vector)[rows]
    similarities[expired] = -np.inf
    if len(rows) > CANDIDATES:
        rows = rows[np.argpartition(-similarities, CANDIDATES)[:CANDIDATES]]
    return [int(row) for row in rows]


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
        if 0 < len(vector) <= MAX_DIMENSIONS and expires_s > time() and self._index.may_add(entry, vector):
            self._index.put(scope, entry, vector, expires_s)
