"""The Redis-compatible server in which routers share the entries of response caches.

The server holds ciphertext under a key that it does not have (AES-256-GCM; the entry's name is authenticated with it,
so that no entry can be served under another name). A lookup takes at most ``LOOKUP_S``; a server that is slow, full,
down or answers garbage costs a miss. After ``FAILURES`` in a row it is not asked for a while, at first
``FIRST_PAUSE_S``, doubled up to ``LAST_PAUSE_S`` while single probes fail.

Lookups and writes go over a connection of their own each (``store_connection.py``), because with the client library
they took more CPU than the rest of a request. What is rare goes through the library.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from time import monotonic
from typing import Any, Final

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from redis.asyncio import Redis
from redis.exceptions import RedisError

from routing.response_cache.memory import PURGE_S, Entry, StorePurge
from routing.response_cache.store_connection import Address, Pending, Reply, StoreConnection, command

LOOKUP_S: Final = 0.005
WRITE_S: Final = 0.25
CONNECT_S: Final = 0.25
MAX_PENDING_WRITES: Final = 256
FAILURES: Final = 5
FIRST_PAUSE_S: Final = 1.0
LAST_PAUSE_S: Final = 30.0
NONCE_BYTES: Final = 12
PURGE_CALL_S: Final = 5.0  # of one command of a purge
PURGE_BATCH: Final = 1000  # names that one SCAN looks at, and one UNLINK removes

# The fields of an entry: msgspec cannot read the annotations of a compiled class.
_decode_fields: Final = msgspec.msgpack.Decoder(tuple[float, float, bool, bool, bytes, int | None, int | None]).decode
_encode: Final = msgspec.msgpack.encode


class Pause:
    """Whether the server may be asked: a circuit breaker with one probe at a time."""

    def __init__(self) -> None:
        self._failures = 0
        self._until = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._is_probed = False

    @property
    def is_open(self) -> bool:
        """Whether the server failed too often and is only probed."""
        return self._failures >= FAILURES

    def may_ask(self, now: float) -> bool:
        """Whether to ask; a probe postpones the next one."""
        if self._failures < FAILURES:
            return True
        if now < self._until:
            return False
        self._until = now + self._pause_s
        self._is_probed = True
        return True

    def record_success(self) -> None:
        self._failures, self._pause_s, self._is_probed = 0, FIRST_PAUSE_S, False

    def record_failure(self, now: float) -> None:
        self._failures += 1
        if self._is_probed:
            self._pause_s, self._is_probed = min(LAST_PAUSE_S, 2 * self._pause_s), False
        elif self._failures > FAILURES:
            return  # of a command that was sent before
        if self._failures >= FAILURES:
            self._until = now + self._pause_s


class Store:
    """The Redis-compatible server. Methods never raise for a fault of the server; ``errors`` counts them by kind."""

    def __init__(self, url: str) -> None:
        """ValueError for a URL that is none of redis, rediss and unix."""
        self._url = url
        self._address = Address.of(url)
        self._redis = Redis.from_url(url, socket_timeout=WRITE_S, socket_connect_timeout=CONNECT_S)
        self._lookups: StoreConnection | None = None
        self._writes: StoreConnection | None = None
        self._pause = Pause()
        self._pending_writes = 0
        self._are_written = asyncio.Event()
        self.errors: Counter[str] = Counter()

    @property
    def is_up(self) -> bool:
        """Whether lookups are sent to the server."""
        return not self._pause.is_open

    async def get(self, name: str, cipher: AESGCM) -> Entry | None:
        """The entry with a name; None if there is none, or if the server does not respond within ``LOOKUP_S``."""
        found: asyncio.Future[Entry | None] = asyncio.get_running_loop().create_future()
        if not self.ask(name, cipher, partial(_resolve, found)):
            return None
        return await found

    def ask(self, name: str, cipher: AESGCM, on_entry: Callable[[Entry | None], None]) -> bool:
        """Call ``on_entry`` later with the result of ``get``; False if the server is not asked now."""
        if not self._pause.may_ask(monotonic()):
            return False
        connection = self._lookups = self._connection(self._lookups)
        pending = Pending(LOOKUP_S, partial(self._on_looked_up, connection, name, cipher, on_entry))
        connection.send(command(b"GET", name.encode()), pending.on_reply)
        return True

    def _connection(self, current: StoreConnection | None) -> StoreConnection:
        """The current connection, or a new one if that was lost."""
        if current is None or current.is_lost:
            return StoreConnection(self._address, CONNECT_S, self._on_lost)
        return current

    def _on_looked_up(
        self,
        connection: StoreConnection,
        name: str,
        cipher: AESGCM,
        on_entry: Callable[[Entry | None], None],
        reply: Reply,
    ) -> None:
        entry: Entry | None = None
        if isinstance(reply, Exception):
            self._record_failure("lookup", connection, reply)
        else:
            self._pause.record_success()
            entry = None if reply is None else self._opened(name, reply, cipher)
        on_entry(entry)

    def _opened(self, name: str, data: bytes, cipher: AESGCM) -> Entry | None:
        try:
            text = cipher.decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], name.encode())
            return Entry(*_decode_fields(text))
        except (InvalidTag, msgspec.DecodeError, ValueError, TypeError):
            self.errors["invalid_entry"] += 1
            return None

    def put(self, name: str, entry: Entry, cipher: AESGCM, ttl_s: int) -> None:
        """Write an entry in the background; it is dropped if ``MAX_PENDING_WRITES`` wait."""
        if self._pending_writes >= MAX_PENDING_WRITES or not self._pause.may_ask(monotonic()):
            self.errors["write_dropped"] += 1
            return
        connection = self._writes = self._connection(self._writes)
        nonce = os.urandom(NONCE_BYTES)
        data = nonce + cipher.encrypt(nonce, _encode(entry), name.encode())
        self._pending_writes += 1
        self._are_written.clear()
        pending = Pending(WRITE_S, partial(self._on_written, connection))
        connection.send(command(b"SET", name.encode(), data, b"EX", b"%d" % ttl_s), pending.on_reply)

    def _on_written(self, connection: StoreConnection, reply: Reply) -> None:
        self._pending_writes -= 1
        if not self._pending_writes:
            self._are_written.set()
        if not isinstance(reply, Exception):
            self._pause.record_success()
            return
        self._record_failure("write", connection, reply)
        if isinstance(reply, TimeoutError):
            connection.abort(reply)  # no later than now, so that a purge finds what was written

    async def settle(self) -> None:
        """Wait for the writes that are pending now."""
        if self._pending_writes:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._are_written.wait(), 2 * WRITE_S)

    async def purge(self, prefix: str, vectors: str | None, *, dry_run: bool) -> StorePurge:
        """Remove all entries whose names begin with a prefix, in batches, and a group's vectors.

        With ``dry_run``, only count the entries.
        """
        removed, is_complete = 0, False
        client = Redis.from_url(self._url, socket_timeout=PURGE_CALL_S, socket_connect_timeout=PURGE_CALL_S)
        try:
            async with asyncio.timeout(PURGE_S), client as redis:
                if vectors is not None and not dry_run:
                    await redis.unlink(vectors)
                async for names in _scan(redis, prefix):
                    removed += len(names) if dry_run else await redis.unlink(*names)
                is_complete = True
                remaining = None if dry_run else sum([len(names) async for names in _scan(redis, prefix)])
                return StorePurge(removed, remaining)
        except (RedisError, OSError, TimeoutError, ValueError) as error:
            problem = f"the store of response caches failed ({type(error).__name__})"
            return StorePurge(removed, None, None if is_complete else problem)

    async def execute(self, commands: list[tuple[str | int | bytes, ...]]) -> list[Any] | None:
        """Run several commands in one round trip; None if any of them fails, or all take longer than ``WRITE_S``."""
        if not self._pause.may_ask(monotonic()):
            return None
        try:
            async with asyncio.timeout(WRITE_S):
                async with self._redis.pipeline() as pipeline:
                    for words in commands:
                        pipeline.execute_command(*words)
                    replies: list[Any] = await pipeline.execute()
        except (RedisError, OSError, TimeoutError, ValueError) as error:
            self._record_failure("write", None, error)
            return None
        self._pause.record_success()
        return replies

    def _record_failure(self, kind: str, connection: StoreConnection | None, error: Exception) -> None:
        self.errors["timeout" if isinstance(error, TimeoutError) else kind] += 1
        if connection is not None and connection.is_opening:
            return  # it has more time than a command, and ``_on_lost`` is called if it is not opened
        self._pause.record_failure(monotonic())
        if self._pause.is_open:
            self._disconnect()

    def _on_lost(self, was_open: bool) -> None:
        if not was_open:
            self.errors["connect"] += 1
            self._pause.record_failure(monotonic())

    def _disconnect(self) -> None:
        """Close the connections, because the server may not read what it was sent."""
        for connection in (self._lookups, self._writes):
            if connection is not None and not connection.is_opening:
                connection.abort(ConnectionAbortedError())

    async def close(self) -> None:
        """Close all connections; pending writes are lost."""
        for connection in (self._lookups, self._writes):
            if connection is not None:
                connection.abort(ConnectionAbortedError())
        await self._redis.aclose()


def _resolve(future: asyncio.Future[Entry | None], entry: Entry | None) -> None:
    if not future.done():
        future.set_result(entry)


async def _scan(redis: Redis, prefix: str) -> AsyncIterator[list[bytes | str]]:
    """The names with a prefix, in batches. Each that exists from the beginning to the end is found."""
    cursor = 0
    while True:
        cursor, names = await redis.scan(cursor, match=prefix + "*", count=PURGE_BATCH)
        if names:
            yield names
        if cursor == 0:
            return
