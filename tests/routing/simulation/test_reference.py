"""The fast replay against the results of an independent simulator on a real trace (its values are quoted here).

The trace is Mooncake's conversation trace, first 30 minutes. It is not part of the project: the tests read it from the
folder in ``WARMPATH_TRACES`` or from ``../shared/traces`` beside the repository, and are skipped without it.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from routing.replay.block_runs import Forest
from routing.replay.fast_engine import FastEngineConfig
from routing.replay.replay import replay as replay_fast
from routing.replay.replay import report
from routing.replay.routed import Clairvoyant, StrategyPlacer, pooled_hit_rate
from routing.schema import (
    Boundary,
    LeastLoadSettings,
    LowestCostSettings,
    PrefixHashSettings,
    RoundRobinSettings,
    Settings,
)
from routing.traffic.trace import read_columns

NAME = "mooncake_conversation_first30min.jsonl.gz"
FOLDERS = (os.environ.get("WARMPATH_TRACES"), Path(__file__).parents[4] / "shared" / "traces")
FOUND = [Path(folder) / NAME for folder in FOLDERS if folder and (Path(folder) / NAME).exists()]
OFFERED = 0.7  # prompt tokens / what the replicas can prefill

pytestmark = pytest.mark.skipif(not FOUND, reason=f"TRACE NOT FOUND: {NAME} (set WARMPATH_TRACES to its folder)")


# --- the fast replay, with the router's strategies ---


@pytest.fixture(scope="module")
def forest() -> Forest:
    return Forest(read_columns(FOUND[0]))


@cache
def replayed(forest: Forest, settings: Settings | None, replicas: int, blocks: int) -> dict[str, Any]:
    """The report on a policy; None is the clairvoyant choice."""
    model, columns = FastEngineConfig(blocks), forest.columns
    decider = Clairvoyant() if settings is None else StrategyPlacer(settings, columns, model, replicas)
    scale = OFFERED * replicas * model.prefill_rate / columns.offered_tokens_per_s()
    return report(replay_fast(forest, [model] * replicas, decider, scale), columns)


def test_hit_rates_of_one_cache_for_all_replicas(forest):
    rates = [100 * (pooled_hit_rate(forest, blocks) or 0) for blocks in (1500, 4000, 12_000, 32_000, None)]
    assert rates == pytest.approx([4.8, 9.1, 23.1, 32.9, 34.70], abs=0.055)


@pytest.mark.parametrize(
    ("settings", "size", "hit", "ttft"),
    [
        (None, (4, 4000), 23.0, (1.56, 0.86, 11.1)),
        (None, (16, 600), 17.3, (1.43, 0.78, 11.0)),
        (LeastLoadSettings(), (8, 4000), 9.5, (1.67, 0.98, 11.4)),
        (RoundRobinSettings(), (16, 4000), 8.7, (3.77, 2.07, 19.0)),
        (RoundRobinSettings(), (16, 16_000), 9.1, (3.73, 2.05, 19.0)),
    ],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_strategies_and_the_clairvoyant_choice_match_the_reference(forest, settings, size, hit, ttft):
    result = replayed(forest, settings, *size)
    # least_load weighs remaining tokens, which the reference's least_tokens does not
    assert 100 * result["token_hit_rate"] == pytest.approx(hit, abs=1.3 if settings == LeastLoadSettings() else 1.0)
    assert [result["ttft_s"][key] for key in ("mean", "p50", "p99")] == pytest.approx(ttft, rel=0.10)


@pytest.mark.parametrize("size", [(4, 600), (4, 4000), (8, 4000), (16, 16_000)])
def test_the_default_strategy_is_as_good_as_the_clairvoyant_choice(forest, size):
    best, default = replayed(forest, None, *size), replayed(forest, LowestCostSettings(), *size)
    assert default["ttft_s"]["mean"] <= 1.05 * best["ttft_s"]["mean"]
    assert default["ttft_s"]["p99"] <= 1.1 * best["ttft_s"]["p99"]
    assert default["token_hit_rate"] >= 0.95 * best["token_hit_rate"]
    assert default["load_max_over_mean"] < 1.3


def test_strategies_have_the_order_of_the_reference_by_mean_ttft(forest):
    order = (
        LowestCostSettings(),  # approx_ttft in the reference
        LeastLoadSettings(),  # least_tokens
        PrefixHashSettings(boundary=Boundary.BYTES, boundary_bytes=4096, slack_s=60.0),  # hash_k2
        RoundRobinSettings(),
    )
    means = [replayed(forest, settings, 8, 4000)["ttft_s"]["mean"] for settings in order]
    assert means == sorted(means)
