"""One run: new engines, a new router, the same requests; figures of the engines' counters and the client's clock."""

from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import mean, quantiles
from subprocess import DEVNULL
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from routing.schema import KvEvents
from routing.traffic.client import ChatClient, ChatResult
from tests.benchmarks.comparison.workloads import MODEL, Request
from tests.benchmarks.kv_events import EVENTS
from tests.benchmarks.proxy import Proxy, free_port
from tests.routing.standin.replica_process import ReplicaProcess, replica_process

DRAIN_S = 30.0  # after the last request; what has no first byte then is unfinished
READY_S = 60.0
# Limits of a valid run.
LATE_P50_S, LATE_P99_S = 0.010, 0.200  # requests that the client sent too late
MAX_CORES = 0.6  # that a router or an engine uses or waits for
Loss = Callable[[float], Coroutine[Any, Any, None]]  # of an engine, during a run of so many seconds
COUNTERS = ("prefix_cache_hits", "prefix_cache_queries", "prompt_tokens")


@dataclass
class Engine:
    """A replica, with its process if it was started here."""

    url: str
    events: KvEvents | None = None
    process: ReplicaProcess | None = None
    lost: dict[str, float] = field(default_factory=dict)  # counters of processes that were killed

    @property
    def address(self) -> str:
        return urlsplit(self.url).netloc

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=READY_S) as response:
            return str(response.read(), "utf-8")

    def blocks(self) -> int:
        return int(re.findall(r'num_gpu_blocks="(\d+)"', self.metrics())[0]) - 1  # without vLLM's null block

    def counters(self) -> dict[str, float]:
        text = self.metrics()
        totals = {name: re.findall(rf"^vllm:{name}_total(?:{{.*}})? (\S+)$", text, re.MULTILINE) for name in COUNTERS}
        return {name: sum(map(float, values)) + self.lost.get(name, 0.0) for name, values in totals.items()}


class Engines:
    """Stand-ins on ports that stay the same after a restart, but for those of KV events."""

    def __init__(self, stack: ExitStack, count: int, options: Sequence[str]) -> None:
        self._stack, self._options = stack, options
        with ThreadPoolExecutor(count) as pool:
            self.all = list(pool.map(self._start, [Engine(f"http://127.0.0.1:{free_port()}") for _ in range(count)]))

    def _start(self, engine: Engine) -> Engine:
        port = engine.address.rpartition(":")[2]
        options = (*self._options, "--kv-events-config", json.dumps(EVENTS), "--port", port)
        engine.process = self._stack.enter_context(replica_process(*options, model=MODEL, stderr=DEVNULL))
        published = engine.process.send("GET", "/kv_event_sources").json["0"]
        engine.events = KvEvents(endpoint=published["endpoint"], replay_endpoint=published["replay_endpoint"])
        return engine

    async def lose_one(self, seconds: float) -> None:
        """Kill the first engine after a third of the time, and start it again after 7/12."""
        engine = self.all[0]
        await asyncio.sleep(seconds / 3)
        engine.lost = await asyncio.to_thread(engine.counters)
        assert engine.process
        engine.process.process.kill()
        await asyncio.sleep(seconds / 4)
        await asyncio.to_thread(self._start, engine)


def given(urls: Sequence[str]) -> list[Engine]:
    """Replicas that run already, with empty caches; those that still run requests refuse to empty theirs."""
    engines = [Engine(url.rstrip("/")) for url in urls]
    deadline = time.monotonic() + READY_S
    for engine in engines:
        request = urllib.request.Request(f"{engine.url}/reset_prefix_cache?reset_running_requests=true", method="POST")
        # Some releases of vLLM do not say whether it succeeded: their response is empty.
        while not json.loads(urllib.request.urlopen(request, timeout=READY_S).read() or '{"success": true}')["success"]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{engine.url} does not empty its cache")
            time.sleep(0.1)
    return engines


@dataclass
class Sent:
    """Outcome of a request."""

    late_s: float
    result: ChatResult = field(default_factory=ChatResult)
    wait_s: float = 0.0  # for the first event; without one, until the end of the run
    is_unfinished: bool = False  # still waiting for the first event then


async def play(requests: Sequence[Request], ports: Sequence[int]) -> list[Sent]:
    """Send each request at its time, whatever became of the others."""
    outcomes: list[Sent] = []
    tasks: list[asyncio.Task[ChatResult]] = []
    loop = asyncio.get_running_loop()
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout()
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        clients = [ChatClient(http, f"http://127.0.0.1:{port}/v1/chat/completions") for port in ports]
        started_s = loop.time()
        for number, request in enumerate(requests):
            await asyncio.sleep(started_s + request.at_s - loop.time())
            outcomes.append(Sent(loop.time() - started_s - request.at_s))
            headers = {"Content-Type": "application/json", "X-Session-ID": request.session}
            sending = clients[number % len(clients)].send(request.body, headers, outcomes[-1].result)
            tasks.append(asyncio.create_task(sending))
        end_s = loop.time() - started_s + DRAIN_S
        await asyncio.wait(tasks, timeout=DRAIN_S)
        for request, task, outcome in zip(requests, tasks, outcomes, strict=True):
            ttft_s, is_pending = outcome.result.ttft_s, task.cancel()
            outcome.is_unfinished = is_pending and ttft_s is None
            # An error is no quick response: it counts as if the client had waited until the end.
            outcome.wait_s = end_s - request.at_s - outcome.late_s if ttft_s is None else ttft_s
        await asyncio.wait(tasks)
    return outcomes


def refusals(cores: Mapping[str, float], late_s: Sequence[float]) -> Iterator[str]:
    """Why a run is not valid."""
    for name, wanted in cores.items():
        if wanted > MAX_CORES:
            yield f"{name} was CPU-bound: it used or waited for {wanted:.2f} cores"
    late = percentile(late_s, 50), percentile(late_s, 99)
    if late[0] > LATE_P50_S or late[1] > LATE_P99_S:
        yield f"the client was late: {1e3 * late[0]:.0f} ms at p50, {1e3 * late[1]:.0f} ms at p99"


def percentile(values: Sequence[float], percent: int) -> float:
    return quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else sum(values)


async def measure(
    requests: Sequence[Request], routers: Sequence[Proxy], engines: Sequence[Engine], loss: Loss | None
) -> dict[str, Any]:
    """Play the requests through the routers in turns; figures, and why they are not valid."""
    watched = {f"router {number}": router for number, router in enumerate(routers)}
    for number, engine in enumerate(engines):
        if engine.process and not (loss and number == 0):
            watched[f"engine {number}"] = Proxy("engine", 0, engine.process.process.pid)
    before, cpu_s = [engine.counters() for engine in engines], sum(router.cpu_s() for router in routers)
    started_s, wanted_s = time.monotonic(), {name: process.wanted_s() for name, process in watched.items()}
    async with asyncio.TaskGroup() as group:
        if loss is not None:
            group.create_task(loss(requests[-1].at_s))
        outcomes = await play(requests, [router.port for router in routers])
    elapsed_s = time.monotonic() - started_s
    cores = {name: (process.wanted_s() - wanted_s[name]) / elapsed_s for name, process in watched.items()}
    after = [engine.counters() for engine in engines]
    hits, queries, tokens = (
        [last[name] - first[name] for first, last in zip(before, after, strict=True)] for name in COUNTERS
    )
    waits = [outcome.wait_s for outcome in outcomes]
    late_s = [outcome.late_s for outcome in outcomes]
    figures = {
        "requests": len(outcomes),
        "hit_percent": 100 * sum(hits) / max(1.0, sum(queries)),
        "ttft_mean_s": mean(waits),
        "ttft_p50_s": percentile(waits, 50),
        "ttft_p99_s": percentile(waits, 99),
        "errors": sum(outcome.result.error is not None for outcome in outcomes),
        "unfinished": sum(outcome.is_unfinished for outcome in outcomes),
        "max_to_mean": max(tokens) / max(1.0, mean(tokens)),
        "cpu_ms": 1e3 * (sum(router.cpu_s() for router in routers) - cpu_s) / len(outcomes),
        "memory_mib": sum(router.memory_mib() for router in routers),
        "late_p50_ms": 1e3 * percentile(late_s, 50),
        "late_p99_ms": 1e3 * percentile(late_s, 99),
    }
    return {name: round(value, 4) for name, value in figures.items()} | {"refused": list(refusals(cores, late_s))}


async def ready(port: int) -> None:
    """Wait until a router serves a request: some listen before they know their replicas."""
    fields = {"model": MODEL, "messages": [{"role": "user", "content": "?"}], "max_tokens": 1, "stream": True}
    async with asyncio.timeout(READY_S), aiohttp.ClientSession() as http:
        client = ChatClient(http, f"http://127.0.0.1:{port}/v1/chat/completions")
        while (await client.send(json.dumps(fields).encode(), {"Content-Type": "application/json"})).error:
            await asyncio.sleep(0.2)
