"""Compares the router's own placement with that of the clairvoyant placer."""

from __future__ import annotations

import gc
import random
from collections import Counter
from statistics import mean, median

import pytest

from routing.balancing.strategies.registry import STRATEGIES
from routing.replay import routed
from routing.replay.block_runs import Forest
from routing.replay.fast_engine import FastEngineConfig
from routing.replay.replay import Placer, replay, report
from routing.replay.routed import Clairvoyant, KeyIndex, StrategyPlacer, pooled_hit_rate
from routing.schema import LowestCostSettings
from routing.traffic.columns import Columns
from tests import synthetic_traces as synthetic

MODEL = FastEngineConfig(48_000, block_tokens=synthetic.SMALL_BLOCK_TOKENS)
REPLICAS = 8
LOAD = 0.7  # of what the replicas could prefill if nothing were cached


@pytest.mark.parametrize("make", [synthetic.bursts, synthetic.jobs, synthetic.giant_group, synthetic.nothing_shared])
def test_the_least_cost_is_within_a_tenth_of_the_clairvoyant_choice(make):
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
def test_a_replay_creates_no_reference_cycles_because_the_collector_is_off(strategy):
    columns = synthetic.chat(50, 1)
    gc.disable()
    try:
        gc.collect()
        replay(Forest(columns), [MODEL] * REPLICAS, StrategyPlacer(strategy(), columns, MODEL, REPLICAS))
        assert gc.collect() == 0
    finally:
        gc.enable()


# --- The traces ---


def test_chat_has_the_statistics_of_the_production_trace():
    trace = synthetic.chat(6000, 1)
    forest = Forest(trace)
    assert mean(trace.prompt_tokens) == pytest.approx(12_870, rel=0.1)
    assert median(trace.prompt_tokens) == pytest.approx(7640, rel=0.1)
    assert mean(trace.output_tokens) == pytest.approx(346, rel=0.1)
    assert trace.offered_tokens_per_s() == pytest.approx(40_897, rel=0.1)
    hits = [100 * (pooled_hit_rate(forest, capacity) or 0) for capacity in (1500, 4000, 12_000, 32_000, None)]
    assert hits == pytest.approx([4.8, 9.1, 23.1, 32.9, 34.7], abs=2.0)


# --- A trace's block ids as hashes ---


def test_different_ids_have_different_hashes_whatever_their_neighbours():
    rng = random.Random(1)
    ids = [0, 1, 2**64 - 1, *(rng.getrandbits(rng.choice((8, 20, 64))) for _ in range(routed._PIECE_BYTES // 8))]

    assert hashes_of(ids) == [id_ ^ reversed_bytes(id_ % 2**32) << 32 for id_ in ids]
    assert hashes_of(ids[3:]) == hashes_of(ids)[3:]


def test_consecutive_ids_are_spread_over_64_bits():
    hashes = hashes_of(list(range(10_000)))

    eighths = Counter(hash_ >> 61 for hash_ in hashes)
    assert len(set(hashes)) == 10_000
    assert {part: round(count / 1250, 1) for part, count in eighths.items()} == dict.fromkeys(range(8), 1.0)


def hashes_of(ids: list[int]) -> list[int]:
    columns = Columns(block_tokens=16)
    columns.append(0.0, 16 * len(ids), 1, ids)
    return list(KeyIndex(LowestCostSettings(), columns).hashes)


def reversed_bytes(half: int) -> int:
    return int.from_bytes(half.to_bytes(4, "little"), "big")
