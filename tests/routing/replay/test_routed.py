"""Compares the router's own placement with that of the clairvoyant placer."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from routing.balancing.strategies.registry import STRATEGIES
from routing.replay.block_runs import Forest
from routing.replay.fast_engine import FastEngineConfig
from routing.replay.replay import Placer, replay, report
from routing.replay.routed import Clairvoyant, StrategyPlacer
from routing.schema import LowestCostSettings, PolicySettings
from routing.traffic.columns import Columns
from tests import synthetic_traces as synthetic

MODEL = FastEngineConfig(48_000, block_tokens=synthetic.SMALL_BLOCK_TOKENS)
REPLICAS = 8
LOAD = 0.7  # of what the replicas could prefill if nothing were cached


@pytest.mark.parametrize("make", [synthetic.bursts, synthetic.jobs, synthetic.giant_group, synthetic.nothing_shared])
def test_the_least_cost_is_within_a_tenth_of_the_clairvoyant_choice(make: Callable[[int, int], Columns]) -> None:
    forest = Forest(make(1500, 1))
    scale = LOAD * REPLICAS * MODEL.prefill_rate / forest.columns.offered_tokens_per_s()

    def ttft_of(placer: Placer) -> dict[str, float]:
        return report(replay(forest, [MODEL] * REPLICAS, placer, scale), forest.columns)["ttft_s"]

    best, chosen = (
        ttft_of(Clairvoyant()),
        ttft_of(StrategyPlacer(LowestCostSettings(), forest.columns, MODEL, REPLICAS)),
    )

    assert chosen["mean"] < 1.1 * best["mean"]
    assert chosen["p99"] < 1.1 * best["p99"]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_a_replay_creates_no_reference_cycles_because_the_collector_is_off(strategy: type[PolicySettings]) -> None:
    columns = synthetic.chat(50, 1)
    gc.disable()
    try:
        gc.collect()
        replay(Forest(columns), [MODEL] * REPLICAS, StrategyPlacer(strategy(), columns, MODEL, REPLICAS))
        assert gc.collect() == 0
    finally:
        gc.enable()
