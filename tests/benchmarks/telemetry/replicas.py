"""A thousand stand-in replicas in one process: one loopback address each, on one port.

They serve a capture of vLLM 0.32.0 under load (64 kB) with growing counters and record the time of each request,
which shows a scraper's jitter.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
from collections import defaultdict
from pathlib import Path
from time import monotonic

CAPTURE = Path(__file__).parents[2] / "data" / "vllm" / "vllm-metrics-0.32.0-busy.txt"
GROWING = re.compile(r"^(vllm:\S+?_(?:total|bucket|sum|count)(?:\{.*\})?) (\S+)$", re.MULTILINE)
VERSIONS = 32
arrivals: dict[str, list[float]] = defaultdict(list)


def grown(text: str, number: int) -> str:
    """The capture with its load repeated ``number`` times."""
    return GROWING.sub(lambda line: f"{line[1]} {float(line[2]) * (1 + number)}", text)


def responses() -> list[bytes]:
    """Complete HTTP responses in order."""
    text = CAPTURE.read_text()
    bodies = [grown(text, number).encode() for number in range(VERSIONS)]
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    )
    return [head % len(body) + body for body in bodies]


class Replica(asyncio.Protocol):
    """Serves ``/metrics`` and the recorded times."""

    responses: list[bytes]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.received = transport, b""
        self.address = transport.get_extra_info("sockname")[0]

    def data_received(self, data: bytes) -> None:
        self.received += data
        if not self.received.endswith(b"\r\n\r\n"):
            return
        if self.received.startswith(b"GET /arrivals"):
            body = json.dumps(arrivals).encode()
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        else:
            times = arrivals[self.address]
            times.append(monotonic())
            self.transport.write(self.responses[min(len(times), VERSIONS) - 1])
        self.transport.close()


async def serve() -> None:
    Replica.responses = responses()
    listener = socket.create_server(("0.0.0.0", 0), backlog=4096)
    server = await asyncio.get_running_loop().create_server(Replica, sock=listener)
    print(listener.getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    try:
        asyncio.run(serve())
    except KeyboardInterrupt:
        sys.exit(0)
