"""A load generator process; prints its measurements as JSON.

``python -m tests.benchmarks.load paced PORT SECONDS CONNECTIONS RATE`` sends plain requests by a Poisson process,
without waiting for responses. Each is timed from when it was sent or, without a free connection, from when it was
due, so waiting for the proxy counts and late wake-ups of this process do not. ``... streams PORT SECONDS
CONNECTIONS`` keeps event streams open and counts events. ``... closed PORT SECONDS CONNECTIONS`` sends the next
request after each response; it is used if wrk is not installed.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import deque
from itertools import count
from random import Random
from typing import cast

import uvloop

from tests.benchmarks.alarm import Alarm

PROMPT_BYTES = 8192
SESSIONS = 64


def request(session: int, number: int = 0, *, stream: bool = False) -> bytes:
    """An 8 KiB chat request of one of ``SESSIONS`` sessions."""
    before, between, after = request_parts(session, stream=stream)
    return before + trace_id(number) + between + trace_id(number) + after


def trace_id(number: int) -> bytes:
    """Value of the two headers that identify a request."""
    return b"%032x" % (number + 1)


def request_parts(
    session: int, *, stream: bool = False, prompt_bytes: int = PROMPT_BYTES
) -> tuple[bytes, bytes, bytes]:
    """A request without its two ids, with headers as tracing libraries and gateways send them."""
    text = f"session {session}: " + "lorem ipsum dolor sit amet " * (prompt_bytes // 27)
    messages = [{"role": "system", "content": text[: prompt_bytes - 200]}, {"role": "user", "content": "Go on."}]
    body = json.dumps(({"stream": True} if stream else {}) | {"model": "tiny", "messages": messages}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nAccept: */*\r\nUser-Agent: bench\r\n"
    head += b"Authorization: Bearer sk-bench\r\nContent-Type: application/json\r\nX-Session-ID: %d\r\n" % session
    after = b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    return head + b"traceparent: 00-", b"-00f067aa0ba902b7-01\r\nX-Request-ID: ", after


class Connection(asyncio.Protocol):
    """Sends one request at a time; detects the end of a response by its last bytes."""

    def __init__(self, load: Load, session: int) -> None:
        self._load = load
        self._parts = request_parts(session, stream=load.kind == "streams")
        self._due = 0.0
        self._received = 0
        self._expected = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._load.on_connected(self)

    def send(self, due: float) -> None:
        self._due = due
        self._received = self._expected = 0
        before, between, after = self._parts
        request_id = trace_id(self._load.next_number())
        self._transport.write(before + request_id + between + request_id + after)

    def data_received(self, data: bytes) -> None:
        if self._load.kind == "streams":
            self._load.events += data.count(b"data: {")
            if data.endswith(b"0\r\n\r\n"):
                self._load.on_response(self, self._due)
            return
        if not self._expected:
            end = data.index(b"\r\n\r\n")
            at = data.lower().index(b"content-length:")
            self._expected = end + 4 + int(data[at + 15 : data.index(b"\r\n", at)])
        self._received += len(data)
        if self._received >= self._expected:
            self._load.on_response(self, self._due)

    def connection_lost(self, _: Exception | None) -> None:
        self._load.lost += 1


class Load:
    def __init__(self, kind: str, rate: float) -> None:
        self.kind = kind
        self.loop = asyncio.get_running_loop()
        self.events = self.lost = 0
        self.latencies: list[float] = []
        self._rate = rate
        self._idle: list[Connection] = []
        self._due: deque[float] = deque()
        self._random = Random(1)
        self._numbers = count()

    def next_number(self) -> int:
        return next(self._numbers)

    def on_connected(self, connection: Connection) -> None:
        if self.kind == "paced":
            self._idle.append(connection)
        else:
            connection.send(self.now())

    def on_response(self, connection: Connection, due: float) -> None:
        self.latencies.append(self.now() - due)
        if self.kind != "paced":
            connection.send(self.now())
        elif self._due:
            connection.send(self._due.popleft())
        else:
            self._idle.append(connection)

    def start_pacing(self) -> None:
        self._alarm = Alarm(self.loop, self._pace)
        self._next = self.now()
        self._pace()

    def _pace(self) -> None:
        """Send the requests that are due, and schedule the next."""
        now = self.now()
        while self._next <= now:
            if self._idle:
                self._idle.pop().send(self.now())
            else:
                self._due.append(self._next)
            self._next += self._random.expovariate(self._rate)
        self._alarm.set(self._next)

    @staticmethod
    def now() -> float:
        return time.perf_counter()


def warm_up_s(seconds: float) -> float:
    """Warm-up time of a run, in seconds."""
    return min(1.0, seconds / 4)


async def main(kind: str, port: int, seconds: float, connections: int, rate: float) -> None:
    load = Load(kind, rate)
    for number in range(connections):
        await load.loop.create_connection(lambda n=number: Connection(load, n % SESSIONS), "127.0.0.1", port)
    if kind == "paced":
        load.start_pacing()
    await asyncio.sleep(warm_up_s(seconds))
    load.latencies.clear()
    load.events = 0
    started = load.now()
    await asyncio.sleep(seconds)
    elapsed_s = load.now() - started
    latencies = sorted(load.latencies)
    result = {"requests": len(latencies), "seconds": elapsed_s, "events": load.events, "lost": load.lost}
    if latencies:
        result |= {"p50_s": latencies[len(latencies) // 2], "p99_s": latencies[int(len(latencies) * 0.99)]}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    kind, port, seconds, connections, *rate = sys.argv[1:]
    uvloop.run(main(kind, int(port), float(seconds), int(connections), float(*rate or [1.0])))
