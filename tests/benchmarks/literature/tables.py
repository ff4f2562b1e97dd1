"""The tables: each row is one or more replays of a seeded workload by the engine model and the real strategies."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from routing.replay.block_runs import Forest
from routing.replay.command import TIERS
from routing.replay.fast_engine import FastEngineConfig
from routing.replay.replay import Placer, ReplayResult, replay, report
from routing.replay.routed import Clairvoyant, StrategyPlacer, pooled_hit_rate
from routing.replay.tiers import KV_BYTES_PER_TOKEN, LowerTiers, TierCache, TierConfig
from routing.schema import (
    AffinityGroupsSettings,
    Boundary,
    CacheAwareSettings,
    LeastLoadSettings,
    LowestCostSettings,
    PrefixHashSettings,
    RoundRobinSettings,
    Settings,
)
from routing.traffic.columns import Columns
from tests import synthetic_traces
from tests.benchmarks.literature import workloads
from tests.benchmarks.quality import FAST_REPLICA

REPLICAS = 8
WARM_UP = 0.2  # share of the requests that the figures leave out
LARGE = 48_000  # blocks: more than any workload needs on one replica
REQUESTS = 6000
ROUND_ROBIN, LEAST_LOAD = RoundRobinSettings(), LeastLoadSettings()
CACHE_AWARE, LOWEST_COST = CacheAwareSettings(), LowestCostSettings()


@dataclass(frozen=True)
class Table:
    """One table: ``rows`` computes the cells of a row after its first one."""

    name: str
    header: Sequence[str]
    rows: dict[str, Callable[[], Sequence[str]]]

    def line(self, row: str) -> str:
        """A row in Markdown."""
        return f"| {row} | {' | '.join(self.rows[row]())} |"

    def lines(self) -> list[str]:
        """The table in Markdown."""
        return [f"| {' | '.join(self.header)} |", f"|{' --- |' * len(self.header)}", *map(self.line, self.rows)]


# --- replays -----------------------------------------------------------------------------------------


def replayed(
    forest: Forest, placer: Placer, model: FastEngineConfig, replicas: int, load: float | None
) -> ReplayResult:
    """``load``: offered prompt tokens / what the replicas can prefill without caches; None: the workload's own pace."""
    scale = 1.0
    if load is not None:
        scale = load * replicas * model.prefill_rate / forest.columns.offered_tokens_per_s()
    return replay(forest, [model] * replicas, placer, scale)


def figures(
    forest: Forest,
    settings: Settings | None,
    *,
    replicas: int = REPLICAS,
    blocks: int = LARGE,
    load: float | None = None,
    model: FastEngineConfig | None = None,
    warm_up: float = WARM_UP,
) -> dict[str, Any]:
    """Report of a replay under a strategy; None: the clairvoyant choice."""
    columns = forest.columns
    model = model or FastEngineConfig(blocks, **FAST_REPLICA)
    placer = Clairvoyant() if settings is None else StrategyPlacer(settings, columns, model, replicas)
    return report(replayed(forest, placer, model, replicas, load), columns, int(warm_up * len(columns)))


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}" if seconds < 0.1 else f"{1e3 * seconds:,.0f}"


@cache
def forest_of(make: Callable[[int], Columns]) -> Forest:
    """A workload of the usual size, generated once per process."""
    return Forest(make(REQUESTS))


# --- a. round robin ----------------------------------------------------------------------------------

FLEETS = (1, 2, 4, 8, 16)


def _hit_by_fleet(workload: Callable[[int], Columns], blocks: int) -> list[str]:
    hits = []
    for replicas in FLEETS:
        found = figures(
            Forest(workload(replicas)), ROUND_ROBIN, replicas=replicas, blocks=blocks, load=0.5, warm_up=0.5
        )
        hits.append(percent(found["token_hit_rate"]))
    return hits


ROUND_ROBIN_TABLE = Table(
    "round-robin",
    ("hit %, replicas:", *map(str, FLEETS)),
    {
        "literature, 1/N": lambda: ("94", "52", "27", "13.5", "6.7"),
        "users grow with the fleet: 200 prompts per replica, caches hold 240": partial(
            _hit_by_fleet, lambda replicas: workloads.prefix_pool(2000 * replicas, 200 * replicas, 10.0), 30_000
        ),
        "short sessions: 2 turns": partial(
            _hit_by_fleet,
            lambda _: workloads.conversations(3000, 2, rate=10.0, system=0, first=(2000, 2000), message=(20, 60))[0],
            LARGE,
        ),
        "long sessions: 20 turns": partial(
            _hit_by_fleet, lambda _: workloads.conversations(6000, 20, rate=10.0, system=0)[0], LARGE
        ),
        "fixed users: 200 prompts for the whole fleet": partial(
            _hit_by_fleet, lambda replicas: workloads.prefix_pool(2000 * replicas, 200, 10.0), 30_000
        ),
        "one prompt has 80 % of the traffic": partial(
            _hit_by_fleet, lambda replicas: synthetic_traces.hot_prefix(1500 * replicas, 1), 22_000
        ),
    },
)

# --- b. strategies on two workloads --------------------------------------------------------------------

LITERATURE_REQUESTS = 60_000
PREFIX = {"boundary": Boundary.BYTES, "boundary_bytes": 8000}  # the 2,000 tokens of a prefix


@cache
def _literature_forest(name: str) -> Forest:
    make = {"S1": synthetic_traces.hot_prefix, "S2": synthetic_traces.session_pool}[name]
    return Forest(make(LITERATURE_REQUESTS, 1))


def _on_both(claim: str, settings: Settings | None) -> list[str]:
    cells = [claim]
    for name, blocks in (("S1", 22_000), ("S2", 27_500)):
        found = figures(_literature_forest(name), settings, blocks=blocks)
        ttft = found["ttft_s"]
        cells.append(f"{percent(found['token_hit_rate'])} / {percent(found['request_hit_rate'])}")
        cells.append(" / ".join(ms(ttft[key]) for key in ("mean", "p50", "p99")))
        cells.append(f"{found['load_max_over_mean']:.2f}")
    return cells


STRATEGIES_TABLE = Table(
    "strategies",
    (
        "8 replicas",
        "claimed: hit %; TTFT mean / p50 / p99, ms",
        "S1: hit %, tokens / requests",
        "S1: TTFT mean / p50 / p99, ms",
        "S1: max/mean requests",
        "S2: hit %",
        "S2: TTFT, ms",
        "S2: max/mean",
    ),
    {
        "`round_robin`": partial(_on_both, "12.5; 52 / - / 115", ROUND_ROBIN),
        "`prefix_hash` without a load bound": partial(
            _on_both, "95, 8x imbalance; - / 8 / 280", PrefixHashSettings(slack_s=60.0, **PREFIX)
        ),
        "`prefix_hash`": partial(_on_both, "-", PrefixHashSettings(**PREFIX)),
        "`cache_aware`": partial(_on_both, "85; 14 / - / 65", CACHE_AWARE),
        "`affinity_groups`": partial(_on_both, "92 (6 + 2 replicas); 10 / - / 48", AffinityGroupsSettings(**PREFIX)),
        "`lowest_cost`": partial(_on_both, "-", LOWEST_COST),
        "clairvoyant": partial(_on_both, "-", None),
    },
)

# --- c. fixed depth against longest match --------------------------------------------------------------

DEPTHS = (64, 512, 2048)  # tokens


def _by_granularity(make: Callable[[int], Columns]) -> list[str]:
    keyed = [PrefixHashSettings(boundary=Boundary.BYTES, boundary_bytes=4 * tokens) for tokens in DEPTHS]
    cells = []
    for settings in (*keyed, CACHE_AWARE, LOWEST_COST):
        found = figures(forest_of(make), settings, blocks=6000, load=0.7)
        cells.append(f"{percent(found['token_hit_rate'])} / {ms(found['ttft_s']['mean'])}")
    return cells


GRANULARITY_TABLE = Table(
    "granularity",
    (
        "hit % / TTFT mean, ms",
        *(f"`prefix_hash`, {tokens:,} tokens" for tokens in DEPTHS),
        "`cache_aware`",
        "`lowest_cost`",
    ),
    {(make.__doc__ or ""): partial(_by_granularity, make) for make in workloads.STRUCTURES},
)

# --- d. turns of a conversation ------------------------------------------------------------------------

TURNS = 10


@cache
def _conversations() -> tuple[Forest, array[int]]:
    columns, turns = workloads.conversations(12_000, TURNS, rate=20.0, first=(400, 800), message=(200, 600), reply=200)
    return Forest(columns), turns


@cache
def _by_turn(settings: Settings) -> tuple[list[float], list[float]]:
    """Mean TTFT in seconds and hit rate of tokens, by turn."""
    forest, turns = _conversations()
    columns, model = forest.columns, FastEngineConfig(LARGE, **FAST_REPLICA)
    result = replayed(forest, StrategyPlacer(settings, columns, model, REPLICAS), model, REPLICAS, 0.6)
    ttft_s, hits, tokens, counts = ([0.0] * (TURNS + 1) for _ in range(4))
    for index in range(int(WARM_UP * len(columns)), len(columns)):
        turn = turns[index]
        counts[turn] += 1
        ttft_s[turn] += result.ttft_s[index]
        hits[turn] += result.cached_tokens[index]
        tokens[turn] += columns.prompt_tokens[index]
    order = range(1, TURNS + 1)
    return [ttft_s[turn] / counts[turn] for turn in order], [hits[turn] / tokens[turn] for turn in order]


FIRST_MESSAGE = PrefixHashSettings(boundary=Boundary.BYTES, boundary_bytes=4 * 640)
TURN_STRATEGIES = {
    "`round_robin`": ROUND_ROBIN,
    "`least_load`": LEAST_LOAD,
    "`prefix_hash`, up to the first message": FIRST_MESSAGE,
    "`lowest_cost`": LOWEST_COST,
}
TURNS_TABLE = Table(
    "turns",
    ("turn:", *map(str, range(1, TURNS + 1))),
    {
        f"TTFT mean, ms: {name}": lambda settings=settings: [ms(value) for value in _by_turn(settings)[0]]
        for name, settings in TURN_STRATEGIES.items()
    }
    | {
        f"hit %: {name}": lambda settings=settings: [percent(value) for value in _by_turn(settings)[1]]
        for name, settings in TURN_STRATEGIES.items()
    },
)

# --- e. seven workloads --------------------------------------------------------------------------------


def _with_and_without_affinity(make: Callable[[int], Columns]) -> list[str]:
    forest = forest_of(make)
    found = [figures(forest, settings, blocks=12_000, load=0.7) for settings in (ROUND_ROBIN, LEAST_LOAD, LOWEST_COST)]
    hits = [pooled_hit_rate(forest, None) or 0.0, found[0]["token_hit_rate"], found[2]["token_hit_rate"]]
    times = [one["ttft_s"]["mean"] for one in found]
    return [*map(percent, hits), *map(ms, times), f"{times[1] / times[2]:.2f}"]


WORKLOADS_TABLE = Table(
    "workloads",
    (
        "workload",
        "shared with earlier prompts, % of tokens",
        "hit %: `round_robin`",
        "hit %: `lowest_cost`",
        "TTFT mean, ms: `round_robin`",
        "`least_load`",
        "`lowest_cost`",
        "`least_load` / `lowest_cost`",
    ),
    {(make.__doc__ or ""): partial(_with_and_without_affinity, make) for make in workloads.MIXES},
)

# --- f. cache on and off -------------------------------------------------------------------------------

LOADS = (0.2, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 4.0)


@cache
def _retrieval(shared: bool) -> Forest:
    """The retrieval workload; not ``shared``: with an own id for each block, so that nothing is ever cached."""
    columns = workloads.shared_documents(REQUESTS)
    if not shared:
        columns.ids = array("Q", range(len(columns.ids)))
    return Forest(columns)


@cache
def _at_load(load: float, *, shared: bool) -> dict[str, Any]:
    return figures(_retrieval(shared), LOWEST_COST, blocks=12_000, load=load)


def _times_by_load(key: str, *, shared: bool) -> list[str]:
    return [ms(_at_load(load, shared=shared)["ttft_s"][key]) for load in LOADS]


def _served_by_load(*, shared: bool) -> list[str]:
    return [f"{REQUESTS / _at_load(load, shared=shared)['ended_s']:.0f}" for load in LOADS]


def _offered_by_load() -> list[str]:
    columns = _retrieval(shared=True).columns
    per_request = columns.all_prompt_tokens / len(columns)
    return [f"{load * REPLICAS * FAST_REPLICA['prefill_rate'] / per_request:.0f}" for load in LOADS]


CACHE_TABLE = Table(
    "cache-on-off",
    ("load:", *map(str, LOADS)),
    {
        "offered requests/s": _offered_by_load,
        "served requests/s: no cache": partial(_served_by_load, shared=False),
        "served requests/s: cache": partial(_served_by_load, shared=True),
        "TTFT p50, ms: no cache": partial(_times_by_load, "p50", shared=False),
        "TTFT p50, ms: cache": partial(_times_by_load, "p50", shared=True),
        "TTFT p99, ms: no cache": partial(_times_by_load, "p99", shared=False),
        "TTFT p99, ms: cache": partial(_times_by_load, "p99", shared=True),
    },
)

# --- g. cache tiers ------------------------------------------------------------------------------------

# KV bytes per token, prefill tokens/s; latencies of the CPU and of the remote tier in ms, the defaults and the slowest
MODELS: dict[str, tuple[int, float, tuple[float, float]]] = {
    f"{name}; {cpu_ms} and {remote_ms} ms": (kv_bytes, rate, (cpu_ms, remote_ms))
    for cpu_ms, remote_ms in ((10, 25), (40, 120))
    for name, kv_bytes, rate in (
        ("8B, 20,000 tokens/s", 131_072, 20_000.0),
        ("70B, 8,000 tokens/s", KV_BYTES_PER_TOKEN, 8000.0),
        ("70B, 2,500 tokens/s", KV_BYTES_PER_TOKEN, 2500.0),
    )
} | {"8B, 47,600 tokens/s; 10 and 25 ms": (131_072, 47_600.0, (10, 25))}
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
MAX_BLOCKS = 4096  # 65,536 tokens


def _is_fetched(blocks: int, tier: TierConfig, kv_bytes: int, rate: float) -> bool:
    cached = TierCache(replace(tier, blocks=blocks))
    cached.insert(range(blocks))
    return bool(LowerTiers([cached], 16 * kv_bytes, 16 / rate).fetch(range(blocks), 0.0).blocks)


def _break_even(kv_bytes: int, rate: float, latencies_ms: tuple[float, float]) -> list[str]:
    cells = [f"{kv_bytes:,}"]
    for default, latency_ms in zip(TIERS.values(), latencies_ms, strict=True):
        tier = replace(default, latency_s=latency_ms / 1e3)
        fetched = lambda blocks, tier=tier: _is_fetched(blocks, tier, kv_bytes, rate)  # noqa: E731
        blocks = 1 + bisect_left(range(1, MAX_BLOCKS), True, key=fetched)
        tokens = 16 * blocks
        cells += ["never", "-"] if blocks == MAX_BLOCKS else [f"{tokens:,}", f"{1e3 * tokens / rate:.0f}"]
    return cells


BREAK_EVEN_TABLE = Table(
    "break-even",
    (
        "model; latency of CPU and remote tier",
        "KV bytes/token",
        *(text for tier in TIERS for text in (f"{tier}: tokens", f"{tier}: ms of prefill")),
    ),
    {name: partial(_break_even, *model) for name, model in MODELS.items()},
)


def _fetch_times(tier: TierConfig) -> list[str]:
    return [ms(tier.latency_s + tokens * KV_BYTES_PER_TOKEN / tier.bytes_per_s) for tokens in LENGTHS]


FETCH_TABLE = Table(
    "fetch-time",
    ("ms, prefix of tokens:", *map(str, LENGTHS)),
    {"prefill, 8,000 tokens/s": lambda: [ms(tokens / 8000) for tokens in LENGTHS]}
    | {f"fetch from {name}": partial(_fetch_times, tier) for name, tier in TIERS.items()},
)

POOL = 1600  # prefixes of 2,000 tokens; a GPU cache holds 50 of them, a CPU 200, the remote tier all
TIER_BLOCKS = {"cpu": 27_600, "remote": 220_000}


@cache
def _pool() -> Forest:
    return Forest(workloads.prefix_pool(8000, POOL, 15.0))


def _with_tiers(settings: Settings, *names: str) -> list[str]:
    tiers = tuple(replace(TIERS[name], blocks=TIER_BLOCKS[name]) for name in names)
    found = figures(_pool(), settings, model=FastEngineConfig(6900, 16, tiers=tiers), warm_up=0.5)
    hit_tokens, total = found["hit_tokens"], sum(found["hit_tokens"].values())
    shares = [found["token_hit_rate"] * hit_tokens.get(tier, 0) / max(1, total) for tier in ("gpu", *TIERS)]
    return [*map(percent, shares), " / ".join(ms(found["ttft_s"][key]) for key in ("mean", "p50", "p99"))]


TIERS_TABLE = Table(
    "tiers",
    ("8 replicas", "hit %: GPU", "hit %: CPU", "hit %: remote", "TTFT mean / p50 / p99, ms"),
    {
        f"`{settings.name}`, {label}": partial(_with_tiers, settings, *names)
        for settings in (ROUND_ROBIN, LOWEST_COST)
        for label, names in {
            "GPU only": (),
            "with CPU": ("cpu",),
            "with remote": ("remote",),
            "with CPU and remote": ("cpu", "remote"),
        }.items()
    },
)

LITERATURE_TABLES = (
    ROUND_ROBIN_TABLE,
    STRATEGIES_TABLE,
    GRANULARITY_TABLE,
    TURNS_TABLE,
    WORKLOADS_TABLE,
    CACHE_TABLE,
    BREAK_EVEN_TABLE,
    FETCH_TABLE,
    TIERS_TABLE,
)
