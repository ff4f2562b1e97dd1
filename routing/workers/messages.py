"""Questions and answers between a parent and one worker, over a pair of sockets that nobody else can reach.

Theory of operation. Each message is a length and MessagePack: a question has a number, a name and a content; its
answer has the number and a content, or facts of why there is none. Either side's end is the end of the channel, which
is how a worker learns that its parent died, and the parent that a worker did.

What a parent and a worker tell each other: how it begins, what it is to make ready, how it is.
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
Answerer = Callable[[str, Any], Awaitable[Any]]


class ChannelClosedError(Exception):
    """The other side is gone."""


class DeclinedError(Exception):
    """The other side answered that it will not; ``facts`` say why."""

    def __init__(self, **facts: Any) -> None:
        super().__init__(str(facts))
        self.facts = facts


class _Message(Struct, array_like=True):
    number: int
    question: str | None  # None: this is an answer
    content: Any = None
    declined: dict[str, Any] | None = None


_decode = msgspec.msgpack.Decoder(_Message).decode
_encode = msgspec.msgpack.Encoder().encode


class Channel:
    """One side of a channel."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Answerer) -> None:
        self._reader = reader
        self._writer = writer
        self._answer = answer
        self._numbers = count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._is_over = False

    @classmethod
    async def open(cls, end: socket.socket, answer: Answerer) -> Channel:
        """A channel over a connected socket, which it owns from now on; ``run`` makes it work."""
        reader, writer = await asyncio.open_unix_connection(sock=end)
        return cls(reader, writer, answer)

    async def ask(self, question: str, content: Any = None, *, timeout_s: float) -> Any:
        """The other side's answer; DeclinedError, ChannelClosedError or TimeoutError where there is none."""
        if self._is_over:
            raise ChannelClosedError
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._send(_Message(number, question, content))
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        finally:
            self._asked.pop(number, None)

    async def run(self) -> None:
        """Pass questions and answers on, until the other side is gone."""
        try:
            while True:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                self._take(_decode(await self._reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            self.close()

    def close(self) -> None:
        """End it; questions without an answer get none."""
        self._is_over = True
        self._writer.close()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(ChannelClosedError())

    def _take(self, message: _Message) -> None:
        if message.question is not None:
            task = asyncio.get_running_loop().create_task(self._reply(message, message.question))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
            return
        answer = self._asked.get(message.number)
        if answer is None or answer.done():
            return  # it came too late
        if message.declined is None:
            answer.set_result(message.content)
        else:
            answer.set_exception(DeclinedError(**message.declined))

    async def _reply(self, message: _Message, question: str) -> None:
        try:
            reply = _Message(message.number, None, await self._answer(question, message.content))
        except DeclinedError as error:
            reply = _Message(message.number, None, None, error.facts)
        except Exception as error:  # noqa: BLE001 - the channel's border
            defect(logger, error, f"answer to {question}")
            reply = _Message(message.number, None, None, {"reason": "internal error"})
        if not self._is_over:
            self._send(reply)

    def _send(self, message: _Message) -> None:
        data = _encode(message)
        self._writer.write(_LENGTH.pack(len(data)) + data)


class WorkerOrders(Struct, frozen=True):
    """How a worker begins; descriptors are inherited."""

    name: str  # the router's
    number: int  # the worker's slot, from 0 on
    workers: int
    channel_fd: int
    board_fd: int
    rows: int  # of the board
    row: int  # this worker's
    listening_fds: list[list[int]]  # by slot, one for each address
    tls: TlsFiles


class Preparation(Struct, frozen=True):
    """A configuration to make ready."""

    document: bytes
    columns: dict[str, int]  # of the board, by target
    rates: dict[str, int]  # slots of shared limits, by name
    gates: dict[str, int]


class WorkerStatus(Struct, frozen=True):
    """A worker at one moment."""

    metrics: str
    replicas: list[dict[str, Any]]
    in_flight: int
    first_decision: int  # the oldest that is there
    last_decision: int


def as_plain(message: Struct) -> Any:
    """For the channel."""
    return msgspec.to_builtins(message, builtin_types=(bytes,))
