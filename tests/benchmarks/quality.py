"""How good each strategy's choices are: ``python -m tests.benchmarks quality [--trace FILE]``.

Replays in virtual time (``routing/replay``) of the given trace, or a seeded one with its statistics, over 4, 8 and 16
replicas with caches of 600, 4,000 and 16,000 blocks, at 0.7 of the rate that the replicas could prefill without
caches; then the two workloads of the literature's figures for affinity on 8 replicas, and some that are difficult to
place on 4, 8 and 16. ``x`` columns are ratios to ``clairvoyant``, which knows every cache and all queues; ``max/mean``
is of requests. Strategies by prefix get two blocks in chat, where all prompts share the first. ``session_affinity`` is
missing because a trace has no sessions. ``shared`` is one unbounded cache, ``pooled`` one as large as all together.
The last table is the speed of replays; the compiled router prints only that one.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from routing.balancing.strategies.registry import STRATEGIES
from routing.replay.block_runs import Forest
from routing.replay.fast_engine import FastEngineConfig
from routing.replay.replay import Placer, replay, report
from routing.replay.routed import Clairvoyant, StrategyPlacer, pooled_hit_rate
from routing.schema import Boundary, SessionAffinitySettings, Settings, Tier1Settings
from routing.traffic.columns import Columns
from routing.traffic.trace import read_columns
from tests.synthetic_traces import (
    SMALL_BLOCK_TOKENS,
    agents,
    bursts,
    chat,
    coding,
    drifting,
    families,
    giant_group,
    heavy_tails,
    hot_prefix,
    jobs,
    mixed_lengths,
    nothing_shared,
    session_pool,
    small_groups,
    tides,
)

REPLICAS = (4, 8, 16)
BLOCKS = (600, 4000, 16_000)
LOAD = 0.7  # offered prompt tokens / what the replicas can prefill
CHAT_REQUESTS = 5719
CODING_REQUESTS = 2500
LITERATURE_REQUESTS = 60_000
WARM_UP = 0.2  # of the literature's requests, left out
LITERATURE = ("round_robin", "prefix_hash", "cache_aware", "affinity_groups", "lowest_cost")
FAST_REPLICA = {
    "block_tokens": 16,
    "prefill_rate": 47_600.0,
    "step_s": 0.005,
    "decode_s": 0.00002,
    "chunk_tokens": 8192,
}
DIFFICULT: dict[str, Callable[[int, int], Columns]] = {
    make.__name__: make
    for make in (
        nothing_shared,
        bursts,
        jobs,
        agents,
        mixed_lengths,
        heavy_tails,
        tides,
        drifting,
        small_groups,
        giant_group,
        families,
    )
}
DIFFICULT_REQUESTS = 12_000
SPEED_REQUESTS = 100_000


@dataclass(frozen=True)
class Cell:
    title: str
    workload: str  # "chat", "hot_prefix", "session_pool", or a trace's path
    replicas: int
    model: FastEngineConfig
    strategies: tuple[Settings, ...]
    load: float | None = None  # None: the workload's own pace
    first: int = 0  # requests before this index are left out


def main(argv: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks quality")
    parser.add_argument("--trace", type=Path, help="a trace in Mooncake's format (default: a seeded trace)")
    parser.add_argument("--speed", action="store_true", help="print only the last table")
    options = parser.parse_args(argv)
    if not options.speed:
        print_cells([*chat_cells(str(options.trace or "chat")), *literature_cells(), *difficult_cells()])
    print_speed()


def print_cells(cells: Sequence[Cell]) -> None:
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as workers:
        for lines in workers.map(lines_of, cells):
            print("\n".join(lines), end="\n\n", flush=True)


def all_settings(names: Sequence[str] = (), boundary_bytes: int | None = None) -> Iterator[Settings]:
    """Every strategy with its defaults, or the named ones, with a prefix length in bytes where given."""
    for kind in STRATEGIES:
        if kind is SessionAffinitySettings or (names and kind.name not in names):
            continue
        if issubclass(kind, Tier1Settings) and boundary_bytes is not None:
            yield kind(boundary=Boundary.BYTES, boundary_bytes=boundary_bytes)
        else:
            yield kind()


def chat_cells(workload: str) -> Iterator[Cell]:
    """Chat on three fleet sizes and three cache sizes."""
    strategies = tuple(all_settings(boundary_bytes=4096))
    name = "chat" if workload == "chat" else Path(workload).name
    for blocks in BLOCKS:
        for replicas in REPLICAS:
            title = f"{name}: {replicas} replicas of {blocks} blocks"
            yield Cell(title, workload, replicas, FastEngineConfig(blocks), strategies, LOAD)


def literature_cells() -> Iterator[Cell]:
    strategies = tuple(all_settings(LITERATURE, boundary_bytes=8000))  # the 2,000 tokens of a prefix
    first = int(WARM_UP * LITERATURE_REQUESTS)
    for title, workload, blocks in (
        ("S1, hot prefix: 80 % of the requests have one of 2,000 tokens; bursts of 40", "hot_prefix", 22_000),
        ("S2, session pool: 1,600 prefixes of 2,000 tokens, about what 8 caches hold", "session_pool", 27_500),
    ):
        yield Cell(title, workload, 8, FastEngineConfig(blocks, **FAST_REPLICA), strategies, first=first)


def difficult_cells() -> Iterator[Cell]:
    """Workloads that each have one property that misleads some strategy."""
    model = FastEngineConfig(48_000, block_tokens=SMALL_BLOCK_TOKENS)
    strategies = tuple(all_settings(("least_load", "lowest_cost")))
    for name, make in DIFFICULT.items():
        for replicas in REPLICAS:
            title = f"{name}: {replicas} replicas. {(make.__doc__ or '').splitlines()[0]}"
            yield Cell(title, name, replicas, model, strategies, LOAD)


@cache
def forest_of(workload: str) -> Forest:
    """A workload, generated or read once per process."""
    makers: dict[str, Callable[[], Columns]] = {
        "chat": lambda: chat(CHAT_REQUESTS, seed=1),
        "coding": lambda: coding(CODING_REQUESTS, seed=1),
        "hot_prefix": lambda: hot_prefix(LITERATURE_REQUESTS, seed=1),
        "session_pool": lambda: session_pool(LITERATURE_REQUESTS, seed=1),
    }
    makers |= {name: partial(make, DIFFICULT_REQUESTS, 1) for name, make in DIFFICULT.items()}
    return Forest(makers[workload]() if workload in makers else read_columns(Path(workload)))


def lines_of(cell: Cell) -> list[str]:
    forest = forest_of(cell.workload)
    best = figures(cell, forest, Clairvoyant())
    rows = {"clairvoyant": best}
    for settings in cell.strategies:
        rows[settings.name] = figures(cell, forest, StrategyPlacer(settings, forest.columns, cell.model, cell.replicas))
    lines = [cell.title, HEADER, *(line_of(name, row, best) for name, row in rows.items())]
    for name, capacity in (("pooled", cell.replicas * cell.model.blocks), ("shared", None)):
        lines.append(f"{name:<16} {100 * (pooled_hit_rate(forest, capacity) or 0):6.1f}")
    return lines


def figures(cell: Cell, forest: Forest, placer: Placer) -> dict[str, Any]:
    scale = 1.0
    if cell.load is not None:
        scale = cell.load * cell.replicas * cell.model.prefill_rate / forest.columns.offered_tokens_per_s()
    return report(replay(forest, [cell.model] * cell.replicas, placer, scale), forest.columns, cell.first)


HEADER = (
    f"{'':<16} {'hit %':>6} {'requests':>8} {'mean s':>8} {'p50':>8} {'p95':>8} {'p99':>8} {'max/mean':>8}"
    f"   {'x hit':>6} {'x mean':>6} {'x p99':>6}"
)


def line_of(name: str, row: dict[str, Any], best: dict[str, Any]) -> str:
    """One strategy's figures and their ratios to the best possible."""
    ttft, best_ttft = row["ttft_s"], best["ttft_s"]
    times = " ".join(f"{ttft[key]:8.4f}" for key in ("mean", "p50", "p95", "p99"))
    hit_ratio = row["token_hit_rate"] / best["token_hit_rate"] if best["token_hit_rate"] else 1.0
    return (
        f"{name:<16} {100 * row['token_hit_rate']:6.1f} {100 * row['request_hit_rate']:8.1f} {times}"
        f" {row['load_max_over_mean']:8.2f}"
        f"   {hit_ratio:6.3f} {ttft['mean'] / best_ttft['mean']:6.3f} {ttft['p99'] / best_ttft['p99']:6.3f}"
    )


def print_speed() -> None:
    """Seconds to replay chat on one core, without reading the trace."""
    started = time.process_time()
    columns = chat(SPEED_REQUESTS, seed=1)
    generated = time.process_time()
    forest = Forest(columns)
    built = time.process_time()
    print(f"us of CPU per request of {len(columns.ids) / len(columns):.0f} blocks, 8 replicas of 4000 blocks")
    print(f"{'generate':<16} {1e6 * (generated - started) / len(columns):6.1f}")
    print(f"{'block runs':<16} {1e6 * (built - generated) / len(columns):6.1f}")
    for settings in all_settings(boundary_bytes=4096):
        started = time.process_time()
        cell = Cell("", "chat", 8, FastEngineConfig(4000), (), LOAD)
        figures(cell, forest, StrategyPlacer(settings, columns, cell.model, cell.replicas))
        print(f"{settings.name:<16} {1e6 * (time.process_time() - started) / len(columns):6.1f}", flush=True)
