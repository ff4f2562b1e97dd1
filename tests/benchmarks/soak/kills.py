"""A replica process is killed while it holds requests without a byte of a response.

Four replicas, 100 requests a second. Three stay up. The fourth answers a few requests, then holds them; once it holds
some it is killed and restarted. No client may notice.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from pathlib import Path

from routing.schema import BreakerConfig, HealthCheck, RoundRobinSettings
from tests.benchmarks.proxy import free_port
from tests.benchmarks.soak import victim
from tests.benchmarks.soak.prompts import connected, request
from tests.benchmarks.soak.stand import Named, RouterProcess, pool_of, router_process
from tests.benchmarks.soak.verdict import Verdict
from tests.fakes.replica import fake_replicas

RATE = 100  # requests a second
MAX_HELD = 3  # requests that a killed process holds; at least one
LIFE_S = 10.0  # within which a process must get requests
PAUSE_S = 0.3  # maximum pause between kills: at 5 kills a second the retry budget would be exhausted


class Victims:
    def __init__(self, chance: random.Random) -> None:
        self.name = "victim"
        self.port = free_port()
        self.held = 0  # requests, of all killed processes
        self.kills = 0
        self._chance = chance

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def run_and_kill(self) -> None:
        command = [sys.executable, str(Path(victim.__file__)), str(self.port), str(self._chance.randrange(4))]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert process.stdout
        try:
            async with asyncio.timeout(LIFE_S):
                await process.stdout.readexactly(1 + self._chance.randint(1, MAX_HELD))
        finally:
            process.kill()
            self.held += len(await process.stdout.read()) + 1
            await process.wait()
        self.kills += 1


async def measure(verdict: Verdict, kills: int, seed: int) -> None:
    victims, statuses = Victims(random.Random(seed)), Counter[int]()
    # readmit the replica at once after each kill, which no operator would configure
    breaker = BreakerConfig(open_s=0.05, slow_start_s=0, successes=1)
    health = HealthCheck(interval_s=0.1, failures=1)
    async with fake_replicas(3) as replicas:
        endpoints: list[Named] = [victims, *replicas]
        config = pool_of(endpoints, settings=RoundRobinSettings(), breaker=breaker, health=health)
        async with router_process(config) as router:
            requesting = asyncio.create_task(_send_requests(router, statuses))
            while victims.kills < kills:
                await victims.run_and_kill()
                await asyncio.sleep(PAUSE_S * random.Random(victims.kills).random())
                for replica in replicas:
                    replica.calls.clear()
            requesting.cancel()
            await asyncio.wait([requesting])
            retried = await router.metric("retries_total")
    verdict.check("process kills", f"{victims.kills}, with {victims.held} requests in progress", victims.kills >= kills)
    verdict.check("clients", f"{dict(statuses)}, {retried:.0f} retried on another replica", set(statuses) == {200})


async def _send_requests(router: RouterProcess, statuses: Counter[int]) -> None:
    """Send requests until cancelled. An incomplete or missing response counts as status 0."""
    loop = asyncio.get_running_loop()
    started, tasks = loop.time(), set[asyncio.Task[None]]()

    async def once(number: int) -> None:
        try:
            async with connected(router.port) as client:
                status, _ = await client.request(request(number))
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            status = 0
        statuses[status] += 1

    try:
        for number in range(1 << 30):
            await asyncio.sleep(max(0.0, started + number / RATE - loop.time()))
            task = asyncio.create_task(once(number))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    finally:
        if tasks:
            await asyncio.wait(tasks, timeout=90)
        if tasks:
            statuses[0] += len(tasks)
