"""R7, R8, R21: replicas hang, die and are cut off in turn under 100 streams a second.

One replica after another hangs, dies with its requests, or is behind a faulty network; every tenth client
disconnects. Each stream is checked byte by byte. The decision log is filled first. Memory depends on how many streams
wait for a hanging replica, so its maximum in the second half is compared with that in the first. Health checks are
patient, because all replicas run in this process and would fail together when it is slow.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

from routing.schema import BreakerConfig, HealthCheck, Limits
from routing.upstream.pool import IDLE_S
from tests.benchmarks.soak.prompts import number_of, request, unchunked, warmed
from tests.benchmarks.soak.stand import Figures, RouterProcess, pool_of, router_process
from tests.benchmarks.soak.verdict import Verdict
from tests.fakes.fault_proxy import Fault, FaultProxy
from tests.fakes.replica import LAST_CHUNK, STREAM_HEAD, Call, FakeReplica, Script, chunk, plain_answer, sse

REPLICAS = 4
RATE = 100  # streams a second
EVENTS = 20
SICK_S, WELL_S = 6.0, 6.0  # how long a replica is sick, and all are well after it
ILLNESSES = ("hang", "kill", "cut", "crawl")
CUT = (Fault.RESET, Fault.CLOSE, Fault.DELAY, Fault.TEAR, Fault.REFUSE)
IDLE_FDS = 40  # with no stream under way and none kept alive
CRAWL_S = 4.0  # between two events of a replica that crawls


class Streams:
    """Clients and the outcomes of their requests."""

    def __init__(self, router: RouterProcess) -> None:
        self.seen: Counter[str] = Counter()
        self.slow: list[float] = []  # seconds to the first byte, of those over one
        self.looks: list[Figures] = []
        self._router = router
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, seconds: float, chance: random.Random) -> None:
        """Send at the rate; sample the router once a second."""
        loop = asyncio.get_running_loop()
        begun, looked = loop.time(), 0.0
        for number in range(int(seconds * RATE)):
            await asyncio.sleep(max(0.0, begun + number / RATE - loop.time()))
            task = asyncio.create_task(self._ask(number, leaves=chance.random() < 0.1))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            if loop.time() - looked > 1.0:
                looked = loop.time()
                self.looks.append(Figures(self._router.rss_kib, self._router.fds, 0))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=90)
        self.seen["never ended"] = len(self._tasks)

    async def _ask(self, number: int, *, leaves: bool) -> None:
        begun = time.perf_counter()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._router.port)
        except OSError:
            self.seen["not connected"] += 1
            return
        try:
            writer.write(
                request(number, stream=True).replace(b"Host: soak\r\n", b"Host: soak\r\nConnection: close\r\n")
            )
            head = await reader.readuntil(b"\r\n\r\n")
            if (waited := time.perf_counter() - begun) > 1.0:
                self.slow.append(waited)
            if leaves:
                self.seen["left"] += 1
                return
            self.seen[_outcome(head, await reader.read(-1), number)] += 1
        except (asyncio.IncompleteReadError, ConnectionError):
            self.seen["no answer"] += 1
        finally:
            writer.transport.abort()


class Ward:
    """The replicas and their faults, one after another."""

    def __init__(self, chance: random.Random) -> None:
        self.replicas = [FakeReplica(f"replica-{number}", self._stream) for number in range(REPLICAS)]
        self.relays = [
            FaultProxy(it, number, [Fault.NONE], 4000, again=True) for number, it in enumerate(self.replicas)
        ]
        self.illnesses: Counter[str] = Counter()
        self._chance = chance
        self._runs = {replica.name: asyncio.Event() for replica in self.replicas}
        self._crawls: set[str] = set()

    async def open(self) -> None:
        for replica, relay in zip(self.replicas, self.relays, strict=True):
            self._runs[replica.name].set()
            replica.script = self._script(replica)
            await replica.start()
            await relay.start()

    async def close(self) -> None:
        for replica, relay in zip(self.replicas, self.relays, strict=True):
            await relay.stop()
            replica.kill()

    async def sicken(self) -> None:
        while True:
            place, illness = self._chance.randrange(REPLICAS), self._chance.choice(ILLNESSES)
            replica, relay = self.replicas[place], self.relays[place]
            self.illnesses[illness] += 1
            if illness == "hang":
                self._runs[replica.name].clear()
            elif illness == "kill":
                replica.kill()
            elif illness == "crawl":
                self._crawls.add(replica.name)
            else:
                relay.faults = list(CUT)
            await asyncio.sleep(SICK_S)
            relay.faults = [Fault.NONE]
            self._crawls.clear()
            self._runs[replica.name].set()
            if illness == "kill":
                await replica.start()
            await asyncio.sleep(WELL_S)

    def _script(self, replica: FakeReplica) -> Script:
        async def script(call: Call) -> None:
            replica.calls.clear()  # or this process grows instead
            if b'"stream": true' not in call.body:
                await call.send(plain_answer(b"{}"))
            else:
                await self._stream(call, replica.name)

        return script

    async def _stream(self, call: Call, name: str = "") -> None:
        await call.send(STREAM_HEAD)
        for event in _events(number_of(call.body)):
            await self._runs[name].wait()
            await asyncio.sleep(CRAWL_S if name in self._crawls else 0.01)
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
    whole = b"".join(_events(number))
    if body == whole:
        return "whole"
    part, mark, _ = body.partition(b'data: {"error"')
    return "cut" if mark and whole.startswith(part.removesuffix(b"\n\n")) else "WRONG"


async def measure(verdict: Verdict, seconds: float, seed: int) -> None:
    ward = Ward(random.Random(seed))
    await ward.open()
    breaker = BreakerConfig(open_s=3.0, slow_start_s=3.0)
    health = HealthCheck(interval_s=0.5, timeout_s=20.0)
    config = pool_of(ward.relays, breaker=breaker, health=health, limits=Limits(idle_timeout_s=20.0))
    try:
        async with router_process(config) as router:
            await warmed(router.port)
            streams = Streams(router)
            sickening = asyncio.create_task(ward.sicken())
            await streams.run(seconds, random.Random(seed + 1))
            sickening.cancel()
            await router.at_rest()
            await asyncio.sleep(IDLE_S + 1.0)
            end = await router.figures()
    finally:
        await ward.close()
    _judge(verdict, ward, streams, end)


def _judge(verdict: Verdict, ward: Ward, streams: Streams, end: Figures) -> None:
    half = len(streams.looks) // 2
    first, second = streams.looks[:half], [*streams.looks[half:], end]
    wrong = sum(count for what, count in streams.seen.items() if what not in {"whole", "cut", "left"})
    longest = f"{len(streams.slow)} waited over 1 s, the longest {max(streams.slow, default=0):.1f} s"
    verdict.say("illnesses", str(dict(ward.illnesses)))
    verdict.holds("streams", str(dict(streams.seen)), not wrong)
    verdict.say("first bytes", longest)
    verdict.memory(max(look.rss_kib for look in first), max(look.rss_kib for look in second))
    verdict.holds("open files", f"{max(look.fds for look in first)} at most, {end.fds} at the end", end.fds <= IDLE_FDS)
