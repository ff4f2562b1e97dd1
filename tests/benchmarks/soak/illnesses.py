"""Replicas hang, crash and lose their network in turn under 100 streams a second.

One replica after another hangs, crashes with its requests, sends slowly, or is behind a faulty network; every tenth
client disconnects. Each stream is checked byte by byte. The decision log is filled first. Memory depends on how many
streams wait for a hanging replica, so its maximum in the second half is compared with that in the first. Health checks
are patient, because all replicas run in this process and would fail together when it is slow.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

from routing.schema import BreakerConfig, HealthCheck, Limits
from routing.upstream.pool import IDLE_S
from tests.benchmarks.soak.prompts import fill_decision_log, number_of, request, unchunked
from tests.benchmarks.soak.stand import Figures, RouterProcess, pool_of, router_process
from tests.benchmarks.soak.verdict import Verdict
from tests.fakes.fault_proxy import Fault, FaultProxy
from tests.fakes.replica import LAST_CHUNK, STREAM_HEAD, Call, FakeReplica, Script, chunk, plain_answer, sse

REPLICAS = 4
RATE = 100  # streams a second
EVENTS = 20
FAULT_S, RECOVERY_S = 6.0, 6.0  # duration of a fault, and of the time without faults after it
FAULTS = ("hang", "kill", "cut", "slow")
NETWORK_FAULTS = (Fault.RESET, Fault.CLOSE, Fault.DELAY, Fault.TEAR, Fault.REFUSE)
IDLE_FDS = 40  # open files without streams and idle connections
SLOW_S = 4.0  # between two events of a slow replica


class Streams:
    """Clients and the outcomes of their requests."""

    def __init__(self, router: RouterProcess) -> None:
        self.outcomes: Counter[str] = Counter()
        self.slow: list[float] = []  # seconds to the first byte, of those over one
        self.samples: list[Figures] = []
        self._router = router
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, seconds: float, chance: random.Random) -> None:
        """Send at the rate; sample the router once a second."""
        loop = asyncio.get_running_loop()
        started, sampled_at = loop.time(), 0.0
        for number in range(int(seconds * RATE)):
            await asyncio.sleep(max(0.0, started + number / RATE - loop.time()))
            task = asyncio.create_task(self._request(number, disconnects=chance.random() < 0.1))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            if loop.time() - sampled_at > 1.0:
                sampled_at = loop.time()
                self.samples.append(Figures(self._router.rss_kib, self._router.fds, 0))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=90)
        self.outcomes["never ended"] = len(self._tasks)

    async def _request(self, number: int, *, disconnects: bool) -> None:
        started = time.perf_counter()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._router.port)
        except OSError:
            self.outcomes["not connected"] += 1
            return
        try:
            writer.write(
                request(number, stream=True).replace(b"Host: soak\r\n", b"Host: soak\r\nConnection: close\r\n")
            )
            head = await reader.readuntil(b"\r\n\r\n")
            if (waited := time.perf_counter() - started) > 1.0:
                self.slow.append(waited)
            if disconnects:
                self.outcomes["disconnected"] += 1
                return
            self.outcomes[_outcome(head, await reader.read(-1), number)] += 1
        except (asyncio.IncompleteReadError, ConnectionError):
            self.outcomes["no response"] += 1
        finally:
            writer.transport.abort()


class FaultyReplicas:
    """Replicas that get faults, one after another."""

    def __init__(self, chance: random.Random) -> None:
        self.replicas = [FakeReplica(f"replica-{number}", self._stream) for number in range(REPLICAS)]
        self.proxies = [
            FaultProxy(replica, number, [Fault.NONE], 4000, again=True) for number, replica in enumerate(self.replicas)
        ]
        self.faults: Counter[str] = Counter()
        self._chance = chance
        self._running = {replica.name: asyncio.Event() for replica in self.replicas}
        self._slow: set[str] = set()

    async def open(self) -> None:
        for replica, proxy in zip(self.replicas, self.proxies, strict=True):
            self._running[replica.name].set()
            replica.script = self._script(replica)
            await replica.start()
            await proxy.start()

    async def close(self) -> None:
        for replica, proxy in zip(self.replicas, self.proxies, strict=True):
            await proxy.stop()
            replica.kill()

    async def inject_faults(self) -> None:
        while True:
            index, fault = self._chance.randrange(REPLICAS), self._chance.choice(FAULTS)
            replica, proxy = self.replicas[index], self.proxies[index]
            self.faults[fault] += 1
            if fault == "hang":
                self._running[replica.name].clear()
            elif fault == "kill":
                replica.kill()
            elif fault == "slow":
                self._slow.add(replica.name)
            else:
                proxy.faults = list(NETWORK_FAULTS)
            await asyncio.sleep(FAULT_S)
            proxy.faults = [Fault.NONE]
            self._slow.clear()
            self._running[replica.name].set()
            if fault == "kill":
                await replica.start()
            await asyncio.sleep(RECOVERY_S)

    def _script(self, replica: FakeReplica) -> Script:
        async def script(call: Call) -> None:
            replica.calls.clear()  # otherwise this process grows
            if b'"stream": true' not in call.body:
                await call.send(plain_answer(b"{}"))
            else:
                await self._stream(call, replica.name)

        return script

    async def _stream(self, call: Call, name: str = "") -> None:
        await call.send(STREAM_HEAD)
        for event in _events(number_of(call.body)):
            await self._running[name].wait()
            await asyncio.sleep(SLOW_S if name in self._slow else 0.01)
            if call.writer.is_closing():
                return
            await call.send(chunk(event))
        await call.send(LAST_CHUNK)


def _events(number: int) -> list[bytes]:
    return [sse({"of": number, "event": event}) for event in range(EVENTS)]


def _outcome(head: bytes, framed: bytes, number: int) -> str:
    status = head.split(b" ", 2)[1].decode()
    if status != "200":
        return f"status {status}"
    body = unchunked(framed)
    complete = b"".join(_events(number))
    if body == complete:
        return "complete"
    part, mark, _ = body.partition(b'data: {"error"')
    return "cut" if mark and complete.startswith(part.removesuffix(b"\n\n")) else "WRONG"


async def measure(verdict: Verdict, seconds: float, seed: int) -> None:
    faulty = FaultyReplicas(random.Random(seed))
    await faulty.open()
    breaker = BreakerConfig(open_s=3.0, slow_start_s=3.0)
    health = HealthCheck(interval_s=0.5, timeout_s=20.0)
    config = pool_of(faulty.proxies, breaker=breaker, health=health, limits=Limits(idle_timeout_s=20.0))
    try:
        async with router_process(config) as router:
            await fill_decision_log(router.port)
            streams = Streams(router)
            injecting = asyncio.create_task(faulty.inject_faults())
            await streams.run(seconds, random.Random(seed + 1))
            injecting.cancel()
            await router.until_idle()
            await asyncio.sleep(IDLE_S + 1.0)
            end = await router.figures()
    finally:
        await faulty.close()
    _judge(verdict, faulty, streams, end)


def _judge(verdict: Verdict, faulty: FaultyReplicas, streams: Streams, end: Figures) -> None:
    half = len(streams.samples) // 2
    first, second = streams.samples[:half], [*streams.samples[half:], end]
    wrong = sum(
        count for outcome, count in streams.outcomes.items() if outcome not in {"complete", "cut", "disconnected"}
    )
    longest = f"{len(streams.slow)} waited over 1 s, the longest {max(streams.slow, default=0):.1f} s"
    verdict.report("faults", str(dict(faulty.faults)))
    verdict.check("streams", str(dict(streams.outcomes)), not wrong)
    verdict.report("first bytes", longest)
    verdict.check_memory(max(sample.rss_kib for sample in first), max(sample.rss_kib for sample in second))
    verdict.check(
        "open files", f"{max(sample.fds for sample in first)} at most, {end.fds} at the end", end.fds <= IDLE_FDS
    )
