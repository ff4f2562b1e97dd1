"""R9: clients that disconnect at every stage of a request.

A client disconnects inside its headers or body, while it waits, or after the first event. The replica's connection
must be closed within a second of the disconnect or of the request's arrival, whichever is later; afterwards no
memory, sockets or tasks may be left.
"""

from __future__ import annotations

import asyncio
import random

from tests.benchmarks.soak.prompts import number_of, request, warmed
from tests.benchmarks.soak.stand import Figures, RouterProcess, pool_of, router_process
from tests.benchmarks.soak.verdict import Verdict
from tests.fakes.replica import STREAM_HEAD, Call, FakeReplica, chunk, fake_replicas, plain_answer, sse

AT_ONCE = 32
WARM_UP = 0.5  # of all aborts: the record of decisions is full of them by then
CANCELLED_S = 1.0  # (R9)
EVENT = chunk(sse({"n": 1}))


class Leavers:
    """Clients that disconnect, and when the replicas noticed."""

    def __init__(self, seed: int) -> None:
        self.lates_s: list[float] = []
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
            number, came = number_of(call.body), self._loop.time()
            self.arrived += 1
            try:
                if number % 2:
                    await call.send(STREAM_HEAD, EVENT)
                await call.wait_gone()
            finally:
                self.lates_s.append(self._loop.time() - max(came, self._left.pop(number, came)))

        replica.script = script

    async def leave_all(self, port: int, numbers: range) -> None:
        rest = iter(numbers)

        async def keep_leaving() -> None:
            for number in rest:
                await self._leave(port, number)

        await asyncio.gather(*(keep_leaving() for _ in range(AT_ONCE)))

    async def _leave(self, port: int, number: int) -> None:
        sent = request(number, stream=True, words=10)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            stage = self._chance.randrange(4)
            writer.write(sent[: self._chance.randrange(len(sent))] if stage == 0 else sent)
            if stage == 1 and number % 2:
                await reader.readuntil(b"\n\n")
            elif stage > 1:
                await asyncio.sleep(self._chance.random() * 0.01)
        finally:
            if stage:
                self._left[number] = self._loop.time()
            writer.transport.abort()

    async def heard(self) -> None:
        """Wait until the replicas noticed every disconnect."""
        async with asyncio.timeout(30):
            while len(self.lates_s) < self.arrived:
                await asyncio.sleep(0.05)
        self._left.clear()  # of those who never reached one


async def measure(verdict: Verdict, aborts: int, seed: int) -> None:
    leavers = Leavers(seed)
    warm_up = int(aborts * WARM_UP)
    async with fake_replicas(2) as replicas:
        for replica in replicas:
            leavers.script(replica)
        async with router_process(pool_of(replicas)) as router:
            await warmed(router.port)
            before = await _leave(leavers, router, range(warm_up))
            for first in range(warm_up, aborts, 5000):
                after = await _leave(leavers, router, range(first, min(first + 5000, aborts)))
    lates_s = sorted(leavers.lates_s)
    late_s, usual_s, rare_s = lates_s[-1], lates_s[len(lates_s) // 2], lates_s[int(len(lates_s) * 0.999)]
    said = f"{1000 * usual_s:.0f} ms at the median, {1000 * rare_s:.0f} of 99.9 %, {1000 * late_s:.0f} at most"
    verdict.holds(
        "aborts", f"{aborts:,}, {leavers.arrived:,} of them after a replica had the request", leavers.arrived > 0
    )
    verdict.holds("cancelled after", f"{said}, of {CANCELLED_S:g} s", late_s <= CANCELLED_S)
    router.judge(verdict, before, after)


async def _leave(leavers: Leavers, router: RouterProcess, numbers: range) -> Figures:
    await leavers.leave_all(router.port, numbers)
    await leavers.heard()
    await router.at_rest()
    return await router.figures()
