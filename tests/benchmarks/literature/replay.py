"""Tables of strategies, and of what several routers lose, on seeded workloads.

Workloads, fleets and caches of the strategies are those of ``tests/benchmarks/quality.py``, which prints more columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from routing.replay.fast_engine import FastEngineConfig
from routing.replay.replay import ReplayResult, replay, report
from routing.replay.routed import Clairvoyant, StrategyPlacer, pooled_hit_rate
from routing.replay.routers import SeveralRouters, Sharing, router_placers
from routing.schema import LowestCostSettings, Settings
from tests.benchmarks import quality
from tests.benchmarks.literature.tables import Table, percent
from tests.benchmarks.quality import DIFFICULT, FAST_REPLICA, LOAD, Cell, forest_of
from tests.synthetic_traces import SMALL_BLOCK_TOKENS, sessions_of

ROUTERS = (2, 4, 8)
REPLICAS = 8
CHAT = next(cell for cell in quality.chat_cells("chat") if cell.replicas == REPLICAS and cell.model.blocks == 4000)


def figures(cell: Cell, settings: Settings | None) -> dict[str, Any]:
    """Report of one strategy in a cell; None: the clairvoyant choice."""
    forest = forest_of(cell.workload)
    placer = Clairvoyant() if settings is None else StrategyPlacer(settings, forest.columns, cell.model, cell.replicas)
    return quality.figures(cell, forest, placer)


def seconds(value: float) -> str:
    """Three significant digits."""
    return f"{value:.3g}"


# --- strategies --------------------------------------------------------------------------------------


def _chat_row(settings: Settings | None) -> list[str]:
    found = figures(CHAT, settings)
    times = " / ".join(seconds(found["ttft_s"][key]) for key in ("mean", "p50", "p99"))
    return [percent(found["token_hit_rate"]), times, f"{found['load_max_over_mean']:.2f}"]


def _chat_bound(capacity: int | None) -> list[str]:
    return [percent(pooled_hit_rate(forest_of(CHAT.workload), capacity) or 0), "", ""]


CHAT_TABLE = Table(
    "replay-chat",
    ("8 replicas of 4,000 blocks", "hit %", "TTFT mean / p50 / p99, s", "max/mean requests"),
    {
        "clairvoyant": partial(_chat_row, None),
        **{f"`{settings.name}`": partial(_chat_row, settings) for settings in CHAT.strategies},
        "one cache of the same total size": partial(_chat_bound, CHAT.replicas * CHAT.model.blocks),
        "one cache without limit": partial(_chat_bound, None),
    },
)


# --- workloads that are difficult to place ---------------------------------------------------------------


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def _difficult_row(name: str) -> list[str]:
    """Ratios of ``lowest_cost`` and ``least_load`` to the clairvoyant choice, over the fleets."""
    means, p99s, hits, least_load, skew = [], [], [], [], []
    for cell in quality.difficult_cells():
        if cell.workload != name:
            continue
        best = figures(cell, None)
        by_name = {settings.name: figures(cell, settings) for settings in cell.strategies}
        ours, plain = by_name["lowest_cost"], by_name["least_load"]
        means.append(ours["ttft_s"]["mean"] / best["ttft_s"]["mean"])
        p99s.append(ours["ttft_s"]["p99"] / best["ttft_s"]["p99"])
        if best["token_hit_rate"]:
            hits.append(ours["token_hit_rate"] / best["token_hit_rate"])
        least_load.append(plain["ttft_s"]["mean"] / best["ttft_s"]["mean"])
        skew.append(ours["load_max_over_mean"])
    return [_span(means), _span(p99s), _span(hits) if hits else "", _span(least_load), _span(skew)]


DIFFICULT_TABLE = Table(
    "replay-difficult",
    ("", "mean TTFT", "p99", "hits", "`least_load`, mean TTFT", "max/mean requests"),
    {f"`{name}`": partial(_difficult_row, name) for name in DIFFICULT},
)


# --- several routers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    name: str  # as in ``quality``
    model: FastEngineConfig
    load: float | None = LOAD  # None: the workload's own pace
    has_session_keys: bool = False

    @property
    def title(self) -> str:
        return f"{self.name}{', session keys' if self.has_session_keys else ''}"


WORKLOADS = (
    Workload("chat", FastEngineConfig(4000)),
    Workload("coding", FastEngineConfig(1500), 1.5),
    Workload("coding", FastEngineConfig(1500), 1.5, has_session_keys=True),
    Workload("hot_prefix", FastEngineConfig(22_000, **FAST_REPLICA), None),
    Workload("session_pool", FastEngineConfig(27_500, **FAST_REPLICA), None),
    *(Workload(name, FastEngineConfig(48_000, block_tokens=SMALL_BLOCK_TOKENS)) for name in DIFFICULT),
)


def _run(workload: Workload, routers: int, sharing: Sharing) -> ReplayResult:
    """Replay a workload with this number of routers."""
    forest, scale = forest_of(workload.name), 1.0
    columns = forest.columns
    if workload.load is not None:
        scale = workload.load * REPLICAS * workload.model.prefill_rate / columns.offered_tokens_per_s()
    sessions = sessions_of(columns) if workload.has_session_keys else None
    placers = router_placers(LowestCostSettings(), columns, workload.model, REPLICAS, routers, sessions)
    placer = SeveralRouters(placers, sharing) if routers > 1 else placers[0]
    return replay(forest, [workload.model] * REPLICAS, placer, scale)


def _routers_row(workload: Workload, ways: Sequence[Sharing]) -> list[str]:
    single: dict[str, Any] = {}
    cells = []
    for count, sharing in ((1, Sharing.NONE), *((count, way) for way in ways for count in ROUTERS)):
        found = report(_run(workload, count, sharing), forest_of(workload.name).columns)
        ttft_s, hit_rate = found["ttft_s"]["mean"], found["token_hit_rate"]
        if not single:
            single = found
            cells.append(f"{percent(hit_rate)}, {seconds(ttft_s)} s, {found['load_cv']:.2f}")
            continue
        hits = hit_rate / single["token_hit_rate"] if single["token_hit_rate"] else 1.0
        cells.append(f"{hits:.2f}, {ttft_s / single['ttft_s']['mean']:.2f}, {found['load_cv']:.2f}")
    return cells


def _routers_table(name: str, ways: Sequence[Sharing], workloads: Iterable[Workload]) -> Table:
    columns = (f"`{way}`: {count}" for way in ways for count in ROUTERS)
    rows = {f"`{workload.title}`": partial(_routers_row, workload, ways) for workload in workloads}
    return Table(name, ("", "1 router: hit %, mean TTFT, CoV", *columns), rows)


ROUTERS_TABLE = _routers_table(
    "replay-routers", (Sharing.NONE, Sharing.EVENTS), (it for it in WORKLOADS if it.name != "coding")
)
SHARING_TABLE = _routers_table(
    "replay-sharing",
    (Sharing.NONE, Sharing.STATE),
    (it for it in WORKLOADS if it.name in {"chat", "coding", "tides", "nothing_shared"}),
)

REPLAY_TABLES = (CHAT_TABLE, DIFFICULT_TABLE, ROUTERS_TABLE, SHARING_TABLE)
