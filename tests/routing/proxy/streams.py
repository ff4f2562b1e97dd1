"""Streams at a fixed rate, each timed to its first byte."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field

from tests.fakes.replica import sse
from tests.routing.proxy.harness import BODY, Harness

STREAM = json.dumps({**json.loads(BODY), "stream": True}).encode()
WHOLE = b"".join(sse({"n": number}) for number in range(3))


@dataclass
class Load:
    """Streams at a fixed rate, each timed to its first byte; fails if a client sees an error."""

    harness: Harness
    rate: float
    body: bytes = STREAM
    ttft_s: list[float] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        for number in range(int(seconds * self.rate)):
            await asyncio.sleep(max(0.0, started_at + number / self.rate - loop.time()))
            self.tasks.add(asyncio.create_task(self.ask()))

    async def ask(self) -> None:
        started_at = time.perf_counter()
        response = await self.harness.chat(self.body)
        assert (response.status, response.body) == (200, WHOLE)
        self.ttft_s.append(time.perf_counter() - started_at)

    async def ended(self) -> None:
        async with asyncio.timeout(20):
            await asyncio.gather(*self.tasks)


def p95(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.95)]
