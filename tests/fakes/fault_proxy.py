"""A TCP proxy between a router and a replica that injects network faults.

Each connection's fault, and the byte of the response at which it starts, come from a seed; a connection that
survives its fault gets another one. The faults of a run are reproducible; which request gets which fault depends on
timing.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum

from tests.fakes.replica import FakeReplica

DELAY_S = 0.01  # scale of a delay and of the pauses between trickled bytes


class Fault(StrEnum):
    """What happens to a connection from a certain byte on."""

    NONE = "none"
    RESET = "reset"  # closed at once; data in flight is lost
    CLOSE = "close"  # closed gracefully
    DELAY = "delay"  # forwarded completely after a short delay
    TRICKLE = "trickle"  # forwarded byte by byte
    TEAR = "tear"  # forwarded in pieces of random sizes
    REFUSE = "refuse"  # closed before a byte was read


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """The next fault of a connection."""

    fault: Fault
    after_bytes: int  # bytes of the response before the fault


class FaultProxy:
    """The proxy of one replica; configure the router with ``url`` and ``name``."""

    def __init__(
        self, replica: FakeReplica, seed: int, faults: Sequence[Fault], within_bytes: int, *, again: bool
    ) -> None:
        self.name = replica.name
        self.port = 0
        self.faults = list(faults)
        self.injected: Counter[Fault] = Counter()
        self._replica = replica
        self._chance = random.Random(seed)
        self._again = again  # whether a surviving connection gets another fault
        self._within_bytes = within_bytes  # faults begin within this many bytes of a response
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def open(self) -> int:
        """Connections in progress."""
        return len(self._tasks)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _plan(self, chance: random.Random) -> PlannedFault:
        return PlannedFault(chance.choice(self.faults), chance.randrange(self._within_bytes))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        try:
            await self._relay(reader, writer)
        except (ConnectionError, RuntimeError, asyncio.CancelledError):
            pass  # uvloop raises RuntimeError for a write to a closed connection
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await reader.read(65536)
        is_probe = first.startswith(b"GET /health ")
        chance = (
            None if is_probe else random.Random(self._chance.getrandbits(32))
        )  # health checks get no faults and draw no random numbers
        if not first:
            return
        planned = PlannedFault(Fault.NONE, 1 << 60) if chance is None else self._plan(chance)
        if planned.fault is Fault.REFUSE:
            self.injected[Fault.REFUSE] += 1
            return
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._replica.port)
        try:
            upstream_writer.write(first)
            forwarding = asyncio.create_task(_forward_request(reader, upstream_writer))
            try:
                await self._forward_response(upstream_reader, writer, planned, chance)
            finally:
                forwarding.cancel()
                with suppress(asyncio.CancelledError, ConnectionError):
                    await forwarding
        finally:
            upstream_writer.transport.abort()

    async def _forward_response(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        planned: PlannedFault,
        chance: random.Random | None,
    ) -> None:
        left = planned.after_bytes
        while data := await reader.read(65536):
            if len(data) <= left or chance is None:
                left -= len(data)
                writer.write(data)
            else:
                writer.write(data[:left])
                self.injected[planned.fault] += 1
                if not await _apply(planned.fault, chance, data[left:], writer):
                    return
                planned = self._plan(chance)
                left = planned.after_bytes if self._again else 1 << 60
            await writer.drain()
        writer.close()
        await writer.wait_closed()


async def _apply(fault: Fault, chance: random.Random, data: bytes, writer: asyncio.StreamWriter) -> bool:
    """Apply the fault to these bytes; False if it ends the connection."""
    if fault is Fault.RESET:
        return False
    if fault is Fault.CLOSE:
        writer.close()
        await writer.wait_closed()
        return False
    if fault not in {Fault.TRICKLE, Fault.TEAR}:
        await asyncio.sleep(chance.random() * 5 * DELAY_S * (fault is Fault.DELAY))
        writer.write(data)
        return True
    while data:
        size = 1 if fault is Fault.TRICKLE else chance.randrange(1, 40)
        writer.write(data[:size])
        await writer.drain()
        data = data[size:]
        await asyncio.sleep(DELAY_S * chance.random() / 4)
    return True


async def _forward_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward the router's bytes and its close."""
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.transport.abort()


@asynccontextmanager
async def fault_proxies(
    replicas: Sequence[FakeReplica], seed: int, faults: Sequence[Fault], within_bytes: int, *, again: bool = True
) -> AsyncIterator[list[FaultProxy]]:
    """One proxy in front of each replica."""
    proxies = [
        FaultProxy(replica, seed + number, faults, within_bytes, again=again) for number, replica in enumerate(replicas)
    ]
    for proxy in proxies:
        await proxy.start()
    try:
        yield proxies
    finally:
        for proxy in proxies:
            await proxy.stop()
