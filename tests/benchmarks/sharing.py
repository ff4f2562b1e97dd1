"""Routers that share their state, live: ``python -m tests.benchmarks sharing [--workload NAME] [--cpu]``.

Real router processes, 8 stand-in replicas and a Valkey: the first requests of a seeded workload, each to a random
router, with nothing shared and with shared state. ``sim`` is the simulator with the same requests, the same routers for
them, and engines with the same parameters. Both as ratios to one router, because a client's own time is part of a live
TTFT; ``--speed`` times as fast, because the trace would take an hour. About 3 minutes.

``--cpu``: user and system time of a router per request, in us: four routers that share, and four that do not, get the
same traffic in turns. Bodies have 8 KiB, of which seven eighths were sent before.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace as changed
from pathlib import Path
from statistics import median
from typing import NamedTuple, cast

import aiohttp
import uvloop

from controlplane.stack.servers import valkey_child
from routing.replay.block_runs import Forest
from routing.replay.fast_engine import FastEngineConfig
from routing.replay.replay import replay, report
from routing.replay.routers import SeveralRouters, Sharing, router_placers
from routing.schema import LowestCostSettings, ReplicaConfig
from routing.settings import STATE_URL
from routing.sharing.view import PERIOD_S
from routing.traffic.client import ChatClient, ChatResult, total
from routing.traffic.columns import Columns
from routing.traffic.mix import TraceWorkload
from routing.traffic.player import PlayConfig, Player
from routing.traffic.trace import TraceRequest
from tests.benchmarks.builds import compiled_environment
from tests.benchmarks.kv_events import Traffic, cpu_ns, serve
from tests.benchmarks.proxy import Proxy
from tests.benchmarks.router import serving_router
from tests.conftest import running
from tests.routing.standin.replica_process import replica_process
from tests.synthetic_traces import chat, coding

REPLICAS = 8
ENGINE_BLOCK_TOKENS = 16
WORKLOADS = {"chat": (chat, FastEngineConfig(4000), 0.7), "coding": (coding, FastEngineConfig(1500), 1.5)}
CASES = ((1, Sharing.NONE), (2, Sharing.NONE), (2, Sharing.STATE), (4, Sharing.STATE))
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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=60.0, help="requests/s of each router, with --cpu")
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
            await player.play(TraceWorkload(_requests(columns), loop=False))
    played = total(player.totals)
    figures = played.report()
    return Row(
        figures["ttft_s"]["mean"],
        played.hit_rate or 0.0,
        played.requests - played.ok,
        predicted["ttft_s"]["mean"],
        predicted["token_hit_rate"],
    )


def _requests(columns: Columns) -> list[TraceRequest]:
    rows = zip(columns.at_s, columns.prompt_tokens, columns.output_tokens, columns.starts, strict=False)
    return [
        TraceRequest(at_s, tokens, output, tuple(columns.ids[start : columns.starts[number + 1]]))
        for number, (at_s, tokens, output, start) in enumerate(rows)
    ]


@contextmanager
def _stand(
    url: str | None, routers: int, model: FastEngineConfig, options: argparse.Namespace, alone: int = 0
) -> Iterator[list[Proxy]]:
    """Routers, and ``alone`` further ones that share nothing, before the same new replicas."""
    blocks = model.blocks * model.block_tokens // ENGINE_BLOCK_TOKENS
    engine = ("--blocks", f"{blocks + 1}", "--prefill-rate", f"{model.prefill_rate}", "--step-s", f"{model.step_s}")
    engine += ("--decode-s", f"{model.decode_s}")
    compiled = (None if options.plain else compiled_environment()) or dict(os.environ)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = [stack.enter_context(replica_process(*engine)).port for _ in range(REPLICAS)]
        members = tuple(
            ReplicaConfig(
                name=f"replica-{number}",
                url=f"http://127.0.0.1:{port}",
                block_tokens=ENGINE_BLOCK_TOKENS,
                capacity_blocks=blocks,
            )
            for number, port in enumerate(ports)
        )
        yield [
            stack.enter_context(
                serving_router(
                    folder,
                    f"router-{number}",
                    members,
                    LowestCostSettings(),
                    {**compiled, **({STATE_URL: url} if url is not None and number < routers else {})},
                )
            )
            for number in range(routers + alone)
        ]


async def compare_cpu(url: str, options: argparse.Namespace) -> None:
    """CPU per request of routers that share, and of others that do not."""
    model = FastEngineConfig(2000, prefill_rate=400_000.0, step_s=0.004, decode_s=0.00005)
    options.requests = min(options.requests, 400)
    traffic = Traffic(seed=1)

    async def cpu_us(routers: Sequence[Proxy]) -> float:
        before = sum(map(cpu_ns, routers))
        await asyncio.gather(*[serve(it.port, traffic, Traffic.next_turn, options) for it in routers])
        return (sum(map(cpu_ns, routers)) - before) / 1e3 / options.requests / len(routers)

    ratios = []
    with _stand(url, 4, model, options, alone=4) as routers:
        for number in range(options.rounds + 1):
            shared_us, alone_us = await cpu_us(routers[:4]), await cpu_us(routers[4:])
            if number:  # the first round fills the caches
                ratios.append(shared_us / alone_us)
                print(
                    f"{shared_us:.0f} us a request, without sharing {alone_us:.0f}, ratio {ratios[-1]:.3f}", flush=True
                )
    print(f"median ratio {median(ratios):.3f}")
