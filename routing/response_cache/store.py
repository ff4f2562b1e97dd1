"""The Redis-compatible server in which routers share the entries of response caches.

The server holds ciphertext under a key that it does not have (AES-256-GCM; the entry's name is authenticated with it,
so that no entry can be served under another name). A lookup takes at most ``LOOKUP_S``; a server that is slow, full,
down or answers garbage costs a miss. After ``FAILURES`` in a row it is not asked for a while, at first
``FIRST_PAUSE_S``, doubled up to ``LAST_PAUSE_S`` while single probes fail.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any, Final

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from redis.asyncio import BlockingConnectionPool, Redis
from redis.exceptions import RedisError

from routing.response_cache.memory import PURGE_S, Entry, StorePurge

LOOKUP_S: Final = 0.005
WRITE_S: Final = 0.25
CONNECTIONS: Final = 16
MAX_PENDING_WRITES: Final = 256
FAILURES: Final = 5
FIRST_PAUSE_S: Final = 1.0
LAST_PAUSE_S: Final = 30.0
NONCE_BYTES: Final = 12
PURGE_CALL_S: Final = 5.0  # of one command of a purge
PURGE_BATCH: Final = 1000  # names that one SCAN looks at, and one UNLINK removes


_decode_entry: Final = msgspec.msgpack.Decoder(Entry).decode
_encode: Final = msgspec.msgpack.encode


class Pause:
    """Whether the server may be asked: a circuit breaker with one probe at a time."""

    def __init__(self) -> None:
        self._failures = 0
        self._until = 0.0
        self._pause_s = FIRST_PAUSE_S

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
        return True

    def record_success(self) -> None:
        self._failures, self._pause_s = 0, FIRST_PAUSE_S

    def record_failure(self, now: float) -> None:
        self._failures += 1
        if self._failures > FAILURES:
            self._pause_s = min(LAST_PAUSE_S, 2 * self._pause_s)
        if self._failures >= FAILURES:
            self._until = now + self._pause_s


class Store:
    """The Redis-compatible server. Methods never raise for a fault of the server; ``errors`` counts them by kind."""

    def __init__(self, url: str) -> None:
        """ValueError for a URL that is none of redis, rediss and unix."""
        self._url = url
        self._pool = BlockingConnectionPool.from_url(
            url, max_connections=CONNECTIONS, timeout=LOOKUP_S, socket_timeout=WRITE_S, socket_connect_timeout=WRITE_S
        )
        self._redis = Redis(connection_pool=self._pool)
        self._pause = Pause()
        self._writes: set[asyncio.Task[None]] = set()
        self.errors: Counter[str] = Counter()

    @property
    def is_up(self) -> bool:
        """Whether lookups are sent to the server."""
        return not self._pause.is_open

    async def get(self, name: str, cipher: AESGCM) -> Entry | None:
        """The entry with a name; None if there is none, or if the server does not respond within ``LOOKUP_S``."""
        if not self._pause.may_ask(monotonic()):
            return None
        try:
            async with asyncio.timeout(LOOKUP_S):
                data = await self._redis.get(name)
        except (RedisError, OSError, TimeoutError, ValueError) as error:
            self._record_failure("lookup", error)
            return None
        self._pause.record_success()
        return self._opened(name, data, cipher) if isinstance(data, bytes) else None

    def _opened(self, name: str, data: bytes, cipher: AESGCM) -> Entry | None:
        try:
            text = cipher.decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], name.encode())
            return _decode_entry(text)
        except (InvalidTag, msgspec.DecodeError, ValueError, TypeError):
            self.errors["invalid_entry"] += 1
            return None

    def put(self, name: str, entry: Entry, cipher: AESGCM, ttl_s: int) -> None:
        """Write an entry in the background; it is dropped if ``MAX_PENDING_WRITES`` wait."""
        if len(self._writes) >= MAX_PENDING_WRITES or not self._pause.may_ask(monotonic()):
            self.errors["write_dropped"] += 1
            return
        nonce = os.urandom(NONCE_BYTES)
        data = nonce + cipher.encrypt(nonce, _encode(entry), name.encode())
        task = asyncio.get_running_loop().create_task(self._write(name, data, ttl_s))
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)

    async def _write(self, name: str, data: bytes, ttl_s: int) -> None:
        try:
            async with asyncio.timeout(WRITE_S):
                await self._redis.set(name, data, ex=ttl_s)
        except (RedisError, OSError, TimeoutError, ValueError) as error:
            self._record_failure("write", error)
        else:
            self._pause.record_success()

    async def settle(self) -> None:
        """Wait for the writes that are pending now."""
        if self._writes:
            await asyncio.wait(set(self._writes), timeout=2 * WRITE_S)

    async def purge(self, prefix: str, *, dry_run: bool) -> StorePurge:
        """Remove all entries whose names begin with a prefix, in batches; with ``dry_run``, only count them."""
        removed, is_complete = 0, False
        client = Redis.from_url(self._url, socket_timeout=PURGE_CALL_S, socket_connect_timeout=PURGE_CALL_S)
        try:
            async with asyncio.timeout(PURGE_S), client as redis:
                async for names in _scan(redis, prefix):
                    removed += len(names) if dry_run else await redis.unlink(*names)
                is_complete = True
                remaining = None if dry_run else sum([len(names) async for names in _scan(redis, prefix)])
                return StorePurge(removed, remaining)
        except (RedisError, OSError, TimeoutError, ValueError) as error:
            problem = f"the store of response caches failed ({type(error).__name__})"
            return StorePurge(removed, None, None if is_complete else problem)

    async def execute(self, commands: list[tuple[str | int, ...]]) -> list[Any] | None:
        """Run several commands in one round trip; None if any of them fails, or all take longer than ``WRITE_S``."""
        if not self._pause.may_ask(monotonic()):
            return None
        try:
            async with asyncio.timeout(WRITE_S):
                async with self._redis.pipeline() as pipeline:
                    for command in commands:
                        pipeline.execute_command(*command)
                    replies: list[Any] = await pipeline.execute()
        except (RedisError, OSError, TimeoutError, ValueError) as error:
            self._record_failure("write", error)
            return None
        self._pause.record_success()
        return replies

    def _record_failure(self, kind: str, error: Exception) -> None:
        self.errors["timeout" if isinstance(error, TimeoutError) else kind] += 1
        self._pause.record_failure(monotonic())

    async def close(self) -> None:
        """Cancel writes and close connections."""
        for task in list(self._writes):
            task.cancel()
        await asyncio.gather(*self._writes, return_exceptions=True)
        await self._pool.disconnect()


async def _scan(redis: Redis, prefix: str) -> AsyncIterator[list[bytes | str]]:
    """The names with a prefix, in batches. Each that exists from the beginning to the end is found."""
    cursor = 0
    while True:
        cursor, names = await redis.scan(cursor, match=prefix + "*", count=PURGE_BATCH)
        if names:
            yield names
        if cursor == 0:
            return
