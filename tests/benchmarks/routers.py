"""What several routers without common state lose: ``python -m tests.benchmarks routers [--trace FILE]``.

Replays in virtual time of a chat, coding agents, the workloads of the literature and seeded ones that are difficult to
place, over 8 replicas at 0.7 of their prefill capacity (coding agents: 1.5), by ``lowest_cost`` on 1, 2, 4 and 8
routers. ``none``: each router knows only its own requests. ``events``: each learns what every engine stores. ``state``:
routers tell each other what they send, and know it 50 ms later. Hit rates and mean TTFT also as ratios to those of a
single router; ``cv`` is the standard deviation of the requests of a replica divided by their mean. The last table has
agents' sessions on 240 replicas; ``next turns`` are the hits of all requests but the first of each session.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from routing.replay.block_runs import Forest
from routing.replay.fast_engine import FastEngineConfig
from routing.replay.replay import ReplayResult, replay, report
from routing.replay.routers import Arrivals, SeveralRouters, Sharing, router_placers
from routing.schema import LowestCostSettings
from routing.traffic.columns import Columns
from tests.benchmarks.quality import DIFFICULT, FAST_REPLICA, LOAD, forest_of
from tests.synthetic_traces import SMALL_BLOCK_TOKENS, agents, sessions_of

ROUTERS = (1, 2, 4, 8)
REPLICAS = 8
FLEET_REQUESTS = 24_000
FLEET_LOAD = 0.35  # so that the turns of a session remain seconds apart
AGENT_TOOL_TOKENS = 6000  # of the tool lists of ``agents``
SMALL_BLOCKS = FastEngineConfig(48_000, block_tokens=SMALL_BLOCK_TOKENS)


@dataclass(frozen=True)
class Workload:
    name: str  # as in ``quality``, or a trace's path
    model: FastEngineConfig
    load: float | None = LOAD  # None: the workload's own pace
    replicas: int = REPLICAS
    has_session_keys: bool = False

    @property
    def title(self) -> str:
        return f"{Path(self.name).name}{', session keys' if self.has_session_keys else ''}"


WORKLOADS = (
    Workload("chat", FastEngineConfig(4000)),
    Workload("coding", FastEngineConfig(1500), 1.5),
    Workload("coding", FastEngineConfig(1500), 1.5, has_session_keys=True),
    Workload("hot_prefix", FastEngineConfig(22_000, **FAST_REPLICA), None),
    Workload("session_pool", FastEngineConfig(27_500, **FAST_REPLICA), None),
    *(Workload(name, SMALL_BLOCKS) for name in DIFFICULT),
)


def main(argv: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks routers")
    parser.add_argument("--trace", type=Path, help="also a trace in Mooncake's format")
    parser.add_argument("--worst", action="store_true", help="each request arrives at a router that knows it least")
    parser.add_argument("--only", nargs="*", help="these workloads")
    options = parser.parse_args(argv)
    workloads = [workload for workload in WORKLOADS if not options.only or workload.name in options.only]
    if options.trace:
        workloads.insert(0, Workload(str(options.trace), FastEngineConfig(4000)))
    arrivals = Arrivals.WORST if options.worst else Arrivals.RANDOM
    print(HEADER)
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1), get_context("spawn")) as workers:
        for lines in workers.map(lines_of, workloads, [arrivals] * len(workloads)):
            print("\n".join(lines), flush=True)
    if not options.only:
        print_fleet(arrivals)


def lines_of(workload: Workload, arrivals: Arrivals) -> list[str]:
    forest = forest_of(workload.name)
    single: dict[str, Any] = {}
    lines = []
    for routers, sharing in cases():
        row = report(run(workload, forest, routers, sharing, arrivals), forest.columns)
        single = single or row
        lines.append(line_of(f"{workload.title:<16.16} {routers} {sharing:<6}", row, single))
    return lines


def cases() -> Iterator[tuple[int, Sharing]]:
    yield 1, Sharing.NONE
    for sharing in Sharing:
        for routers in ROUTERS[1:]:
            yield routers, sharing


def run(
    workload: Workload, forest: Forest, routers: int, sharing: Sharing, arrivals: Arrivals = Arrivals.RANDOM
) -> ReplayResult:
    """Replay a workload with this number of routers."""
    columns, scale = forest.columns, 1.0
    if workload.load is not None:
        scale = workload.load * workload.replicas * workload.model.prefill_rate / columns.offered_tokens_per_s()
    sessions = sessions_of(columns) if workload.has_session_keys else None
    placers = router_placers(LowestCostSettings(), columns, workload.model, workload.replicas, routers, sessions)
    placer = SeveralRouters(placers, sharing, arrivals) if routers > 1 else placers[0]
    return replay(forest, [workload.model] * workload.replicas, placer, scale)


def print_fleet(arrivals: Arrivals) -> None:
    """Sessions of agents on 240 replicas, behind one router and behind eight."""
    columns = agents(FLEET_REQUESTS, seed=1)
    forest, workload, turns = Forest(columns), Workload("agents", SMALL_BLOCKS, FLEET_LOAD, 240), next_turns(columns)
    print(f"\n{HEADER} {'next turns %':>12}")
    single: dict[str, Any] = {}
    for routers, sharing in ((1, Sharing.NONE), (8, Sharing.NONE), (8, Sharing.EVENTS)):
        result = run(workload, forest, routers, sharing, arrivals)
        row = report(result, columns)
        single = single or row
        prompt, cached = (
            sum(map(tokens.__getitem__, turns)) for tokens in (columns.prompt_tokens, result.cached_tokens)
        )
        name = f"{'240 replicas':<16} {routers} {sharing:<6}"
        print(f"{line_of(name, row, single)} {100 * cached / prompt:12.1f}", flush=True)


def next_turns(columns: Columns) -> list[int]:
    """Requests of agents that are not the first of their session, which the first block after the tools identifies."""
    seen: set[int] = set()
    turns = []
    for index, start in enumerate(columns.starts[:-1]):
        session = columns.ids[start + AGENT_TOOL_TOKENS // SMALL_BLOCK_TOKENS]
        if session in seen:
            turns.append(index)
        seen.add(session)
    return turns


HEADER = f"{'':<25} {'hit %':>6} {'x hit':>6} {'mean s':>8} {'x mean':>6} {'p99 s':>8} {'cv':>6}"


def line_of(name: str, row: dict[str, Any], single: dict[str, Any]) -> str:
    ttft, hit = row["ttft_s"], row["token_hit_rate"]
    hit_ratio = hit / single["token_hit_rate"] if single["token_hit_rate"] else 1.0
    mean_ratio = ttft["mean"] / single["ttft_s"]["mean"]
    return (
        f"{name:<25} {100 * hit:6.1f} {hit_ratio:6.3f} {ttft['mean']:8.4f} {mean_ratio:6.2f} {ttft['p99']:8.3f}"
        f" {row['load_cv']:6.3f}"
    )
