"""Every strategy that prefers a replica: ``python -m tests.benchmarks strategies [--trace FILE]``.

Replays in virtual time of seeded workloads over 8 replicas with cold caches, at loads of 0.5 to 0.95 of what caches
leave: requests are sent at the pace at which the tokens that ``lowest_cost`` finds uncached, and the output, need that
share of all engines' time if every step is full. A token to compute needs ``1 / prefill_rate + step_s / chunk_tokens``,
an output token ``decode_s``. All strategies have their default settings. As traces have no sessions, a request that
begins with a whole earlier prompt continues its session.

``x`` columns are ratios to ``least_load``, of the hit rate to the best of the strategies. Limits: mean and p99 of TTFT
at most ``MEAN_LIMIT`` and ``P99_LIMIT`` times those of ``least_load``; no replica whose queue grows until the end if
``least_load`` has none; and under ``session_affinity`` the hits of an unbounded hash of the sessions, where that one
overloads no replica, neither until the end nor for a while: its p99 is at most ``P99_LIMIT`` times the bounded one's.
Exit status 1 if a limit is missed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from routing.balancing.strategies.registry import STRATEGIES
from routing.replay.fast_engine import FastEngineConfig
from routing.replay.replay import ReplayResult, replay, report
from routing.replay.routed import KeyIndex, StrategyPlacer
from routing.schema import LeastLoadSettings, LowestCostSettings, ResidencySettings, SessionAffinitySettings, Settings
from routing.types import PrefixHash
from tests.benchmarks.quality import DIFFICULT, FAST_REPLICA, forest_of
from tests.synthetic_traces import SMALL_BLOCK_TOKENS, sessions_of

REPLICAS = 8
PACES = 4  # tried until hit rate and pace agree
LOADS = (0.5, 0.7, 0.9, 0.95)
MEAN_LIMIT, P99_LIMIT, SESSION_HITS = 1.2, 1.3, 0.98
CHAT_ENGINE = FastEngineConfig(4000)
ENGINES = {
    "chat": CHAT_ENGINE,
    "hot_prefix": FastEngineConfig(22_000, **FAST_REPLICA),
    "session_pool": FastEngineConfig(27_500, **FAST_REPLICA),
    **dict.fromkeys(DIFFICULT, FastEngineConfig(48_000, block_tokens=SMALL_BLOCK_TOKENS)),
}
AFFINE = tuple(kind() for kind in STRATEGIES if issubclass(kind, ResidencySettings))
UNBOUNDED = SessionAffinitySettings(slack_s=60.0)


class Cell(NamedTuple):
    workload: str  # of ``ENGINES``, or a trace's path
    load: float


@dataclass(frozen=True)
class Row:
    """One strategy's figures, and what they are compared with in the same cell."""

    strategy: str
    figures: dict[str, Any]
    base: dict[str, Any]  # of ``least_load``
    unbounded: dict[str, Any]  # of an unbounded hash of the sessions
    best_hits: float  # of all strategies

    @property
    def mean(self) -> float:
        return float(self.figures["ttft_s"]["mean"] / self.base["ttft_s"]["mean"])

    @property
    def p99(self) -> float:
        return float(self.figures["ttft_s"]["p99"] / self.base["ttft_s"]["p99"])

    def missed(self) -> list[str]:
        """The limits that are missed, in words."""
        missed = [
            f"{name} {ratio:.2f} x"
            for name, ratio, limit in (("mean", self.mean, MEAN_LIMIT), ("p99", self.p99, P99_LIMIT))
            if ratio > limit
        ]
        if self.figures["overloaded_replicas"] and not self.base["overloaded_replicas"]:
            missed.append("overload")
        hits, unbounded_hits = self.figures["token_hit_rate"], self.unbounded["token_hit_rate"]
        is_small = self.unbounded["ttft_s"]["p99"] <= P99_LIMIT * self.figures["ttft_s"]["p99"]
        is_judged = self.strategy == SessionAffinitySettings.name and is_small
        if is_judged and not self.unbounded["overloaded_replicas"] and hits < SESSION_HITS * unbounded_hits:
            missed.append(f"hits {hits / unbounded_hits:.2f} x an unbounded hash")
        return missed

    def line(self) -> str:
        ttft, hits = self.figures["ttft_s"], self.figures["token_hit_rate"]
        relative = hits / self.best_hits if self.best_hits else 1.0
        return (
            f"  {self.strategy:<16} {100 * hits:6.1f} {relative:6.3f} {ttft['mean']:8.3f} {self.mean:6.2f}"
            f" {ttft['p99']:8.3f} {self.p99:6.2f}  {', '.join(self.missed())}"
        ).rstrip()


def main(argv: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks strategies")
    parser.add_argument("--trace", type=Path, action="append", default=[], help="also a trace in Mooncake's format")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these workloads; the name of a trace is its path")
    options = parser.parse_args(argv)
    cells = [Cell(name, load) for name in (*map(str, options.trace), *ENGINES) for load in LOADS]
    cells = [cell for cell in cells if not options.only or cell.workload in options.only]
    missed = []
    print(f"{'':<18} {'hit %':>6} {'x':>6} {'mean s':>8} {'x':>6} {'p99 s':>8} {'x':>6}")
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as workers:
        for cell, rows in zip(cells, workers.map(rows_of, cells), strict=True):
            title = f"{Path(cell.workload).name}, load {cell.load}"
            print("\n".join((title, *(row.line() for row in rows))), flush=True)
            missed += [f"{title}: {row.strategy}: {', '.join(row.missed())}" for row in rows if row.missed()]
    if missed:
        sys.exit("\n".join(("\nLimits missed:", *missed)))
    print(f"\nWithin the limits: mean {MEAN_LIMIT} x and p99 {P99_LIMIT} x least_load.")


def rows_of(cell: Cell) -> list[Row]:
    """``least_load`` and every affinity strategy."""
    pace, lowest = pace_of(cell)
    base, unbounded = _figures(cell, LeastLoadSettings(), pace), _figures(cell, UNBOUNDED, pace)
    found = {settings.name: _figures(cell, settings, pace) for settings in AFFINE if settings.name != "lowest_cost"}
    found = {LeastLoadSettings.name: base, LowestCostSettings.name: lowest, **found}
    best_hits = max(figures["token_hit_rate"] for figures in found.values())
    return [Row(name, figures, base, unbounded, best_hits) for name, figures in found.items()]


def pace_of(cell: Cell) -> tuple[float, dict[str, Any]]:
    """How many times faster than the trace requests are sent, and the figures of ``lowest_cost`` at that pace."""
    share, pace, lowest = 1.0, 0.0, {}
    for _ in range(PACES):
        pace = cell.load / (share * _full_load(cell.workload))
        result = _replay(cell, LowestCostSettings(), pace)
        lowest = report(result, forest_of(cell.workload).columns)
        before, share = share, _work_s(cell.workload, result.cached_tokens) / _work_s(cell.workload)
        if abs(share / before - 1) < 0.02:
            break
    return pace, lowest


def _full_load(workload: str) -> float:
    """Load at the trace's own pace without caches."""
    at_s = forest_of(workload).columns.at_s
    return _work_s(workload) / REPLICAS / (at_s[-1] - at_s[0])


def _work_s(workload: str, cached_tokens: Sequence[int] = ()) -> float:
    """Engine time of all requests in full steps."""
    columns, engine = forest_of(workload).columns, ENGINES.get(workload, CHAT_ENGINE)
    uncached = columns.all_prompt_tokens - sum(cached_tokens)
    per_token = 1 / engine.prefill_rate + engine.step_s / engine.chunk_tokens
    return uncached * per_token + sum(columns.output_tokens) * engine.decode_s


def _figures(cell: Cell, settings: Settings, pace: float) -> dict[str, Any]:
    return report(_replay(cell, settings, pace), forest_of(cell.workload).columns)


def _replay(cell: Cell, settings: Settings, pace: float) -> ReplayResult:
    forest, engine = forest_of(cell.workload), ENGINES.get(cell.workload, CHAT_ENGINE)
    keys = KeyIndex(settings, forest.columns, sessions_in(cell.workload))
    placer = StrategyPlacer(settings, forest.columns, engine, REPLICAS, keys=keys)
    return replay(forest, [engine] * REPLICAS, placer, pace)


@cache
def sessions_in(workload: str) -> list[PrefixHash]:
    return sessions_of(forest_of(workload).columns)
