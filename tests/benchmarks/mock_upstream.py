"""Replicas that use almost no CPU: canned responses and event streams on a common timer.

``python -m tests.benchmarks.mock_upstream COUNT`` listens on COUNT ports, prints them as JSON, and exits with its
stdin. A request with ``"stream": true`` gets ``EVENTS`` events, one per tick, each in its own write.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import cast

import uvloop

TICK_S = 0.01
EVENTS = 200  # per stream
EVENT = b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":1795195643,"model":"tiny",' + (
    b'"choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}\n\n'
)
USAGE = b'"usage":{"prompt_tokens":2048,"total_tokens":2060,"prompt_tokens_details":{"cached_tokens":2032}}'
PLAIN = b'{"id":"chatcmpl-0","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant",' + (
    b'"content":"%b"},"finish_reason":"stop"}],%b}'
)
BODY = PLAIN % (b"word " * 100, USAGE)

PLAIN_RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
    len(BODY),
    BODY,
)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT_CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
_usage = b'data: {"choices":[],%b}\n\n' % USAGE
STREAM_END = b"%x\r\n%b\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n" % (len(_usage), _usage)


class EventTimer:
    """All open streams and their timer."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.left: dict[asyncio.Transport, int] = {}
        self._loop = loop
        self._next = loop.time()
        self._tick()

    def _tick(self) -> None:
        self._next = max(self._next + TICK_S, self._loop.time())
        self._loop.call_at(self._next, self._tick)
        for transport, left in list(self.left.items()):
            if left:
                transport.write(EVENT_CHUNK)
                self.left[transport] = left - 1
            else:
                transport.write(STREAM_END)
                del self.left[transport]


class ReplicaConnection(asyncio.Protocol):
    """One connection: finds each request's end by its Content-Length and responds."""

    def __init__(self, timer: EventTimer) -> None:
        self._timer = timer
        self._data = bytearray()
        self._length = 0  # of the current request, once its headers have arrived

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, _: Exception | None) -> None:
        self._timer.left.pop(self._transport, None)

    def data_received(self, data: bytes) -> None:
        self._data += data
        if not self._length:
            end = self._data.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._data[:end]).lower() + b"\r\n"
            at = head.find(b"content-length:")
            self._length = end + 4 + (int(head[at + 15 : head.index(b"\r\n", at)]) if at > 0 else 0)
        if len(self._data) >= self._length:
            self._respond(bytes(self._data))
            self._data, self._length = bytearray(), 0

    def _respond(self, request: bytes) -> None:
        if (
            b'"stream":true' in request or b'"stream": true' in request
        ):  # the first spelling if the router re-encoded the body
            self._transport.write(STREAM_HEAD)
            self._timer.left[self._transport] = EVENTS
        else:
            self._transport.write(PLAIN_RESPONSE)


async def main(count: int) -> None:
    loop = asyncio.get_running_loop()
    timer = EventTimer(loop)
    servers = [
        await loop.create_server(lambda: ReplicaConnection(timer), "127.0.0.1", 0, backlog=1024) for _ in range(count)
    ]
    sys.stdout.write(json.dumps([server.sockets[0].getsockname()[1] for server in servers]) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
