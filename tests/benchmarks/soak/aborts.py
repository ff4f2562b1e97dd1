"""Clients that disconnect at every stage of a request.

A client disconnects inside its headers or body, while it waits, or after the first event. The replica's connection
must be closed within a second of the disconnect or of the request's arrival, whichever is later; afterwards no
memory, sockets or tasks may be left.
"""

from __future__ import annotations

import asyncio
import random

from tests.benchmarks.soak.prompts import fill_decision_log, number_of, request
from tests.benchmarks.soak.stand import Figures, RouterProcess, pool_of, router_process
from tests.benchmarks.soak.verdict import Verdict
from tests.fakes.replica import STREAM_HEAD, Call, FakeReplica, chunk, fake_replicas, plain_answer, sse

CONCURRENCY = 32
WARM_UP = 0.5  # share of the aborts; they fill the decision log
CANCELLED_S = 1.0
EVENT = chunk(sse({"n": 1}))


class DisconnectingClients:
    """Clients that disconnect, and the delays after which replicas noticed."""

    def __init__(self, seed: int) -> None:
        self.delays_s: list[float] = []
        self.arrived = 0
        self._chance = random.Random(seed)
        self._left: dict[int, float] = {}
        self._loop = asyncio.get_running_loop()

    def script(self, replica: FakeReplica) -> None:
        """Send one event to every other request, then wait until the router closes the connection."""

        async def script(call: Call) -> None:
            replica.calls.clear()
            if b'"stream": false' in call.body:
                await call.send(plain_answer(b"{}"))
                return
            number, arrived_at = number_of(call.body), self._loop.time()
            self.arrived += 1
            try:
                if number % 2:
                    await call.send(STREAM_HEAD, EVENT)
                await call.wait_gone()
            finally:
                self.delays_s.append(self._loop.time() - max(arrived_at, self._left.pop(number, arrived_at)))

        replica.script = script

    async def disconnect_all(self, port: int, numbers: range) -> None:
        remaining = iter(numbers)

        async def keep_disconnecting() -> None:
            for number in remaining:
                await self._disconnect(port, number)

        await asyncio.gather(*(keep_disconnecting() for _ in range(CONCURRENCY)))

    async def _disconnect(self, port: int, number: int) -> None:
        data = request(number, stream=True, words=10)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            stage = self._chance.randrange(4)
            writer.write(data[: self._chance.randrange(len(data))] if stage == 0 else data)
            if stage == 1 and number % 2:
                await reader.readuntil(b"\n\n")
            elif stage > 1:
                await asyncio.sleep(self._chance.random() * 0.01)
        finally:
            if stage:
                self._left[number] = self._loop.time()
            writer.transport.abort()

    async def wait_noticed(self) -> None:
        """Wait until the replicas noticed every disconnect."""
        async with asyncio.timeout(30):
            while len(self.delays_s) < self.arrived:
                await asyncio.sleep(0.05)
        self._left.clear()  # of clients whose request reached no replica


async def measure(verdict: Verdict, aborts: int, seed: int) -> None:
    clients = DisconnectingClients(seed)
    warm_up = int(aborts * WARM_UP)
    async with fake_replicas(2) as replicas:
        for replica in replicas:
            clients.script(replica)
        async with router_process(pool_of(replicas)) as router:
            await fill_decision_log(router.port)
            before = await _run(clients, router, range(warm_up))
            for first in range(warm_up, aborts, 5000):
                after = await _run(clients, router, range(first, min(first + 5000, aborts)))
    delays_s = sorted(clients.delays_s)
    max_s, median_s, p999_s = delays_s[-1], delays_s[len(delays_s) // 2], delays_s[int(len(delays_s) * 0.999)]
    delays = f"{1000 * median_s:.0f} ms at the median, {1000 * p999_s:.0f} at p99.9, {1000 * max_s:.0f} at most"
    verdict.check(
        "aborts", f"{aborts:,}, {clients.arrived:,} of them after a replica had the request", clients.arrived > 0
    )
    verdict.check("cancelled after", f"{delays}, limit {CANCELLED_S:g} s", max_s <= CANCELLED_S)
    router.judge(verdict, before, after)


async def _run(clients: DisconnectingClients, router: RouterProcess, numbers: range) -> Figures:
    await clients.disconnect_all(router.port, numbers)
    await clients.wait_noticed()
    await router.until_idle()
    return await router.figures()
