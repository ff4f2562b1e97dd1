"""What each part of ``lowest_cost`` saves: ``python -m tests.benchmarks ablate [--quick] [--seeds N] [--trace FILE]``.

Replays in virtual time of seeded workloads, and of given traces, over 8 replicas: by the rule as it is, and with each
learnt or tuned part switched off, one at a time and all. Behind 1 router, and behind 4 that share nothing. Figures are
ratios to the rule as it is with the same seed, the mean over the seeds and, of mean TTFT, its standard error. ``load``
is max/mean of requests, not a ratio. The first tenth of the requests is left out. The last table has how much longer
TTFT is without each part, where that is most, and in the geometric mean of all; it stands in
``routing/balancing/strategies/README.md``.

A part without which neither mean nor p99 is 2 % longer anywhere is not worth its code. The interpreted router only:
parts are switched off by replacing constants and methods. One process; 200 s of CPU time for each seed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from statistics import fmean, geometric_mean, stdev
from typing import Any, NamedTuple
from unittest import mock

from routing.admin.api import is_compiled
from routing.balancing import block_index, candidates, load_tracker, residency
from routing.balancing.strategies import cached_prefix
from routing.replay.block_runs import Forest
from routing.replay.fast_engine import FastEngineConfig
from routing.replay.replay import replay, report
from routing.replay.routers import SeveralRouters, router_placers
from routing.schema import LowestCostSettings
from routing.traffic.columns import Columns
from routing.traffic.trace import read_columns
from tests.benchmarks.literature import workloads
from tests.benchmarks.quality import DIFFICULT, FAST_REPLICA, LOAD
from tests.synthetic_traces import SMALL_BLOCK_TOKENS, chat, hot_prefix, session_pool

REPLICAS = 8
ROUTERS = (1, 4)
SEEDS = (1, 2, 3, 4, 5)
REQUESTS = 4000
QUICK_SEEDS, QUICK_REQUESTS = (1,), 3000
WARM_UP = 0.1
HEADER = ("without", "mean TTFT longer by, %", "p99 longer by, %", "mean TTFT overall, %")
CHAT_ENGINE = FastEngineConfig(4000)
FAST_ENGINE = FastEngineConfig(12_000, **FAST_REPLICA)

Patch = tuple[Any, str, Any]  # object, attribute, value without the part


def _off(value: object) -> Callable[..., object]:
    return lambda *_args: value


class _AloneHits(residency.UnrecordedHits):
    """Other routers are never noticed."""

    def learn(self, *_args: object) -> None:
        """Do nothing."""


PARTS: dict[str, Sequence[Patch]] = {
    "price by busy replicas": [(cached_prefix, "CHOICES", math.inf)],
    "price by crowded caches": [(residency.Reuse, "count_reused", _off(None))],
    "time of a running request": [(cached_prefix, "STEP_S", 0.0)],
    "progress of prefill": [(load_tracker, "MAX_PROGRESS", 0.0)],
    "measured rate": [(load_tracker.PrefillRate, "learn", _off(None))],
    "narrow ties": [(cached_prefix, "TIE_S", 0.0)],
    "wide ties": [(cached_prefix, "TIE_RATIO", 0.0)],
    "rebalancing": [(candidates, "MIN_EXCESS", math.inf)],
    "common replica": [(residency, "UnrecordedHits", _AloneHits)],
    "common key after popular blocks": [(block_index, "MIN_POPULAR", math.inf)],
    "popular by share of prompts": [(residency, "MAX_PREFIX_SHARE", 0.0)],
    "expected hits by length": [(residency.ShareByTokens, "ratio", lambda share, _tokens: share.mean)],
}
EVERYTHING = "all of them"
VARIANTS = {**PARTS, EVERYTHING: [patch for patches in PARTS.values() for patch in patches]}


class Workload(NamedTuple):
    """A seeded workload, or a trace, at a load without caches; ``load`` None: at its own pace."""

    make: Callable[[int, int], Columns]  # of the number of requests and a seed
    engine: FastEngineConfig
    load: float | None = LOAD
    scale: int = 1  # times as many requests as the other workloads, until caches are full


def _conversations(turns: int) -> Callable[[int, int], Columns]:
    return lambda requests, seed: workloads.conversations(requests, turns, rate=10.0, seed=seed)[0]


WORKLOADS = {
    "chat": Workload(chat, CHAT_ENGINE),
    "short_chat": Workload(_conversations(8), FAST_ENGINE),
    "long_chat": Workload(_conversations(20), FAST_ENGINE),
    "hot_prefix": Workload(hot_prefix, FastEngineConfig(22_000, **FAST_REPLICA), None),
    "session_pool": Workload(session_pool, FastEngineConfig(27_500, **FAST_REPLICA), None, 5),
    **{
        name: Workload(make, FastEngineConfig(48_000, block_tokens=SMALL_BLOCK_TOKENS))
        for name, make in DIFFICULT.items()
    },
}


@dataclass(frozen=True)
class Ratios:
    """Figures of one variant by seed, relative to the rule as it is."""

    mean: list[float]
    p99: list[float]
    hits: list[float]
    load: list[float]  # max/mean of requests, no ratio

    def line(self, name: str) -> str:
        return (
            f"  {name:<31} {fmean(self.mean):7.3f} +-{_error(self.mean):5.3f} {fmean(self.p99):8.3f}"
            f" {fmean(self.hits):8.3f} {fmean(self.load):8.2f}"
        )


def main(argv: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks ablate")
    parser.add_argument("--quick", action="store_true", help="one seed and fewer requests")
    parser.add_argument(
        "--seeds",
        type=int,
        default=len(SEEDS),
        help="seeds of each workload, 200 s of CPU each (default %(default)s)",
    )
    parser.add_argument("--trace", type=Path, action="append", default=[], help="also a trace in Mooncake's format")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these workloads; the name of a trace is its path")
    options = parser.parse_args(argv)
    if is_compiled():
        raise SystemExit("parts can only be switched off in the interpreted router")
    seeds, requests = (QUICK_SEEDS, QUICK_REQUESTS) if options.quick else (range(1, options.seeds + 1), REQUESTS)
    found: dict[tuple[str, int], dict[str, Ratios]] = {}
    print(f"{'without':<33} {'mean TTFT':>15} {'p99':>8} {'hits':>8} {'load':>8}")
    for name in options.only or [*map(str, options.trace), *WORKLOADS]:
        for routers in ROUTERS:
            figures = found[name, routers] = ratios(name, routers, seeds, requests)
            print(title(name, routers))
            print("\n".join(one.line(part or "nothing") for part, one in figures.items()), flush=True)
    print("", f"| {' | '.join(HEADER)} |", f"|{' --- |' * len(HEADER)}", sep="\n")
    for part in VARIANTS:
        print(row(part, {title(*cell): figures[part] for cell, figures in found.items()}))


def title(name: str, routers: int) -> str:
    return f"{Path(name).name}, {routers} router{'s' * (routers > 1)}"


def row(part: str, found: Mapping[str, Ratios]) -> str:
    """How much longer TTFT is without a part, where that is most and in the geometric mean of all, in Markdown."""
    means, p99s = (
        {cell: fmean(of(one)) for cell, one in found.items()} for of in (attrgetter("mean"), attrgetter("p99"))
    )
    most = [f"{percent(cells[at])} in {at}" for cells in (means, p99s) for at in [max(cells, key=cells.__getitem__)]]
    return f"| {part} | {' | '.join(most)} | {percent(geometric_mean(means.values()))} |"


def percent(ratio: float) -> str:
    """By how much a ratio is above 1."""
    return f"{100 * (ratio - 1):.1f}"


def ratios(
    name: str, routers: int, seeds: Sequence[int] = SEEDS, requests: int = REQUESTS, parts: Collection[str] = VARIANTS
) -> dict[str, Ratios]:
    """The rule without each of these parts in one workload; "" is the rule as it is."""
    seeds = seeds if name in WORKLOADS else seeds[:1]
    full = [_figures(name, routers, seed, requests, ()) for seed in seeds]
    found = {"": full}
    for part in parts:
        found[part] = [_figures(name, routers, seed, requests, VARIANTS[part]) for seed in seeds]
    return {
        part: Ratios(
            [one["ttft_s"]["mean"] / base["ttft_s"]["mean"] for one, base in zip(rows, full, strict=True)],
            [one["ttft_s"]["p99"] / base["ttft_s"]["p99"] for one, base in zip(rows, full, strict=True)],
            [
                one["token_hit_rate"] / base["token_hit_rate"] if base["token_hit_rate"] else 1.0
                for one, base in zip(rows, full, strict=True)
            ],
            [one["load_max_over_mean"] for one in rows],
        )
        for part, rows in found.items()
    }


def _figures(name: str, routers: int, seed: int, requests: int, patches: Sequence[Patch]) -> dict[str, Any]:
    forest, workload = _forest(name, seed, requests), _workload(name)
    columns, engine, pace = forest.columns, workload.engine, 1.0
    if workload.load is not None:
        pace = workload.load * REPLICAS * engine.prefill_rate / columns.offered_tokens_per_s()
    with _without(patches):
        placers = router_placers(LowestCostSettings(), columns, engine, REPLICAS, routers)
        placer = SeveralRouters(placers) if routers > 1 else placers[0]
        result = replay(forest, [engine] * REPLICAS, placer, pace)
    return report(result, columns, int(WARM_UP * len(columns)))


@contextmanager
def _without(patches: Sequence[Patch]) -> Iterator[None]:
    with ExitStack() as stack:
        for target, attribute, value in patches:
            stack.enter_context(mock.patch.object(target, attribute, value))
        yield


def _workload(name: str) -> Workload:
    return WORKLOADS.get(name) or Workload(lambda _requests, _seed: read_columns(Path(name)), CHAT_ENGINE)


@cache
def _forest(name: str, seed: int, requests: int) -> Forest:
    workload = _workload(name)
    return Forest(workload.make(workload.scale * requests, seed))


def _error(values: Sequence[float]) -> float:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
