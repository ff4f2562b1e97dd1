"""KV event streams that are killed, stalled and corrupted at random, while a router serves.

Two stand-in replicas, each with a TCP proxy before its two ports of events. One fault at a time, from a seed. Clients
may not notice, the router may not grow, and a stream that is killed or silent counts as estimated within a second and
is followed again after the fault.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from enum import StrEnum
from itertools import count
from typing import Any

import aiohttp

from routing.observability.decision_log import MAX_RECORDS
from routing.schema import KvEvents, LowestCostSettings, PolicyConfig, PoolConfig, ReplicaConfig, RouterConfig
from tests.benchmarks.kv_events import EVENTS
from tests.benchmarks.soak.stand import RouterProcess, router_process
from tests.benchmarks.soak.verdict import SLACK_KIB, Verdict
from tests.routing.standin.replica_process import ReplicaProcess, replica_process

ENGINE = ("--prefill-rate", "400000", "--step-s", "0.004", "--blocks", "1001", "--seed", "1")
CLIENTS = 4
PROMPTS = 60  # together more than a cache
ESTIMATED_S = 1.0  # until a stream that is killed or silent counts as estimated
FOLLOWED_S = 10.0  # until it is followed again
POLL_S = 0.02
FAULT_S = (1.3, 2.0)  # longer than ``ESTIMATED_S``
PAUSE_S = (0.2, 1.0)
FILLING_KIB = 3.0  # of a request, in bounded tables until they are full: the decision log and the recent runs


class Fault(StrEnum):
    """What a proxy does to the bytes of an engine."""

    NONE = "none"
    KILLED = "killed"  # connections are reset, and new ones as well
    STALLED = "stalled"  # no byte arrives; connections stay
    CORRUPT = "corrupt"  # some bytes are changed, lost or repeated


class EventProxy:
    """Forwards the connections of one port to another one, with faults."""

    def __init__(self, port: int, chance: random.Random) -> None:
        self.fault = Fault.NONE
        self.port = 0
        self._target = port
        self._chance = chance
        self._writers: set[asyncio.StreamWriter] = set()
        self._passes = asyncio.Event()  # unset while stalled

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[EventProxy]:
        """Listen for the length of a block."""
        self._passes.set()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            self.begin(Fault.NONE)
            server.close()
            self._reset()
            while self._writers:
                await asyncio.sleep(POLL_S)

    def begin(self, fault: Fault) -> None:
        """Replace the fault."""
        self.fault = fault
        if fault is Fault.KILLED:
            self._reset()
        if fault is Fault.STALLED:
            self._passes.clear()
        else:
            self._passes.set()

    def _reset(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.fault is Fault.KILLED:
            writer.transport.abort()
            return
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, back}
        self._writers |= both
        try:
            await asyncio.gather(self._pipe(reader, back, is_engine=False), self._pipe(there, writer, is_engine=True))
        finally:
            self._writers -= both
            for each in both:
                each.transport.abort()

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_engine: bool) -> None:
        try:
            while data := await reader.read(65_536):
                await self._passes.wait()
                if writer.is_closing():
                    break
                writer.write(self._changed(data) if is_engine and self.fault is Fault.CORRUPT else data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.transport.abort()

    def _changed(self, data: bytes) -> bytes:
        chance, changed = self._chance, bytearray(data)
        at, kind = chance.randrange(len(changed)), chance.randrange(4)
        if kind == 0:
            changed[at] = chance.randrange(256)
        elif kind == 1:
            del changed[at : at + chance.randrange(1, 50)]
        elif kind == 2:
            changed[at:at] = chance.randbytes(chance.randrange(1, 50))
        return bytes(changed)


class Stand:
    """The router, its replicas and their proxies."""

    def __init__(self, router: RouterProcess, replicas: list[ReplicaProcess], proxies: list[list[EventProxy]]) -> None:
        self.router = router
        self.proxies = proxies  # of each replica: of its events and of its replays
        self.statuses = Counter[str]()
        self.faults = Counter[Fault]()
        self.late_s: dict[Fault, float] = {}  # the longest time until a stream counted as estimated
        self.back_s = 0.0  # the longest time until it was followed again
        self._replicas = replicas

    async def send_requests(self, chance: random.Random) -> None:
        """Keep sending prompts until cancelled; a response must be the one that a replica gives."""
        expected = [await asyncio.to_thread(self._expected, number) for number in range(PROMPTS)]
        url, numbers = f"http://127.0.0.1:{self.router.port}/v1/chat/completions", count()

        async def client(http: aiohttp.ClientSession) -> None:
            for _ in numbers:
                number = min(chance.randrange(PROMPTS), chance.randrange(PROMPTS))
                try:
                    async with http.post(url, json=body(number)) as response:
                        content = content_of(await response.json()) if response.status == 200 else None
                except (aiohttp.ClientError, OSError) as error:
                    self.statuses[repr(error)] += 1
                else:
                    is_right = content == expected[number]
                    self.statuses["right" if is_right else f"wrong, status {response.status}"] += 1

        async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(client(http))

    async def inject(self, seconds: float, chance: random.Random) -> None:
        """One fault after another."""
        loop = asyncio.get_running_loop()
        end_at = loop.time() + seconds
        await self.until_followed(0, 1)
        kinds = [Fault.KILLED, Fault.STALLED, Fault.CORRUPT]
        while loop.time() < end_at or len(self.faults) < len(kinds):
            number = chance.randrange(len(self.proxies))
            fault = kinds[self.faults.total()] if self.faults.total() < len(kinds) else chance.choice(kinds)
            self.faults[fault] += 1
            await self._inject_one(number, fault, chance)
            await asyncio.sleep(chance.uniform(*PAUSE_S))

    async def _inject_one(self, number: int, fault: Fault, chance: random.Random) -> None:
        loop = asyncio.get_running_loop()
        began_at, fault_s = loop.time(), chance.uniform(*FAULT_S)
        for proxy in self.proxies[number]:
            proxy.begin(fault)
        if fault is not Fault.CORRUPT:
            await self.until(lambda rows: rows[number]["state"] == "estimated", 5 * ESTIMATED_S)
            self.late_s[fault] = max(self.late_s.get(fault, 0.0), loop.time() - began_at)
        await asyncio.sleep(max(0.0, began_at + fault_s - loop.time()))
        for proxy in self.proxies[number]:
            proxy.begin(Fault.NONE)
        ended_at = loop.time()
        await self.until_followed(number)
        self.back_s = max(self.back_s, loop.time() - ended_at)

    async def until_followed(self, *numbers: int) -> None:
        await self.until(lambda rows: all(rows[number]["is_followed"] for number in numbers), FOLLOWED_S)

    async def until(self, is_met: Any, within_s: float) -> None:
        """Wait until the streams' rows are as wanted; TimeoutError."""
        url = f"http://127.0.0.1:{self.router.admin_port}/admin/replicas"
        async with asyncio.timeout(within_s), aiohttp.ClientSession() as http:
            while True:
                async with http.get(url) as response:
                    rows = sorted((await response.json())["replicas"], key=lambda row: str(row["name"]))
                if is_met([row["kv_events"][0] for row in rows]):
                    return
                await asyncio.sleep(POLL_S)

    def _expected(self, number: int) -> str:
        return content_of(self._replicas[0].send("POST", "/v1/chat/completions", body(number)).json)


def body(number: int) -> dict[str, Any]:
    text = f"{number} " + "words of a prompt that is sent again and again " * (5 + 2 * number)
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 20}


def content_of(document: Any) -> str:
    return str(document["choices"][0]["message"]["content"])


async def measure(verdict: Verdict, seconds: float, seed: int) -> None:
    """Serve for so long under faults, and check what clients and operators see."""
    chance = random.Random(seed)
    async with standing(chance) as stand:
        requesting = asyncio.create_task(stand.send_requests(random.Random(seed + 1)))
        try:
            await stand.inject(min(seconds / 4, 20.0), chance)
            before, requests_before = await stand.router.figures(), stand.statuses.total()
            await stand.inject(seconds * 3 / 4, chance)
            after, requests_after = await stand.router.figures(), stand.statuses.total()
            failures = await stand.router.metric("loop_failures_total")
        finally:
            requesting.cancel()
            await asyncio.wait([requesting])
    figures = ", ".join(f"{number} {fault}" for fault, number in stand.faults.items())
    verdict.check("faults", figures, len(stand.faults) == 3)
    verdict.check("clients", f"{dict(stand.statuses)}", set(stand.statuses) == {"right"})
    for fault, late_s in stand.late_s.items():
        verdict.check(f"{fault}: estimated", f"after {late_s:.2f} s at most", late_s <= ESTIMATED_S)
    verdict.check("followed again", f"after {stand.back_s:.2f} s at most", stand.back_s <= FOLLOWED_S)
    defects = [line for line in stand.router.log if "defect" in line]
    verdict.check("defects", f"{failures:.0f}, {defects}", not failures and not defects)
    filling = min(requests_after, MAX_RECORDS) - min(requests_before, MAX_RECORDS)
    slack_kib = SLACK_KIB + FILLING_KIB * filling
    verdict.check_growth("resident", before.rss_kib, after.rss_kib, slack=slack_kib, unit=" KiB")
    stand.router.judge_handles(verdict, before, after)


@asynccontextmanager
async def standing(chance: random.Random) -> AsyncIterator[Stand]:
    """Two replicas, their proxies and a router that follows them."""
    async with AsyncExitStack() as stack:
        arguments = (*ENGINE, "--kv-events-config", json.dumps(EVENTS))
        replicas = [stack.enter_context(replica_process(*arguments)) for _ in range(2)]
        proxies, members = [], []
        for number, replica in enumerate(replicas):
            source = replica.send("GET", "/kv_event_sources").json["0"]
            ports = [int(source[name].rpartition(":")[2]) for name in ("endpoint", "replay_endpoint")]
            pair = [await stack.enter_async_context(EventProxy(port, chance).serving()) for port in ports]
            endpoint, replay_endpoint = (f"tcp://127.0.0.1:{proxy.port}" for proxy in pair)
            events = KvEvents(endpoint=endpoint, replay_endpoint=replay_endpoint)
            url = f"http://127.0.0.1:{replica.port}"
            members.append(ReplicaConfig(name=f"replica-{number}", url=url, block_tokens=16, kv_events=events))
            proxies.append(pair)
        policy = PolicyConfig(name="soak", revision=1, settings=LowestCostSettings())
        pool = PoolConfig(name="soak", policy=policy, replicas=tuple(members))
        router = await stack.enter_async_context(router_process(RouterConfig(hash_secret="0" * 32, pools=(pool,))))
        yield Stand(router, replicas, proxies)
