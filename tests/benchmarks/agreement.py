"""Whether independent routers choose the same replica for a new prompt: ``python -m tests.benchmarks agreement``.

Two routers each get a random half of a chat's requests, in front of 8 replicas of 4,000 blocks, at several loads.
Each first request of a conversation is placed by both, each with the loads it knows; the table shows the share of
prompts on which they differ and the mean TTFT. A second part does the same for two workers of one router, which share
their loads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from routing.replay.block_runs import Forest
from routing.replay.fast_engine import FastEngine, FastEngineConfig, ModelledRequest
from routing.replay.replay import replay
from routing.replay.routed import StrategyPlacer
from routing.schema import Boundary, LowestCostSettings, PrefixHashSettings, Settings, TieredSettings
from routing.traffic.columns import Columns
from tests.synthetic_traces import chat

REQUESTS = 4000
REPLICAS = 8
MODEL = FastEngineConfig(4000)
LOADS = (0.1, 0.4, 0.7, 0.9)  # offered prompt tokens / what the replicas can prefill
STRATEGIES: tuple[Settings, ...] = (
    PrefixHashSettings(boundary=Boundary.BYTES, boundary_bytes=4096),  # a chat's first two blocks
    TieredSettings(boundary=Boundary.BYTES, boundary_bytes=4096),
    LowestCostSettings(),
)


class Two:
    """Two routers of one fleet, or two workers of one router."""

    def __init__(self, make: Callable[[], StrategyPlacer], news: set[int], *, are_workers: bool) -> None:
        self._routers = make(), make()
        self._news = news
        self._are_workers = are_workers
        self._by: dict[int, StrategyPlacer] = {}  # who sent a request that runs
        self._chance = random.Random("who gets a request")
        self.apart = 0  # new prompts that the two would send to different replicas

    def place(self, job: ModelledRequest, engines: Sequence[FastEngine], now_s: float) -> int:
        """Ask both for a new prompt; one of them dispatches it."""
        if job.index in self._news:
            first, second = (router.choose(job, now_s).target for router in self._routers)
            self.apart += first != second
        router = self._by[job.index] = self._chance.choice(self._routers)
        placed = router.place(job, engines, now_s)
        self._tell(router, job)
        return placed

    def on_first_token(self, job: ModelledRequest, now_s: float) -> None:
        self._by[job.index].on_first_token(job, now_s)
        self._tell(self._by[job.index], job)

    def on_ended(self, job: ModelledRequest, now_s: float) -> None:
        router = self._by.pop(job.index)
        router.on_ended(job, now_s)
        self._tell(router, job)

    def _tell(self, router: StrategyPlacer, job: ModelledRequest) -> None:
        """Share this worker's load at the job's replica with the other."""
        if self._are_workers:
            load = job.placer_data.load
            (other,) = (one for one in self._routers if one is not router)
            own = load.running - load.remote_running, load.waiting_tokens - load.remote_tokens
            other.loads.set_remote_load(load.target, *own)


def main() -> None:
    columns = chat(REQUESTS, seed=1)
    forest, news = Forest(columns), beginnings(columns)
    print(
        f"new prompts that two would send to different replicas, %; in brackets the mean TTFT, s; {len(news)} prompts"
    )
    print(f"{'':<14} {'':<8} " + " ".join(f"{f'load {load:g}':>14}" for load in LOADS))
    for settings in STRATEGIES:
        for are_workers in (False, True):
            cells = [figures(settings, forest, news, load, are_workers=are_workers) for load in LOADS]
            shown = " ".join(f"{100 * apart:6.1f} ({ttft_s:.2f})".rjust(14) for apart, ttft_s in cells)
            print(f"{settings.name:<14} {'workers' if are_workers else 'routers':<8} {shown}", flush=True)


def figures(
    settings: Settings, forest: Forest, news: set[int], load: float, *, are_workers: bool
) -> tuple[float, float]:
    """(share of new prompts on which both differ, mean TTFT of all requests in seconds)."""
    columns = forest.columns
    two = Two(lambda: StrategyPlacer(settings, columns, MODEL, REPLICAS), news, are_workers=are_workers)
    scale = load * REPLICAS * MODEL.prefill_rate / columns.offered_tokens_per_s()
    outcome = replay(forest, MODEL, REPLICAS, two, scale)
    return two.apart / len(news), sum(outcome.ttft_s) / len(outcome.ttft_s)


def beginnings(columns: Columns) -> set[int]:
    """Requests with a new second block; the first block is the system prompt that all share."""
    met: set[int] = set()
    news = set()
    for index in range(len(columns)):
        second = columns.ids[columns.starts[index] : columns.starts[index + 1]][1:2]
        if second and second[0] not in met:
            news.add(index)
            met.add(second[0])
    return news
