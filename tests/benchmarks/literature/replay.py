"""The tables of ``routing/replay/README.md``: what ``quality`` and ``routers`` measure on seeded workloads.

Workloads, fleets and caches are those of ``tests/benchmarks/quality.py`` and ``routers.py``, which print more columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from routing.replay.replay import report
from routing.replay.routed import Clairvoyant, StrategyPlacer, pooled_hit_rate
from routing.replay.routers import Sharing
from routing.schema import Settings
from tests.benchmarks import quality, routers
from tests.benchmarks.literature.tables import Table, percent
from tests.benchmarks.quality import DIFFICULT, Cell, forest_of

CHAT = next(
    cell for cell in quality.chat_cells("chat") if cell.replicas == routers.REPLICAS and cell.model.blocks == 4000
)
S1, S2 = quality.literature_cells()


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


def _literature_row(name: str) -> list[str]:
    cells = []
    for cell in (S1, S2):
        found = figures(cell, next((settings for settings in cell.strategies if settings.name == name), None))
        hits = " / ".join(percent(found[key]) for key in ("token_hit_rate", "request_hit_rate"))
        times = " / ".join(f"{1e3 * found['ttft_s'][key]:.1f}" for key in ("mean", "p50", "p99"))
        cells.append(f"{hits}; {times}")
    return cells


LITERATURE_TABLE = Table(
    "replay-prefixes",
    ("", "S1: one prefix has 80 %, bursts", "S2: 1,600 prefixes, which fill all caches"),
    {
        "clairvoyant": partial(_literature_row, ""),
        **{f"`{name}`": partial(_literature_row, name) for name in quality.LITERATURE},
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


def _routers_row(workload: routers.Workload, ways: Sequence[Sharing]) -> list[str]:
    forest = forest_of(workload.name)
    single: dict[str, Any] = {}
    cells = []
    for count, sharing in ((1, Sharing.NONE), *((count, way) for way in ways for count in routers.ROUTERS[1:])):
        found = report(routers.run(workload, forest, count, sharing), forest.columns)
        ttft_s, hit_rate = found["ttft_s"]["mean"], found["token_hit_rate"]
        if not single:
            single = found
            cells.append(f"{percent(hit_rate)}, {seconds(ttft_s)} s, {found['load_cv']:.2f}")
            continue
        hits = hit_rate / single["token_hit_rate"] if single["token_hit_rate"] else 1.0
        cells.append(f"{hits:.2f}, {ttft_s / single['ttft_s']['mean']:.2f}, {found['load_cv']:.2f}")
    return cells


def _routers_table(name: str, ways: Sequence[Sharing], workloads: Iterable[routers.Workload]) -> Table:
    columns = (f"`{way}`: {count}" for way in ways for count in routers.ROUTERS[1:])
    rows = {f"`{workload.title}`": partial(_routers_row, workload, ways) for workload in workloads}
    return Table(name, ("", "1 router: hit %, mean TTFT, CoV", *columns), rows)


ROUTERS_TABLE = _routers_table(
    "replay-routers", (Sharing.NONE, Sharing.EVENTS), (it for it in routers.WORKLOADS if it.name != "coding")
)
SHARING_TABLE = _routers_table(
    "replay-sharing",
    (Sharing.NONE, Sharing.STATE),
    (it for it in routers.WORKLOADS if it.name in {"chat", "coding", "tides", "nothing_shared"}),
)

REPLAY_TABLES = (CHAT_TABLE, LITERATURE_TABLE, DIFFICULT_TABLE, ROUTERS_TABLE, SHARING_TABLE)
