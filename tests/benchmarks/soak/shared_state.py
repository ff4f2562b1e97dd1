"""Routers that share their state, while the server, the channel and a router fail in turn under steady traffic.

Of four routers and a picker, one router has another configuration and a clock that is ten minutes slow, and another one
is killed and started again. A client whose router was killed sends its request to another one, as behind a load
balancer. After each fault all must see each other again. What the server stores, and garbage on the channel, must not
cost the view at all.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from types import SimpleNamespace
from typing import Final, cast

import aiohttp
from redis import Redis

from controlplane.stack.servers import valkey_child
from routing.observability.decision_log import MAX_RECORDS
from routing.schema import LeastLoadSettings
from routing.settings import STATE_URL
from tests.benchmarks.soak.event_faults import ENGINE, FILLING_KIB, body
from tests.benchmarks.soak.stand import Named, RouterProcess, pool_of, router_process
from tests.benchmarks.soak.verdict import SLACK_KIB, Verdict
from tests.routing.standin.replica_process import replica_process

RATE: Final = 20.0  # requests/s
PROMPTS: Final = 60
HOLD_S: Final = (3.0, 6.0)  # duration of a fault
REST_S: Final = 2.0  # without faults after it
GARBAGE_S: Final = 0.01  # between three messages of garbage
BACK_S: Final = 5.0  # until all see each other again
ALONE_S: Final = 2.0  # until no router counts peers while the server is away: 1 s of silence, and the poll
DEADLINE_S: Final = 60.0  # of these waits on any machine
KILLED: Final = 2  # the router that is killed
SLOW_CLOCK: Final = "import time\nnow = time.time\ntime.time = lambda: now() - 600.0\n"
CUTS: Final = ("killed", "paused")  # no messages pass
DISTURBANCES: Final = ("flushed", "full", "garbage")  # all messages pass
FAULTS: Final = (*CUTS, *DISTURBANCES, "router killed")
POLL_S: Final = 0.1


class Stand:
    """A server, the processes that share through it, and what clients and operators see."""

    def __init__(self, folder: Path, replicas: list[Named], stack: AsyncExitStack) -> None:
        self.processes: list[RouterProcess] = []  # four routers and a picker
        self.outcomes = Counter[str]()
        self.back_s: dict[str, list[float]] = defaultdict(list)  # by fault
        self.alone_s: list[float] = []
        self.lost_views = Counter[str]()  # polls in which a router did not see all others, by fault
        self.rejected = 0.0  # messages of garbage
        self._killed: list[RouterProcess] = []
        self._stack, self._folder = stack, folder
        self._config, self._other = pool_of(replicas), pool_of(replicas[:2], settings=LeastLoadSettings())
        self._child = valkey_child(folder / "valkey" / "socket")
        self._url = f"unix://{folder}/valkey/socket"
        self._server: subprocess.Popen[bytes] | None = None

    async def open(self) -> None:
        """Start everything."""
        (self._folder / "sitecustomize.py").write_text(SLOW_CLOCK)
        self._start_server()
        self._stack.callback(self._kill_server)
        self.processes += [await self._start() for _ in range(3)]
        path = f"{self._folder}:{os.environ.get('PYTHONPATH', '')}"
        self.processes.append(await self._start(has_other=True, PYTHONPATH=path))
        self.processes.append(await self._start("picker"))
        await self.until_peers(len(self.processes) - 1)

    async def _start(self, command: str = "serve", *, has_other: bool = False, **environment: str) -> RouterProcess:
        variables = {**os.environ, STATE_URL: self._url, **environment}
        config = self._other if has_other else self._config
        return await self._stack.enter_async_context(router_process(config, command=command, environment=variables))

    def _start_server(self) -> None:
        self._server = subprocess.Popen(
            self._child.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def _kill_server(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()

    # --- clients ---

    async def send_requests(self, chance: random.Random) -> None:
        """Send requests to the routers at random until cancelled."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._request(http, chance))
                due_s += 1 / RATE
                await asyncio.sleep(max(0.0, due_s - loop.time()))

    async def _request(self, http: aiohttp.ClientSession, chance: random.Random) -> None:
        router = self.processes[chance.randrange(4)]
        try:
            url = f"http://127.0.0.1:{router.port}/v1/chat/completions"
            async with http.post(url, json=body(chance.randrange(PROMPTS))) as response:
                has_choices = b'"choices"' in await response.read()
                self.outcomes["complete" if has_choices else f"status {response.status}"] += 1
        except aiohttp.ClientError as error:
            if router in self._killed:
                await self._request(http, chance)
            else:
                self.outcomes[type(error).__name__] += 1

    # --- faults ---

    async def inject(self, fault: str, hold_s: float) -> None:
        """One fault, and the time until all see each other again."""
        loop = asyncio.get_running_loop()
        losses = await self.processes[0].metric("shared_state_losses_total")
        holding = asyncio.create_task(self._hold(fault, hold_s))
        while fault in DISTURBANCES and not holding.done():
            self.lost_views[fault] += not await self._has_peers(len(self.processes) - 1)
            await asyncio.sleep(POLL_S)
        await holding
        ended_s = loop.time()
        if fault == "garbage":
            self.rejected += await self.processes[0].metric("shared_state_losses_total") - losses
        await self.until_peers(len(self.processes) - 1)
        self.back_s[fault].append(loop.time() - ended_s)
        await asyncio.sleep(REST_S)

    async def _hold(self, fault: str, hold_s: float) -> None:
        loop, server = asyncio.get_running_loop(), self._server
        assert server is not None
        began_s = loop.time()
        if fault in CUTS:
            if fault == "killed":
                self._kill_server()
            else:
                server.send_signal(SIGSTOP)
            await self.until_peers(0)
            self.alone_s.append(loop.time() - began_s)
        elif fault == "router killed":
            self._killed.append(self.processes[KILLED])
            self._killed[-1].popen.kill()
        else:
            await asyncio.to_thread(self._disturb, fault, hold_s)
        await asyncio.sleep(max(0.0, began_s + hold_s - loop.time()))
        if fault == "killed":
            self._start_server()
        elif fault == "paused":
            server.send_signal(SIGCONT)
        elif fault == "router killed":
            self.processes[KILLED] = await self._start()

    def _disturb(self, fault: str, hold_s: float) -> None:
        """Flush the server, fill its memory, or publish what is no message, or an old or a changed one."""
        chance = random.Random(fault)
        with Redis.from_url(self._url) as redis, redis.pubsub() as heard:
            [channel] = redis.pubsub_channels("warmpath-state:*")
            heard.subscribe(channel)
            redis.config_set("maxmemory", 1 if fault == "full" else 0)
            for _ in range(int(hold_s / GARBAGE_S)):
                data = (heard.get_message(timeout=GARBAGE_S) or {}).get("data")
                if fault == "flushed":
                    redis.flushall()
                elif fault == "garbage" and isinstance(data, bytes) and data:
                    changed = bytearray(data)
                    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
                    for message in (data, bytes(changed), chance.randbytes(chance.randrange(2000))):
                        redis.publish(channel, message)
            redis.config_set("maxmemory", 0)

    # --- what operators see ---

    async def until_peers(self, count: int) -> None:
        """Wait until every process counts so many peers; TimeoutError."""
        async with asyncio.timeout(DEADLINE_S):
            while not await self._has_peers(count):
                await asyncio.sleep(POLL_S)

    async def _has_peers(self, count: int) -> bool:
        peers = await asyncio.gather(*[process.metric("shared_state_peers") for process in self.processes])
        return set(peers) == {count}


async def measure(verdict: Verdict, seconds: float, seed: int) -> None:
    """Serve for so long under faults, each at least once, and check what clients and operators see."""
    chance, loop = random.Random(seed), asyncio.get_running_loop()
    async with standing() as stand:
        requesting = asyncio.create_task(stand.send_requests(random.Random(seed + 1)))
        try:
            lasting, end_s = stand.processes[:KILLED] + stand.processes[KILLED + 1 :], loop.time() + seconds
            if seconds > HOLD_S[0]:
                await stand.inject("killed", HOLD_S[0])  # a warm-up
            before, requests_before = [await process.figures() for process in lasting], stand.outcomes.total()
            while loop.time() < end_s or len(stand.back_s) < len(FAULTS):
                for fault in FAULTS:
                    await stand.inject(fault, min(seconds, chance.uniform(*HOLD_S)))
            after, requests = [await process.figures() for process in lasting], stand.outcomes.total()
        finally:
            requesting.cancel()
            await asyncio.wait([requesting])
        failures = sum([await process.metric("loop_failures_total") for process in lasting])
    verdict.check("clients", str(dict(stand.outcomes)), set(stand.outcomes) == {"complete"})
    for fault, back_s in stand.back_s.items():
        text = f"after {max(back_s):.2f} s at most, {len(back_s)} faults"
        verdict.check(f"{fault}: all seen", text, max(back_s) <= BACK_S)
    verdict.check("alone without a server", f"after {max(stand.alone_s):.2f} s", max(stand.alone_s) <= ALONE_S)
    verdict.check("view lost", str(dict(stand.lost_views)), not stand.lost_views.total())
    verdict.check("garbage", f"{stand.rejected:.0f} messages rejected", stand.rejected > 0)
    defects = [line for process in stand.processes for line in process.log if "defect" in line]
    verdict.check("defects", f"{failures:.0f}, {defects}", not failures and not defects)
    filling = min(requests, 4 * MAX_RECORDS) / 4 - min(requests_before, 4 * MAX_RECORDS) / 4
    for process, first, last in zip(lasting, before, after, strict=True):
        slack_kib = SLACK_KIB + FILLING_KIB * filling
        verdict.check_growth("resident", first.rss_kib, last.rss_kib, slack=slack_kib, unit=" KiB")
        process.judge_handles(verdict, first, last)


@asynccontextmanager
async def standing() -> AsyncIterator[Stand]:
    """A stand with three replicas."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = [stack.enter_context(replica_process(*ENGINE)).port for _ in range(3)]
        replicas = [SimpleNamespace(name=f"gpu-{port}", url=f"http://127.0.0.1:{port}") for port in ports]
        stand = Stand(folder, cast("list[Named]", replicas), stack)
        await stand.open()
        yield stand
