"""A lower bound for a router in Python: asyncio protocols on uvloop that forward bytes without reading them.

``python -m tests.benchmarks.forwarder PORT REPLICA_PORT...`` connects each client to the next replica. It does not
parse, decide or count.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from itertools import cycle
from typing import cast

import uvloop

from routing.process import tune_garbage_collector


class Side(asyncio.Protocol):
    """One side of a pair of connections."""

    other: Side | None = None

    def __init__(self) -> None:
        self._buffered: list[bytes] = []  # data received before the other side is connected

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._buffered.append(data)
        else:
            self.other.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        if self.other is not None:
            self.other.transport.close()

    def forward_to(self, other: Side) -> None:
        """Forward all data to ``other``, buffered data first."""
        self.other = other
        for data in self._buffered:
            other.transport.write(data)


class ClientSide(Side):
    tasks: set[asyncio.Task[None]]

    def __init__(self, port: int, tasks: set[asyncio.Task[None]]) -> None:
        super().__init__()
        self._port, self._tasks = port, tasks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        task = asyncio.get_running_loop().create_task(self._connect())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self) -> None:
        _, upstream = await asyncio.get_running_loop().create_connection(Side, "127.0.0.1", self._port)
        upstream.forward_to(self)
        self.forward_to(upstream)


async def main(port: int, replicas: Sequence[int]) -> None:
    turn, tasks = cycle(replicas), set[asyncio.Task[None]]()
    server = await asyncio.get_running_loop().create_server(lambda: ClientSide(next(turn), tasks), "127.0.0.1", port)
    tune_garbage_collector()
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), [int(port) for port in sys.argv[2:]]))
