"""A pipelined connection to a Redis-compatible server: commands, and their replies in the same order (RESP 2).

Messages of channels, which are arrays, may arrive in between. It is for what is on the path of requests, or frequent:
the library's asyncio client takes 75 to 100 us of CPU a command, this 10 to 20. The library reads the settings of a
URL, such as credentials and TLS.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from redis.asyncio import ConnectionPool
from redis.exceptions import RedisError, ResponseError

from routing.log import defect

if TYPE_CHECKING:
    from redis.asyncio.connection import RedisSSLContext

MAX_REPLY_BYTES: Final = 16 << 20
MAX_LINE_BYTES: Final = 4096
MAX_PARTS: Final = 8  # of a message

Reply = bytes | Exception | None  # to a command; None: there is no value
_SIMPLE, _NUMBER, _ERROR, _BULK, _ARRAY = b"+:-$*"  # first bytes of replies

logger = logging.getLogger(__name__)


class Address(NamedTuple):
    """Where the server is, and the commands that begin each connection."""

    host: str
    port: int
    path: str | None  # of a Unix socket, instead of host and port
    tls: RedisSSLContext | None
    first: tuple[bytes, ...]

    @classmethod
    def of(cls, url: str) -> Address:
        """The address of a URL; ValueError for one that is none of redis, rediss and unix."""
        settings: Any = ConnectionPool.from_url(url).make_connection()  # type: ignore[no-untyped-call]
        first: list[bytes] = []
        if settings.password:
            first.append(command(*(name.encode() for name in ("AUTH", settings.username, settings.password) if name)))
        if settings.db:
            first.append(command(b"SELECT", b"%d" % int(settings.db)))
        path = getattr(settings, "path", None)
        host, port = ("", 0) if path else (settings.host, int(settings.port))
        return cls(host, port, path, getattr(settings, "ssl_context", None), tuple(first))


def command(*words: bytes) -> bytes:
    """A command as RESP 2, the protocol of Redis."""
    return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


class StoreConnection(asyncio.Protocol):
    """One connection, from the first command to its loss. Commands are sent at once; replies come in their order."""

    def __init__(
        self,
        address: Address,
        connect_s: float,
        on_lost: Callable[[bool], None],
        on_message: Callable[[list[bytes]], None] | None = None,
    ) -> None:
        self.is_lost = False
        self.error: Exception | None = None  # why it was lost
        self._on_message = on_message  # called with the parts of a message; None: there must be none
        self._connect_s = connect_s
        self._on_lost = on_lost  # called with whether there was a connection
        self._address = address
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []  # until there is a connection
        self._waiting: deque[Callable[[Reply], None]] = deque()
        self._pieces: list[bytes] = []  # of an incomplete reply
        self._bytes = 0
        self._needed = 0  # bytes until a reply may be complete
        self._opening = asyncio.get_running_loop().create_task(self._open())

    @property
    def is_opening(self) -> bool:
        """Whether there is no connection yet."""
        return self._transport is None and not self.is_lost

    def send(self, data: bytes, on_reply: Callable[[Reply], None] | None) -> None:
        """Send a command; ``on_reply`` is called once, with an exception if the connection is lost before the reply.

        None: a message is the reply.
        """
        if on_reply is not None:
            self._waiting.append(on_reply)
        if self._transport is None:
            self._unsent.append(data)
        else:
            self._transport.write(data)

    def close(self) -> None:
        """Close the connection once everything is sent."""
        if self._transport is None:
            self.abort(ConnectionAbortedError())
        else:
            self._transport.close()

    def abort(self, error: Exception) -> None:
        """Close the connection; all commands without a reply get the error."""
        if self.is_lost:
            return
        was_open, self.is_lost, self.error = self._transport is not None, True, error
        self._opening.cancel()
        if self._transport is not None:
            self._transport.abort()
        self._pieces.clear()
        while self._waiting:
            self._waiting.popleft()(error)
        self._on_lost(was_open)

    async def _open(self) -> None:
        loop, address = asyncio.get_running_loop(), self._address
        try:
            async with asyncio.timeout(self._connect_s):
                if address.path is not None:
                    await loop.create_unix_connection(lambda: self, address.path)
                else:
                    tls = None if address.tls is None else address.tls.get()
                    await loop.create_connection(lambda: self, address.host, address.port, ssl=tls)
        except (OSError, TimeoutError, RedisError, ValueError) as error:
            self.abort(error)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self.is_lost:
            self._transport.abort()
            return
        self._waiting.extendleft([self._on_first_reply] * len(self._address.first))
        self._transport.write(b"".join((*self._address.first, *self._unsent)))
        self._unsent.clear()

    def _on_first_reply(self, reply: Reply) -> None:
        if isinstance(reply, Exception):
            self.abort(reply)

    def connection_lost(self, error: Exception | None) -> None:
        self.abort(error or ConnectionResetError())

    def data_received(self, data: bytes) -> None:
        self._pieces.append(data)
        self._bytes += len(data)
        if self._bytes < self._needed:
            return
        try:
            self._take_replies(b"".join(self._pieces))
        except Exception as error:  # noqa: BLE001 - of what uses a reply
            defect(logger, error, "store connection")
            self.abort(ConnectionAbortedError())

    def _take_replies(self, data: bytes) -> None:
        """Call ``on_reply`` for each complete reply."""
        at, end = 0, 0
        while not self.is_lost:
            try:
                parts: list[bytes] = []
                reply, end = _reply_at(data, at, parts)
            except ValueError as error:
                self.abort(error)
                return
            if end > len(data):
                break
            at = end
            if parts and self._on_message is not None:
                self._on_message(parts)
                continue
            if parts or not self._waiting:
                self.abort(reply if isinstance(reply, Exception) else ValueError("a reply without a command"))
                return
            self._waiting.popleft()(reply)
        self._pieces = [data[at:]]
        self._bytes, self._needed = len(data) - at, end - at


def _reply_at(data: bytes, at: int, parts: list[bytes]) -> tuple[Reply, int]:
    """The reply that begins at ``at``, and where it ends: after the data if it is incomplete. ValueError for others.

    Those of a message are added to ``parts``.
    """
    end = data.find(b"\r\n", at)
    if end < 0:
        if len(data) - at > MAX_LINE_BYTES:
            raise ValueError("a line without an end")
        return None, len(data) + 1
    kind, line, end = data[at], data[at + 1 : end], end + 2
    if kind == _BULK:
        size = int(line)
        if size > MAX_REPLY_BYTES:
            raise ValueError("a reply that is too large")
        return (None, end) if size < 0 else (data[end : end + size], end + size + 2)
    if kind == _ARRAY:
        return None, _end_of_message(data, end, int(line), parts)
    if kind == _ERROR:
        return ResponseError(line.decode(errors="replace")), end
    if kind not in (_SIMPLE, _NUMBER):
        raise ValueError("not a reply")
    return line, end


def _end_of_message(data: bytes, at: int, count: int, parts: list[bytes]) -> int:
    """Where a message of ``count`` parts from ``at`` on ends, as ``_reply_at``."""
    if not 1 <= count <= MAX_PARTS:
        raise ValueError("not a message")
    for _ in range(count):
        if data[at : at + 1] == b"*":
            raise ValueError("a message in a message")
        part, at = _reply_at(data, at, parts)
        if at > len(data):
            break
        if part is None or isinstance(part, Exception):
            raise ValueError("a part of a message without a value")
        parts.append(part)
    return at


class Pending:
    """A command whose reply is awaited for at most ``timeout_s``; ``on_end`` is called once."""

    __slots__ = ("_on_end", "_timer")

    def __init__(self, timeout_s: float, on_end: Callable[[Reply], None]) -> None:
        self._on_end = on_end
        self._timer: asyncio.TimerHandle | None = asyncio.get_running_loop().call_later(timeout_s, self._on_timeout)

    def on_reply(self, reply: Reply) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._on_end(reply)

    def _on_timeout(self) -> None:
        self._timer = None
        self._on_end(TimeoutError())
