"""Requests of which no two are alike, and a driver that keeps so many going."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from routing.observability.decision_log import MAX_RECORDS

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: soak\r\nContent-Length: %d\r\n\r\n"
ANSWER_S = 60.0  # a client waits no longer


def request(number: int, *, stream: bool = False, words: int = 40) -> bytes:
    """The so-and-so-many-th one: its number is its user, and its prompt's opening."""
    said = f"{number} " + "Say something that nobody has said before. " * words
    wanted = {"model": "tiny", "stream": stream, "user": str(number), "messages": [{"role": "user", "content": said}]}
    body = json.dumps(wanted).encode()
    return CHAT % len(body) + body


def number_of(body: bytes) -> int:
    """Which request this is the body of."""
    return int(json.loads(body)["user"])


def unchunked(framed: bytes) -> bytes:
    """The body in chunks."""
    body, at = b"", 0
    while (end := framed.find(b"\r\n", at)) > 0 and (size := int(framed[at:end], 16)):
        body += framed[end + 2 : end + 2 + size]
        at = end + 4 + size
    return body


class Connection:
    """A kept-alive connection that asks for plain answers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def ask(self, sent: bytes) -> tuple[int, bytes]:
        """Status and head of a whole answer."""
        async with asyncio.timeout(ANSWER_S):
            self._writer.write(sent)
            head = await self._reader.readuntil(b"\r\n\r\n")
            length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await self._reader.readexactly(length)
        return int(head.split(b" ", 2)[1]), head


@asynccontextmanager
async def on_connected(port: int) -> AsyncIterator[Connection]:
    """A connection for the length of a block."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Connection(reader, writer)
    finally:
        writer.transport.abort()


async def warmed(port: int) -> None:
    """Ask until a router's record of decisions is full, so that what it still grows by is a leak."""
    numbers = iter(range(1 << 40, (1 << 40) + MAX_RECORDS + MAX_RECORDS // 10))

    async def keep_asking() -> None:
        async with on_connected(port) as connection:
            for number in numbers:
                await connection.ask(request(number))

    await asyncio.gather(*(keep_asking() for _ in range(16)))
