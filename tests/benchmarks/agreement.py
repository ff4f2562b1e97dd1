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


class RouterPair:
    """Two routers of one fleet, or two workers of one router."""

    def __init__(self, make: Callable[[], StrategyPlacer], new_prompts: set[int], *, are_workers: bool) -> None:
        self._routers = make(), make()
        self._new_prompts = new_prompts
        self._are_workers = are_workers
        self._router_of: dict[int, StrategyPlacer] = {}  # the router of each running request, by index
        self._chance = random.Random("who gets a request")
        self.disagreements = 0  # new prompts that the two routers would send to different replicas

    def place(self, job: ModelledRequest, engines: Sequence[FastEngine], now_s: float) -> int:
        """Place a request with one router at random; for a new prompt, compare the choices of both."""
        if job.index in self._new_prompts:
            first, second = (router.choose(router.keys.keys_of(job.index), now_s).target for router in self._routers)
            self.disagreements += first != second
        router = self._router_of[job.index] = self._chance.choice(self._routers)
        placed = router.place(job, engines, now_s)
        self._share_load(router, job)
        return placed

    def on_first_token(self, job: ModelledRequest, now_s: float) -> None:
        self._router_of[job.index].on_first_token(job, now_s)
        self._share_load(self._router_of[job.index], job)

    def on_ended(self, job: ModelledRequest, now_s: float) -> None:
        router = self._router_of.pop(job.index)
        router.on_ended(job, now_s)
        self._share_load(router, job)

    def _share_load(self, router: StrategyPlacer, job: ModelledRequest) -> None:
        """Share this worker's load at the job's replica with the other."""
        if self._are_workers:
            load = job.placer_data.load
            (other,) = (candidate for candidate in self._routers if candidate is not router)
            own = load.running - load.remote_running, load.waiting_tokens - load.remote_tokens
            other.loads.set_remote_load(load.target, *own)


def main() -> None:
    columns = chat(REQUESTS, seed=1)
    forest, new_prompts = Forest(columns), new_prompts_of(columns)
    print(
        f"new prompts that two routers or workers would send to different replicas, %; "
        f"mean TTFT, s, in brackets; {len(new_prompts)} prompts"
    )
    print(f"{'':<14} {'':<8} " + " ".join(f"{f'load {load:g}':>14}" for load in LOADS))
    for settings in STRATEGIES:
        for are_workers in (False, True):
            cells = [figures(settings, forest, new_prompts, load, are_workers=are_workers) for load in LOADS]
            shown = " ".join(f"{100 * disagreement:6.1f} ({ttft_s:.2f})".rjust(14) for disagreement, ttft_s in cells)
            print(f"{settings.name:<14} {'workers' if are_workers else 'routers':<8} {shown}", flush=True)


def figures(
    settings: Settings, forest: Forest, new_prompts: set[int], load: float, *, are_workers: bool
) -> tuple[float, float]:
    """(share of new prompts on which the choices differ, mean TTFT of all requests in seconds)."""
    columns = forest.columns
    pair = RouterPair(lambda: StrategyPlacer(settings, columns, MODEL, REPLICAS), new_prompts, are_workers=are_workers)
    scale = load * REPLICAS * MODEL.prefill_rate / columns.offered_tokens_per_s()
    outcome = replay(forest, [MODEL] * REPLICAS, pair, scale)
    return pair.disagreements / len(new_prompts), sum(outcome.ttft_s) / len(outcome.ttft_s)


def new_prompts_of(columns: Columns) -> set[int]:
    """Requests with a new second block; the first block is the system prompt that all share."""
    seen_blocks: set[int] = set()
    new_prompts = set()
    for index in range(len(columns)):
        second = columns.ids[columns.starts[index] : columns.starts[index + 1]][1:2]
        if second and second[0] not in seen_blocks:
            new_prompts.add(index)
            seen_blocks.add(second[0])
    return new_prompts
