"""Five times the load that the replicas handle best.

The pool handles ``BEST_CONCURRENCY`` requests at once well and slows down with each further one, like an engine that
preempts. It gets its best load first, which gives the peak, and then five times as much from clients that retry at
once.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from routing.schema import ConcurrencyConfig
from tests.benchmarks.soak.prompts import connected, fill_decision_log, request
from tests.benchmarks.soak.stand import RouterProcess, pool_of, router_process
from tests.benchmarks.soak.verdict import Verdict
from tests.fakes.replica import Call, FakeReplica, fake_replicas, plain_answer

BEST_CONCURRENCY = 64
OVERLOAD_FACTOR = 5
SERVICE_S = 0.4
GOODPUT = 0.9  # of the peak
RETRY_AFTER_S = 0.5  # clients retry after at most half of the Retry-After of a rejection
PEAK_SHARE = 0.25  # of the time


class OverloadedReplicas:
    """All replicas together, with the capacity of one engine each."""

    def __init__(self, replicas: list[FakeReplica]) -> None:
        self.service_s = 0.0  # 0 during warm-up
        self._best = BEST_CONCURRENCY / len(replicas)
        self._running: Counter[str] = Counter()
        for replica in replicas:
            self._attach(replica)

    def _attach(self, replica: FakeReplica) -> None:
        async def script(call: Call) -> None:
            replica.calls.clear()
            self._running[replica.name] += 1
            try:
                excess = max(1.0, self._running[replica.name] / self._best)
                await asyncio.sleep(self.service_s * excess**2)
                await call.send(plain_answer(b"{}"))
            finally:
                self._running[replica.name] -= 1

        replica.script = script


async def measure(verdict: Verdict, seconds: float) -> None:
    """A quarter of the time at the peak, the rest beyond it."""
    async with fake_replicas(4) as replicas:
        engines = OverloadedReplicas(replicas)
        concurrency = ConcurrencyConfig(max_running=BEST_CONCURRENCY, max_waiting=BEST_CONCURRENCY, max_wait_s=2.0)
        async with router_process(pool_of(replicas, concurrency=concurrency)) as router:
            await fill_decision_log(router.port)
            engines.service_s = SERVICE_S
            peak_s, over_s = seconds * PEAK_SHARE, seconds * (1 - PEAK_SHARE)
            peak, _ = await _run_clients(router, BEST_CONCURRENCY, peak_s)
            await _run_clients(router, BEST_CONCURRENCY * OVERLOAD_FACTOR, over_s / 4)
            before = await router.figures()
            over, without_retry_after = await _run_clients(router, BEST_CONCURRENCY * OVERLOAD_FACTOR, over_s * 3 / 4)
            await router.until_idle()
            after = await router.figures()
    peak_rate, rate = peak[200] / peak_s, over[200] / (over_s * 3 / 4)
    verdict.check("goodput", f"{rate:.0f}/s of {peak_rate:.0f}/s at the peak", rate >= GOODPUT * peak_rate)
    is_as_expected = set(over) <= {200, 429, 503} and not without_retry_after and over[429] > 0
    verdict.check("responses", f"{dict(over)}, {without_retry_after} rejected without Retry-After", is_as_expected)
    router.judge(verdict, before, after)


async def _run_clients(router: RouterProcess, clients: int, seconds: float) -> tuple[Counter[int], int]:
    """(statuses of clients that retry at once, rejections without ``Retry-After``)."""
    statuses, without_retry_after = Counter[int](), 0
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds

    async def keep_requesting(number: int) -> None:
        nonlocal without_retry_after
        async with connected(router.port) as connection:
            while loop.time() < end:
                status, head = await connection.request(request(number, words=4))
                statuses[status] += 1
                if status != 200:
                    without_retry_after += b"retry-after:" not in head.lower()
                    await asyncio.sleep(RETRY_AFTER_S)

    await asyncio.gather(*(keep_requesting(number) for number in range(clients)))
    return statuses, without_retry_after
