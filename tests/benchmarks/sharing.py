"""Routers that share their state, live: ``python -m tests.benchmarks sharing [--workload NAME] [--cpu]``.

Real router processes, 8 stand-in replicas and a Valkey: the first requests of a seeded workload, each to a random
router, with nothing shared and with shared state. ``sim`` is the simulator with the same requests, the same routers for
them, and engines with the same parameters. Both as ratios to one router, because a client's own time is part of a live
TTFT; ``--speed`` times as fast, because the trace would take an hour. About 3 minutes. ``--workers``: of each router.

``--cpu``: user and system time of a router per request, in us: a router with three peers, which place as many requests
each, and one that does not share get the same traffic in turns. Bodies have 8 KiB, of which seven eighths were sent
before.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace as changed
from pathlib import Path
from statistics import median
from typing import NamedTuple, cast

import aiohttp
import uvloop

from controlplane.stack.servers import valkey_child
from routing.balancing.load_tracker import LoadTracker
from routing.balancing.residency import Residency
from routing.replay.block_runs import Forest
from routing.replay.fast_engine import FastEngineConfig
from routing.replay.replay import replay, report
from routing.replay.routers import SeveralRouters, Sharing, router_placers
from routing.schema import LowestCostSettings
from routing.settings import STATE_URL
from routing.sharing.exchange import Exchange
from routing.sharing.transports import ServerTransport
from routing.sharing.view import PERIOD_S
from routing.traffic.client import ChatClient, ChatResult, total
from routing.traffic.mix import TraceWorkload
from routing.traffic.player import PlayConfig, Player
from routing.traffic.trace import requests_of
from routing.types import BLOCK_BYTES, TargetId
from tests.benchmarks.builds import compiled_environment
from tests.benchmarks.comparison.routers import Stand, ours
from tests.benchmarks.comparison.runs import Engines
from tests.benchmarks.comparison.workloads import ENGINE_BLOCK_TOKENS
from tests.benchmarks.kv_events import BODY_BYTES, SESSIONS, Traffic, cpu_ns, serve
from tests.benchmarks.proxy import Proxy
from tests.benchmarks.router import our_router, replicas
from tests.conftest import running
from tests.synthetic_traces import chat, coding

REPLICAS = 8
WORKLOADS = {"chat": (chat, FastEngineConfig(4000), 0.7), "coding": (coding, FastEngineConfig(1500), 1.5)}
CASES = ((1, Sharing.NONE), (2, Sharing.NONE), (2, Sharing.STATE), (4, Sharing.STATE))
PEERS = 3  # of the router whose CPU is measured
PROMPT_BLOCKS = BODY_BYTES // BLOCK_BYTES
HASH_SECRET = "0" * 32  # of ``serving_router``
DELAY_S = PERIOD_S  # of the simulator; the server adds about a millisecond


class Row(NamedTuple):
    """Figures of one case."""

    ttft_s: float
    hit_ratio: float
    failed: int
    predicted_s: float
    predicted_hit_ratio: float


class RandomRouters:
    """A client that sends each request to the router that the simulator gives it too."""

    def __init__(self, http: aiohttp.ClientSession, routers: Sequence[Proxy]) -> None:
        self._random = random.Random("router of a request")
        self._clients = [ChatClient(http, f"http://127.0.0.1:{it.port}/v1/chat/completions") for it in routers]

    async def send(self, body: bytes, headers: dict[str, str]) -> ChatResult:
        number = self._random.randrange(len(self._clients)) if len(self._clients) > 1 else 0
        return await self._clients[number].send(body, headers)


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks sharing")
    parser.add_argument("--workload", choices=WORKLOADS, default="chat")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--speed", type=float, default=4.0)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--plain", action="store_true", help="measure the plain build")
    parser.add_argument("--workers", type=int, default=1, help="processes of each router; the simulator has one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rates", type=float, nargs="+", default=[60.0, 250.0, 500.0], help="requests/s, with --cpu")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each round, with --cpu")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, running(valkey_child(path := Path(folder) / "valkey" / "socket")):
        if options.cpu:
            uvloop.run(compare_cpu(f"unix://{path}", options))
            return
        print(f"{options.workload}, {options.requests} requests, {options.speed:g} times as fast; ratios to one router")
        print(f"{'routers':<10} {'TTFT s':>8} {'ratio':>6} {'sim s':>8} {'ratio':>6} {'hit %':>6} {'sim %':>6} failed")
        single: Row | None = None
        for routers, sharing in CASES:
            row = uvloop.run(measure(f"unix://{path}", options, routers, sharing))
            single = single or row
            live, simulated = row.ttft_s / single.ttft_s, row.predicted_s / single.predicted_s
            figures = f"{row.ttft_s:8.3f} {live:6.2f} {row.predicted_s:8.3f} {simulated:6.2f}"
            hits = f"{100 * row.hit_ratio:6.1f} {100 * row.predicted_hit_ratio:6.1f}"
            print(f"{routers} {sharing:<8} {figures} {hits} {row.failed}", flush=True)


async def measure(url: str, options: argparse.Namespace, routers: int, sharing: Sharing) -> Row:
    """Play a workload through new routers before new replicas, and simulate the same."""
    make, model, load = WORKLOADS[options.workload]
    columns, speed = make(options.requests, seed=1), options.speed
    model = changed(model, prefill_rate=speed * model.prefill_rate, step_s=model.step_s / speed)
    model = changed(model, decode_s=model.decode_s / speed)
    scale = load * REPLICAS * model.prefill_rate / columns.offered_tokens_per_s()
    placers = router_placers(LowestCostSettings(), columns, model, REPLICAS, routers)
    placer = SeveralRouters(placers, sharing, delay_s=DELAY_S) if routers > 1 else placers[0]
    predicted = report(replay(Forest(columns), [model] * REPLICAS, placer, scale), columns)
    with _stand(url if sharing is Sharing.STATE else None, routers, model, options) as proxies:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            client = cast("ChatClient", RandomRouters(http, proxies))
            player = Player(client, PlayConfig(time_scale=scale, in_flight=100_000))
            await player.play(TraceWorkload(requests_of(columns), loop=False))
    played = total(player.totals)
    figures = played.report()
    return Row(
        figures["ttft_s"]["mean"],
        played.hit_rate or 0.0,
        played.requests - played.ok,
        predicted["ttft_s"]["mean"],
        predicted["token_hit_rate"],
    )


@contextmanager
def _stand(
    url: str | None, routers: int, model: FastEngineConfig, options: argparse.Namespace
) -> Iterator[list[Proxy]]:
    """Routers before new replicas."""
    blocks = model.blocks * model.block_tokens // ENGINE_BLOCK_TOKENS
    engine = (
        f"--blocks {blocks + 1} --prefill-rate {model.prefill_rate} --step-s {model.step_s} --decode-s {model.decode_s}"
    )
    environment = (None if options.plain else compiled_environment()) or dict(os.environ)
    environment |= {"WARMPATH_ROUTER_WORKERS": str(options.workers), **({STATE_URL: url} if url is not None else {})}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines = Engines(stack, REPLICAS, engine.split()).all
        stands = [Stand(folder / f"{number}", engines, environment) for number in range(routers)]
        yield [stack.enter_context(ours(stand)) for stand in stands]


class Peer:
    """Another router without clients: it places prompts on its own account and publishes them."""

    def __init__(self, url: str, number: int, targets: Sequence[TargetId]) -> None:
        self._random = random.Random(number)
        self._targets = targets
        self._loads, residency = LoadTracker(), Residency()
        for target in targets:
            residency.add_replica(target)
        self._residency = residency
        self._sessions = [self._blocks(PROMPT_BLOCKS) for _ in range(SESSIONS)]
        self.exchange = Exchange(ServerTransport(url))
        self.exchange.bind(f"{number:08x}" * 2, self._loads, residency)
        self.exchange.configure(HASH_SECRET, targets)

    async def place(self, rate: float) -> None:
        """Place prompts at this rate until cancelled; an eighth of each is new."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            target, session = self._random.choice(self._targets), self._random.choice(self._sessions)
            chain = session[: PROMPT_BLOCKS * 7 // 8] + self._blocks(PROMPT_BLOCKS // 8)
            ticket = self._loads.dispatch(target, 0, self._residency.insert(target, chain, self._loads.clock()))
            loop.call_later(0.02, ticket.record_first_byte)
            loop.call_later(0.04, ticket.end)
            due_s += 1 / rate
            await asyncio.sleep(max(0.0, due_s - loop.time()))

    def _blocks(self, count: int) -> array[int]:
        return array("Q", [self._random.getrandbits(64) for _ in range(count)])


async def compare_cpu(url: str, options: argparse.Namespace) -> None:
    """CPU per request of a router that shares with ``PEERS`` others, and of one that does not."""
    compiled, traffic = (None if options.plain else compiled_environment()) or dict(os.environ), Traffic(seed=1)

    async def served(router: Proxy, rate: float) -> tuple[float, float]:
        """CPU per request in us, and requests/s."""
        before, started = cpu_ns(router), time.monotonic()
        load = argparse.Namespace(requests=int(rate * options.seconds), rate=rate)
        await serve(router.port, traffic, Traffic.next_turn, load)
        return (cpu_ns(router) - before) / 1e3 / load.requests, load.requests / (time.monotonic() - started)

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        _, ports = stack.enter_context(replicas())
        sharing, alone = (
            stack.enter_context(our_router(folder / name, ports, LowestCostSettings(), compiled | environment))
            for name, environment in (("sharing", {STATE_URL: url}), ("alone", {}))
        )
        peers = [Peer(url, number, [TargetId(f"replica-{port}") for port in ports]) for number in range(PEERS)]
        for peer in peers:
            stack.callback(peer.exchange.close)
        for rate in options.rates:
            async with asyncio.TaskGroup() as group:
                placing = [group.create_task(peer.place(rate)) for peer in peers]
                rounds = [(*await served(sharing, rate), *await served(alone, rate)) for _ in range(options.rounds + 1)]
                for task in placing:
                    task.cancel()
            shared_us, rate_shared, alone_us, rate_alone = (median(column) for column in zip(*rounds[1:], strict=True))
            ratio = median([row[0] / row[2] for row in rounds[1:]])  # the first round fills the caches
            text = f"{rate_shared:6.0f} and {rate_alone:.0f} requests/s: {shared_us:.0f} us a request"
            more_ms = (shared_us - alone_us) * rate_shared / 1e3
            print(f"{text}, {alone_us:.0f} without sharing; {more_ms:.1f} ms/s more, ratio {ratio:.3f}", flush=True)
