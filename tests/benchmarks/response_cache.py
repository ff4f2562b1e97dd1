"""What a response cache and its store cost: ``python -m tests.benchmarks response_cache``.

Each row is a router process before the same replica, with the same paced load: requests with temperature 0, all
different, so that each is looked up in the store, and its response is stored there. Then it gets requests as fast as
``CLIENTS`` get responses. The rows ``hits`` send the same request each time; their CPU at full load is at most
``MOST_OF_A_REQUEST`` of what a proxied request takes. ``added`` compares a percentile with that of the row ``no cache``
in the same round; the least of the rounds counts, because other load only adds to a latency. Stores: one that hangs
reads commands and never replies, one that is full refuses each write, one that talks garbage sends random bytes, and
one that is down refuses connections.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from itertools import count
from pathlib import Path
from random import Random
from time import perf_counter
from typing import NamedTuple

import aiohttp
import uvloop
from msgspec.structs import replace
from redis import Redis

from controlplane.stack.servers import valkey_child
from routing.schema import ResponseCache, TaskGroupConfig
from tests.benchmarks.router import replicas
from tests.benchmarks.soak.stand import RouterProcess, pool_of, router_process
from tests.benchmarks.soak.verdict import Verdict
from tests.conftest import running

REQUESTS, RATE, ROUNDS = 600, 100.0, 3
WARM_UP = 50  # requests
TEXT = "What is a prefix cache, and what is it worth? " * 40
GOAL_P99_S = 0.005
MOST_OF_A_REQUEST = 1 / 3
CLIENTS = 16  # at full load, each with one request at a time
Reply = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Replica(NamedTuple):
    name: str
    url: str


class Row(NamedTuple):
    """A router: whether it has a cache, the URL of its store, and whether it gets the same request each time."""

    name: str
    has_cache: bool = True
    store: str | None = None
    is_repeated: bool = False


class Figures(NamedTuple):
    p50_s: float
    p99_s: float
    cpu_us: float  # of the router, per request
    full_load_us: float  # the same at full load
    errors: int


def main() -> None:
    verdict = Verdict("cache")
    uvloop.run(measure(verdict))
    if verdict.failures:
        sys.exit("\n".join(verdict.failures))


async def measure(verdict: Verdict, requests: int = REQUESTS, rounds: int = ROUNDS) -> dict[str, list[Figures]]:
    """Print all rows; figures of each round, by row."""
    found: dict[str, list[Figures]] = {}
    async with AsyncExitStack() as stack:
        _, (port, *_) = stack.enter_context(replicas())
        rows = await _rows(stack)
        for _ in range(rounds):
            for row in rows:
                found.setdefault(row.name, []).append(await _load(row, port, requests))
    for row in rows:
        _report(verdict, row, found[row.name], found["no cache"])
    return found


async def _rows(stack: AsyncExitStack) -> list[Row]:
    stores = {name: stack.enter_context(_valkey()) for name in ("store", "store is full")}
    Redis.from_url(stores["store is full"]).config_set("maxmemory", "1")
    for name, reply in (("store hangs", _hang), ("store talks garbage", _talk_garbage)):
        stores[name] = f"redis://127.0.0.1:{await stack.enter_async_context(_listening(reply))}/0"
    async with _listening(_hang) as closed_port:
        stores["store is down"] = f"redis://127.0.0.1:{closed_port}/0"
    hits = [Row("hits, memory", is_repeated=True), Row("hits, store", store=stores["store"], is_repeated=True)]
    return [
        Row("no cache", has_cache=False),
        Row("memory"),
        *(Row(name, True, url) for name, url in stores.items()),
        *hits,
    ]


def _report(verdict: Verdict, row: Row, rounds: list[Figures], without: list[Figures]) -> None:
    added_s = min(one.p99_s - other.p99_s for one, other in zip(rounds, without, strict=True))
    best = min(rounds, key=lambda figures: figures.p99_s)
    cpu_us, full_load_us, proxied_us = (
        min(getattr(figures, name) for figures in of)
        for of, name in ((rounds, "cpu_us"), (rounds, "full_load_us"), (without, "full_load_us"))
    )
    errors = sum(figures.errors for figures in rounds)
    text = f"p50 {1e3 * best.p50_s:5.2f} ms, p99 {1e3 * best.p99_s:5.2f} ms ({1e3 * added_s:+.2f} ms added), "
    text += f"{cpu_us:4.0f} us CPU a request, {full_load_us:4.0f} at full load, {errors} errors"
    is_cheap = not row.is_repeated or full_load_us <= MOST_OF_A_REQUEST * proxied_us
    verdict.check(row.name, text, passed=not errors and added_s <= GOAL_P99_S and is_cheap)


async def _load(row: Row, port: int, requests: int) -> Figures:
    group = TaskGroupConfig(name="faq", response_cache=ResponseCache() if row.has_cache else None)
    config = pool_of([Replica("one", f"http://127.0.0.1:{port}")])
    config = replace(config, pools=(replace(config.pools[0], groups=(group,)),))
    with _store_url(row.store):
        async with router_process(config) as router, aiohttp.ClientSession() as http:
            await _send(http, router, row, WARM_UP, "warm-up")
            before_s = router.cpu_s
            latencies, errors = await _send(http, router, row, requests, os.urandom(4).hex())
            cpu_us = 1e6 * (router.cpu_s - before_s) / requests
            before_s = router.cpu_s
            errors += await _flood(http, router, row, 2 * requests, os.urandom(4).hex())
            full_load_us = 1e6 * (router.cpu_s - before_s) / (2 * requests)
    latencies.sort()
    p50_s, p99_s = latencies[len(latencies) // 2], latencies[int(0.99 * len(latencies))]
    return Figures(p50_s, p99_s, cpu_us, full_load_us, errors)


async def _send(
    http: aiohttp.ClientSession, router: RouterProcess, row: Row, requests: int, prefix: str
) -> tuple[list[float], int]:
    """Send requests by a Poisson process; latencies in seconds, and the number of failed requests."""
    chance, errors = Random(1), 0
    latencies: list[float] = []

    async def send(number: int) -> None:
        nonlocal errors
        started = perf_counter()
        errors += await _post(http, router, "" if row.is_repeated else f"{prefix} {number}") != 200
        latencies.append(perf_counter() - started)

    tasks, due = [], perf_counter()
    for number in range(requests):
        due += chance.expovariate(RATE)
        await asyncio.sleep(max(0.0, due - perf_counter()))
        tasks.append(asyncio.create_task(send(number)))
    await asyncio.gather(*tasks)
    return latencies, errors


async def _flood(http: aiohttp.ClientSession, router: RouterProcess, row: Row, requests: int, prefix: str) -> int:
    """Send requests as fast as ``CLIENTS`` get responses; the number of failed ones."""
    errors, left = 0, count()

    async def send() -> None:
        nonlocal errors
        while (number := next(left)) < requests:
            errors += await _post(http, router, "" if row.is_repeated else f"{prefix} {number}") != 200

    await asyncio.gather(*(send() for _ in range(CLIENTS)))
    return errors


async def _post(http: aiohttp.ClientSession, router: RouterProcess, unique: str) -> int:
    """Send a request; the status of the response."""
    body = {"model": "tiny", "temperature": 0, "messages": [{"role": "user", "content": f"{unique} {TEXT}"}]}
    url = f"http://127.0.0.1:{router.port}/v1/chat/completions"
    async with http.post(url, data=json.dumps(body), headers={"X-Task-Group": "faq"}) as response:
        await response.read()
        return response.status


# --- stores ---


@contextmanager
def _store_url(url: str | None) -> Iterator[None]:
    """The environment of a router with this store."""
    name = "WARMPATH_ROUTER_CACHE_URL"
    before = os.environ.pop(name, None)
    if url is not None:
        os.environ[name] = url
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


@contextmanager
def _valkey() -> Iterator[str]:
    """The URL of a server of its own, which refuses writes when its memory is used up."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "valkey" / "socket"
        with running(valkey_child(path)):
            yield f"unix://{path}?db=1"


@asynccontextmanager
async def _listening(reply: Reply) -> AsyncIterator[int]:
    async with await asyncio.start_server(reply, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def _hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.read(65536):
        pass
    writer.close()


async def _talk_garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while await reader.read(65536):
            writer.write(os.urandom(200))
    writer.close()
