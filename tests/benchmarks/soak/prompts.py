"""Unique requests, and clients that keep a number of them in progress."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from routing.observability.decision_log import MAX_RECORDS

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: soak\r\nContent-Length: %d\r\n\r\n"
RESPONSE_TIMEOUT_S = 60.0  # of a client


def request(number: int, *, stream: bool = False, words: int = 40) -> bytes:
    """Request with this number; the number is its user and starts its prompt."""
    prompt = f"{number} " + "Say something that nobody has said before. " * words
    document = {
        "model": "tiny",
        "stream": stream,
        "user": str(number),
        "messages": [{"role": "user", "content": prompt}],
    }
    body = json.dumps(document).encode()
    return CHAT % len(body) + body


def number_of(body: bytes) -> int:
    return int(json.loads(body)["user"])


def unchunked(framed: bytes) -> bytes:
    body, at = b"", 0
    while (end := framed.find(b"\r\n", at)) > 0 and (size := int(framed[at:end], 16)):
        body += framed[end + 2 : end + 2 + size]
        at = end + 4 + size
    return body


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def request(self, data: bytes) -> tuple[int, bytes]:
        async with asyncio.timeout(RESPONSE_TIMEOUT_S):
            self._writer.write(data)
            headers = await self._reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line[15:]) for line in headers.lower().split(b"\r\n") if line.startswith(b"content-length:")
            )
            await self._reader.readexactly(length)
        return int(headers.split(b" ", 2)[1]), headers


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Connection(reader, writer)
    finally:
        writer.transport.abort()


async def fill_decision_log(port: int) -> None:
    """Send requests until the router's decision log is full, so that further growth is a leak."""
    numbers = iter(range(1 << 40, (1 << 40) + MAX_RECORDS + MAX_RECORDS // 10))

    async def keep_requesting() -> None:
        async with connected(port) as connection:
            for number in numbers:
                await connection.request(request(number))

    await asyncio.gather(*(keep_requesting() for _ in range(16)))
