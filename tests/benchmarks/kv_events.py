"""CPU of a router per request with KV events and without: ``python -m tests.benchmarks kv_events``.

Two routers of the compiled build (else plain) serve the same traffic in turns, before the same stand-in replicas that
publish KV events: one follows them, the other estimates. CPU is user + system time of all threads of the router's
process, in ns as the scheduler counts it, with ZeroMQ's thread. ``ratio`` is the median over the rounds of each round
with events divided by the next one without. In ``two routers`` as many requests again reach the replicas from another
router meanwhile, so that half of all events are about prompts of others. Bodies have 8 KiB; the caches are full.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

import aiohttp
import uvloop

from routing.schema import KvEvents, LowestCostSettings, ReplicaConfig
from tests.benchmarks.builds import compiled_environment
from tests.benchmarks.proxy import DEADLINE_S, Proxy
from tests.benchmarks.router import serving_router
from tests.routing.standin.replica_process import ReplicaProcess, replica_process

REPLICAS = 2
ROUNDS = 5
REQUESTS = 400  # of a round
RATE = 60.0  # requests/s
CONNECTIONS = 32
BODY_BYTES = 8192
OUTPUT_TOKENS = 64
SESSIONS = 40
BLOCKS = 4001  # of each replica, 16 tokens each: less than the sessions and their output
EVENTS = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}
ENGINE = ("--prefill-rate", "400000", "--step-s", "0.004", "--decode-s", "0.00005", "--blocks", str(BLOCKS))
GOAL = 1.1

Bodies = Iterator[bytes]


class Traffic:
    """Bodies of about 8 KiB, by what of them is cached."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._numbers = count()
        self._sessions = [self._text(BODY_BYTES) for _ in range(SESSIONS)]

    def repeated(self) -> bytes:
        """A prompt that was sent before: only generated tokens are stored."""
        return self._body(self._random.choice(self._sessions))

    def next_turn(self) -> bytes:
        """An eighth of the prompt is new."""
        return self._body(self._random.choice(self._sessions)[: BODY_BYTES * 7 // 8] + self._text(BODY_BYTES // 8))

    def unique(self) -> bytes:
        """Nothing was sent before."""
        return self._body(self._text(BODY_BYTES))

    def _text(self, size: int) -> str:
        words = ("lorem", "ipsum", "dolor", "sit", "amet", "one", "seven", "of", "all", "routers")
        text = f"{next(self._numbers)} of {self._random.random()} " + " ".join(self._random.choices(words, k=size // 4))
        return text[:size]

    @staticmethod
    def _body(text: str) -> bytes:
        messages = [{"role": "user", "content": text}]
        return json.dumps({"model": "tiny", "messages": messages, "max_tokens": OUTPUT_TOKENS}).encode()


class Row(NamedTuple):
    """Figures of one workload; CPU is in us per request."""

    name: str
    off_us: float
    on_us: float
    ratio: float
    events: float  # applied per request
    matched: float  # share of the requests whose blocks were found


def main(arguments: Sequence[str] = ()) -> None:
    options = _options(arguments)
    compiled = None if options.plain else compiled_environment()
    rounds = f"{options.rounds} rounds of {options.requests} requests, {options.rate:g} requests/s"
    print(f"{rounds}, 8 KiB bodies; goal: a ratio of at most {GOAL}")
    print(f"{'':28} {'off us':>8} {'on us':>8} {'ratio':>7} {'events':>7} {'matched':>8}")
    with _stand(compiled) as routers:
        for name in options.only or WORKLOADS:
            row = uvloop.run(measure(name, routers, options))
            figures = f"{row.off_us:8.0f} {row.on_us:8.0f} {row.ratio:7.2f} {row.events:7.1f} {row.matched:8.2f}"
            print(f"{row.name:28} {figures}", flush=True)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks kv_events")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--only", nargs="*", choices=WORKLOADS)
    parser.add_argument("--plain", action="store_true", help="measure the plain build")
    return parser.parse_args(arguments)


WORKLOADS: dict[str, tuple[Callable[[Traffic], bytes], bool]] = {
    "repeated": (Traffic.repeated, False),
    "next turn": (Traffic.next_turn, False),
    "unique": (Traffic.unique, False),
    "next turn, two routers": (Traffic.next_turn, True),
}


async def measure(name: str, routers: tuple[Proxy, Proxy, Proxy], options: argparse.Namespace) -> Row:
    """Serve one workload in turns with events and without; the first round of each fills the caches."""
    on, off, other = routers
    new_body, has_other = WORKLOADS[name]
    traffic = Traffic(seed=1)
    figures: dict[str, list[float]] = {on.name: [], off.name: []}
    counts = await followed(on)
    for _ in range(options.rounds + 1):
        for proxy in (on, off):
            before = cpu_ns(proxy)
            loads = [serve(port, traffic, new_body, options) for port in (proxy.port, *([other.port] * has_other))]
            await asyncio.gather(*loads)
            figures[proxy.name].append((cpu_ns(proxy) - before) / 1e3 / options.requests)
    ons, offs = figures[on.name][1:], figures[off.name][1:]
    ratio = median([of_on / of_off for of_on, of_off in zip(ons, offs, strict=True)])
    requests = (options.rounds + 1) * options.requests
    events, matched = ((after - before) / requests for before, after in zip(counts, await followed(on), strict=True))
    return Row(name, median(offs), median(ons), ratio, events, matched)


async def followed(proxy: Proxy) -> tuple[int, int]:
    """The events that a router has applied and the responses that it has matched, once it follows all replicas."""
    url = f"http://127.0.0.1:{proxy.admin_port}/admin/replicas"
    async with aiohttp.ClientSession() as http, asyncio.timeout(DEADLINE_S):
        while True:
            async with http.get(url) as response:
                rows = [replica["kv_events"][0] for replica in (await response.json())["replicas"]]
            if all(row["is_followed"] for row in rows):
                return sum(row["events"] for row in rows), sum(row["matched"] for row in rows)
            await asyncio.sleep(0.05)


async def serve(port: int, traffic: Traffic, new_body: Callable[[Traffic], bytes], options: argparse.Namespace) -> None:
    """Send requests at a steady rate, and read their responses."""
    url, started = f"http://127.0.0.1:{port}/v1/chat/completions", time.monotonic()
    places = asyncio.Semaphore(CONNECTIONS)

    async def send(http: aiohttp.ClientSession, body: bytes) -> None:
        async with places, http.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
            await response.read()
            response.raise_for_status()

    async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:
        for number in range(options.requests):
            await asyncio.sleep(max(0.0, started + number / options.rate - time.monotonic()))
            group.create_task(send(http, new_body(traffic)))


def cpu_ns(proxy: Proxy) -> int:
    """CPU time of all threads of a process."""
    tasks = Path(f"/proc/{proxy.pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


@contextmanager
def _stand(compiled: dict[str, str] | None) -> Iterator[tuple[Proxy, Proxy, Proxy]]:
    """Routers with events, without, and another one with events, before the same replicas."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        arguments = (*ENGINE, "--kv-events-config", json.dumps(EVENTS))
        replicas = [stack.enter_context(replica_process(*arguments)) for _ in range(REPLICAS)]

        def router(name: str, *, follows: bool) -> Proxy:
            members = tuple([member(replica, follows=follows) for replica in replicas])
            return stack.enter_context(serving_router(folder, name, members, LowestCostSettings(), compiled))

        yield router("on", follows=True), router("off", follows=False), router("other", follows=True)


def member(replica: ReplicaProcess, *, follows: bool) -> ReplicaConfig:
    """A stand-in replica, as a router that follows its events or estimates has it configured."""
    published = replica.send("GET", "/kv_event_sources").json["0"]
    events = KvEvents(endpoint=published["endpoint"], replay_endpoint=published["replay_endpoint"])
    return ReplicaConfig(
        name=f"replica-{replica.port}",
        url=f"http://127.0.0.1:{replica.port}",
        block_tokens=16,
        capacity_blocks=BLOCKS - 1,
        kv_events=events if follows else None,
    )
