"""R6: a replica process is killed while it holds requests without a byte of a response.

Four replicas, 100 requests a second. Three stay up. The fourth answers a few requests, then holds them; once it holds
some it is killed and restarted. No client may notice.
"""

from __future__ import annotations

import asyncio
import random
import socket
import sys
from collections import Counter
from pathlib import Path

from routing.schema import BreakerConfig, HealthCheck, RoundRobinSettings
from tests.benchmarks.soak import victim
from tests.benchmarks.soak.prompts import on_connected, request
from tests.benchmarks.soak.stand import Named, RouterProcess, pool_of, router_process
from tests.benchmarks.soak.verdict import Verdict
from tests.fakes.replica import fake_replicas

RATE = 100  # requests a second
MOST_HELD = 3  # that it is killed with, at least one
LIFE_S = 10.0  # within which some must come to it
WELL_S = 0.3  # that passes without a kill for each one: 5 a second would be more than retries are meant for


class Victims:
    def __init__(self, chance: random.Random) -> None:
        self.name = "victim"
        self.port = _free_port()
        self.held = 0  # requests, over all lives
        self.kills = 0
        self._chance = chance

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def live_once(self) -> None:
        command = [sys.executable, str(Path(victim.__file__)), str(self.port), str(self._chance.randrange(4))]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert process.stdout
        try:
            async with asyncio.timeout(LIFE_S):
                await process.stdout.readexactly(1 + self._chance.randint(1, MOST_HELD))
        finally:
            process.kill()
            self.held += len(await process.stdout.read()) + 1
            await process.wait()
        self.kills += 1


async def measure(verdict: Verdict, kills: int, seed: int) -> None:
    victims, statuses = Victims(random.Random(seed)), Counter[int]()
    # it is to come back at once, again and again, which no operator would want
    breaker = BreakerConfig(open_s=0.05, slow_start_s=0, successes=1)
    health = HealthCheck(interval_s=0.1, failures=1)
    async with fake_replicas(3) as replicas:
        everybody: list[Named] = [victims, *replicas]
        config = pool_of(everybody, settings=RoundRobinSettings(), breaker=breaker, health=health)
        async with router_process(config) as router:
            asking = asyncio.create_task(_ask(router, statuses))
            while victims.kills < kills:
                await victims.live_once()
                await asyncio.sleep(WELL_S * random.Random(victims.kills).random())
                for replica in replicas:
                    replica.calls.clear()
            asking.cancel()
            await asyncio.wait([asking])
            retried = await router.metric("retries_total")
    verdict.holds(
        "process kills", f"{victims.kills}, with {victims.held} requests in their hands", victims.kills >= kills
    )
    verdict.holds("clients", f"{dict(statuses)}, {retried:.0f} tried elsewhere", set(statuses) == {200})


async def _ask(router: RouterProcess, statuses: Counter[int]) -> None:
    """Send requests until cancelled. An incomplete or missing response counts as status 0."""
    loop = asyncio.get_running_loop()
    begun, tasks = loop.time(), set[asyncio.Task[None]]()

    async def once(number: int) -> None:
        try:
            async with on_connected(router.port) as client:
                status, _ = await client.ask(request(number))
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            status = 0
        statuses[status] += 1

    try:
        for number in range(1 << 30):
            await asyncio.sleep(max(0.0, begun + number / RATE - loop.time()))
            task = asyncio.create_task(once(number))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    finally:
        if tasks:
            await asyncio.wait(tasks, timeout=90)
        if tasks:
            statuses[0] += len(tasks)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
