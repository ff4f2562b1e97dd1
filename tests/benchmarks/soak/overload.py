"""R10: five times the load that the replicas handle best.

The pool handles ``BEST`` requests at once well and slows down with each further one, like an engine that preempts. It
gets its best load first, which gives the peak, and then five times as much from clients that retry at once.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from routing.schema import ConcurrencyConfig
from tests.benchmarks.soak.prompts import on_connected, request, warmed
from tests.benchmarks.soak.stand import RouterProcess, pool_of, router_process
from tests.benchmarks.soak.verdict import Verdict
from tests.fakes.replica import Call, FakeReplica, fake_replicas, plain_answer

BEST = 64
TIMES = 5
SERVICE_S = 0.4
GOODPUT = 0.9  # of the peak (R10)
IMPATIENCE_S = 0.5  # after a refusal; at most half of what it was told to wait
PEAK_PART = 0.25  # of the time


class Thrashing:
    """All replicas together, with the capacity of one engine each."""

    def __init__(self, replicas: list[FakeReplica]) -> None:
        self.service_s = 0.0  # while it is warmed up
        self._best = BEST / len(replicas)
        self._running: Counter[str] = Counter()
        for replica in replicas:
            self._attach(replica)

    def _attach(self, replica: FakeReplica) -> None:
        async def script(call: Call) -> None:
            replica.calls.clear()
            self._running[replica.name] += 1
            try:
                crowd = max(1.0, self._running[replica.name] / self._best)
                await asyncio.sleep(self.service_s * crowd**2)
                await call.send(plain_answer(b"{}"))
            finally:
                self._running[replica.name] -= 1

        replica.script = script


async def measure(verdict: Verdict, seconds: float) -> None:
    """A quarter of the time at the peak, the rest beyond it."""
    async with fake_replicas(4) as replicas:
        engines = Thrashing(replicas)
        concurrency = ConcurrencyConfig(max_running=BEST, max_waiting=BEST, max_wait_s=2.0)
        async with router_process(pool_of(replicas, concurrency=concurrency)) as router:
            await warmed(router.port)
            engines.service_s = SERVICE_S
            peak_s, over_s = seconds * PEAK_PART, seconds * (1 - PEAK_PART)
            peak, _ = await _offered(router, BEST, peak_s)
            await _offered(router, BEST * TIMES, over_s / 4)
            before = await router.figures()
            over, silent = await _offered(router, BEST * TIMES, over_s * 3 / 4)
            await router.at_rest()
            after = await router.figures()
    peak_rate, rate = peak[200] / peak_s, over[200] / (over_s * 3 / 4)
    verdict.holds("goodput", f"{rate:.0f}/s of {peak_rate:.0f}/s at the peak", rate >= GOODPUT * peak_rate)
    well = set(over) <= {200, 429, 503} and not silent and over[429] > 0
    verdict.holds("answers", f"{dict(over)}, {silent} refused without a time to come back", well)
    router.judge(verdict, before, after)


async def _offered(router: RouterProcess, clients: int, seconds: float) -> tuple[Counter[int], int]:
    """(statuses of clients that retry at once, rejections without ``Retry-After``)."""
    statuses, silent = Counter[int](), 0
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds

    async def keep_asking(number: int) -> None:
        nonlocal silent
        async with on_connected(router.port) as connection:
            while loop.time() < end:
                status, head = await connection.ask(request(number, words=4))
                statuses[status] += 1
                if status != 200:
                    silent += b"retry-after:" not in head.lower()
                    await asyncio.sleep(IMPATIENCE_S)

    await asyncio.gather(*(keep_asking(number) for number in range(clients)))
    return statuses, silent
