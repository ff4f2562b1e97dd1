"""Calls between a parent and one worker over a socket pair, and the messages that they exchange.

Theory of operation. Each message is a length and MessagePack: a call has a number, a method and content; its response
has the number and content, or facts about its rejection. The end of either process closes the channel, which is how a
worker learns that its parent has ended, and the parent that a worker has.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from itertools import count
from struct import Struct as Layout
from typing import Any

import msgspec
from msgspec import Struct

from routing.http.tls import TlsFiles
from routing.log import defect

logger = logging.getLogger(__name__)

_LENGTH = Layout("!I")
Handler = Callable[[str, Any], Awaitable[Any]]


class ChannelClosedError(Exception):
    """The other process has ended or closed the channel."""


class CallRejectedError(Exception):
    """The other process rejected a call; ``facts`` describe why."""

    def __init__(self, **facts: Any) -> None:
        super().__init__(str(facts))
        self.facts = facts


class _Message(Struct, array_like=True):
    number: int
    method: str | None  # None: a response
    content: Any = None
    rejection: dict[str, Any] | None = None


_decode = msgspec.msgpack.Decoder(_Message).decode
_encode = msgspec.msgpack.Encoder().encode


class Channel:
    """One end of a channel. ``handler`` executes the calls of the other process."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handler: Handler) -> None:
        self._reader = reader
        self._writer = writer
        self._handler = handler
        self._numbers = count(1)
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._handling: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @classmethod
    async def open(cls, end: socket.socket, handler: Handler) -> Channel:
        """A channel over a connected socket, which it owns from now on; ``run`` reads its messages."""
        reader, writer = await asyncio.open_unix_connection(sock=end)
        return cls(reader, writer, handler)

    async def call(self, method: str, content: Any = None, *, timeout_s: float) -> Any:
        """The other process's response; CallRejectedError, ChannelClosedError or TimeoutError without one."""
        if self._is_closed:
            raise ChannelClosedError
        number = next(self._numbers)
        response = self._pending[number] = asyncio.get_running_loop().create_future()
        self._send(_Message(number, method, content))
        try:
            async with asyncio.timeout(timeout_s):
                return await response
        finally:
            self._pending.pop(number, None)

    async def run(self) -> None:
        """Handle messages until the other process closes the channel."""
        try:
            while True:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                self._dispatch(_decode(await self._reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            self.close()

    def close(self) -> None:
        """Close the channel; pending calls raise ChannelClosedError."""
        self._is_closed = True
        self._writer.close()
        for response in self._pending.values():
            if not response.done():
                response.set_exception(ChannelClosedError())

    def _dispatch(self, message: _Message) -> None:
        if message.method is not None:
            task = asyncio.get_running_loop().create_task(self._respond(message, message.method))
            self._handling.add(task)
            task.add_done_callback(self._handling.discard)
            return
        response = self._pending.get(message.number)
        if response is None or response.done():
            return  # the call has timed out
        if message.rejection is None:
            response.set_result(message.content)
        else:
            response.set_exception(CallRejectedError(**message.rejection))

    async def _respond(self, message: _Message, method: str) -> None:
        try:
            response = _Message(message.number, None, await self._handler(method, message.content))
        except CallRejectedError as error:
            response = _Message(message.number, None, None, error.facts)
        except Exception as error:  # noqa: BLE001 - exception boundary of the channel
            defect(logger, error, f"worker call {method}")
            response = _Message(message.number, None, None, {"reason": "internal error"})
        if not self._is_closed:
            self._send(response)

    def _send(self, message: _Message) -> None:
        data = _encode(message)
        self._writer.write(_LENGTH.pack(len(data)) + data)


class WorkerOptions(Struct, frozen=True):
    """Command line of a worker process. File descriptors are inherited."""

    name: str  # of the router
    boot: str  # of the parent
    number: int  # the worker's slot, from 0 on
    workers: int
    channel_fd: int
    memory_fd: int  # of shared limits
    rows: int  # of the memory
    row: int  # this worker's
    receiving_fd: int | None  # of datagrams; None: workers share their state by a server
    sending_fds: list[int]  # of datagrams, by row
    listening_fds: list[list[int]]  # by slot, one for each address
    tls: TlsFiles
    state_dir: str  # of the router


class Preparation(Struct, frozen=True):
    """A configuration to prepare."""

    document: bytes
    rates: dict[str, int]  # slots of shared limits, by name
    queues: dict[str, int]


class WorkerStatus(Struct, frozen=True):
    """State of a worker at one time."""

    metrics: str
    replicas: list[dict[str, Any]]
    in_flight: int
    first_decision: int  # the oldest available
    last_decision: int


def as_plain(message: Struct) -> Any:
    """A message as content of a call."""
    return msgspec.to_builtins(message, builtin_types=(bytes,))
