"""The model against the reference results of an independent simulator on a real trace (its values are quoted here).

The trace is Mooncake's conversation trace, first 30 minutes. It is not part of the project: it is looked for in the
folder ``WARMPATH_TRACES`` names, or beside the repository in ``../shared/traces``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from routing.replay.block_runs import Forest
from routing.replay.fast_engine import FastEngineConfig
from routing.replay.replay import quantile, report
from routing.replay.replay import replay as replay_fast
from routing.replay.routed import Clairvoyant, Routed, pooled_hit_rate
from routing.schema import (
    Boundary,
    LeastLoadSettings,
    LowestCostSettings,
    PrefixHashSettings,
    RoundRobinSettings,
    Settings,
)
from routing.simulation.engine import Engine, EngineConfig
from routing.traffic.trace import BLOCK_TOKENS, TraceRequest, read_columns, read_trace
from tests.routing.simulation.stepwise import replay, replay_in_order

NAME = "mooncake_conversation_first30min.jsonl.gz"
FOLDERS = (os.environ.get("WARMPATH_TRACES"), Path(__file__).parents[4] / "shared" / "traces")
FOUND = [Path(folder) / NAME for folder in FOLDERS if folder and (Path(folder) / NAME).exists()]

pytestmark = pytest.mark.skipif(not FOUND, reason=f"TRACE NOT FOUND: {NAME} (set WARMPATH_TRACES to its folder)")

Choose = Callable[[TraceRequest, Sequence[Engine]], int]


@pytest.fixture(scope="module")
def trace() -> list[TraceRequest]:
    return read_trace(FOUND[0])


def test_the_trace_is_the_one_that_the_reference_was_made_with(trace: list[TraceRequest]) -> None:
    assert len(trace) == 5719
    assert mean(request.prompt_tokens for request in trace) == pytest.approx(12_870, abs=1)
    assert len({request.hash_ids[0] for request in trace if len(request.hash_ids) > 1}) == 1


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        (1, [4.065, 4.718, 8.904, 25.823, 34.703]),
        (4, [4.332, 7.209, 11.453, 16.844, 17.395]),
        (8, [5.001, 7.440, 9.915, 12.292, 12.292]),
    ],
)
def test_without_timing_round_robin_hits_what_the_reference_hits(
    trace: list[TraceRequest], replicas: int, expected: list[float]
) -> None:
    capacities = (600, 1500, 4000, 16_000, None)

    found = [replay_in_order(trace, BLOCK_TOKENS, capacity, replicas) for capacity in capacities]

    assert [100 * (rate or 0) for rate in found] == pytest.approx(expected, abs=0.05)


def round_robin() -> Choose:
    turn = count()
    return lambda _request, engines: next(turn) % len(engines)


def least_loaded() -> Choose:
    return lambda _request, engines: min(range(len(engines)), key=lambda index: engines[index].outstanding)


@pytest.mark.parametrize(
    ("make", "size", "hit", "ttft"),
    [
        (round_robin, (4, 600), 4.4, (5.21, 2.84, 26.4)),
        (round_robin, (4, 4000), 11.5, (3.96, 2.10, 20.8)),
        (round_robin, (8, 16_000), 12.3, (3.68, 1.95, 20.1)),
        (least_loaded, (4, 4000), 11.4, (2.80, 1.53, 15.9)),
        (least_loaded, (8, 600), 4.9, (2.83, 1.62, 15.8)),
    ],
)
def test_with_timing_hits_and_ttft_are_those_of_the_reference(
    trace: list[TraceRequest],
    make: Callable[[], Choose],
    size: tuple[int, int],
    hit: float,
    ttft: tuple[float, float, float],
) -> None:
    replicas, blocks = size
    config = EngineConfig(blocks=blocks, block_tokens=BLOCK_TOKENS, reserve_output=True)
    scale = {4: 0.547, 8: 1.094}[replicas]

    result = replay(trace, config, replicas, make(), time_scale=scale)

    waits = result.ttft_s()
    assert 100 * (result.hit_rate or 0) == pytest.approx(hit, abs=1.0)
    assert (mean(waits), quantile(waits, 0.5), quantile(waits, 0.99)) == pytest.approx(ttft, rel=0.10)
    assert len(waits) == len(trace)


# --- what-if replays -----------------------------------------------------------------------------------

OFFERED = 0.7  # prompt tokens / what the replicas can prefill
ORDER: tuple[Settings, ...] = (
    LowestCostSettings(),  # the reference's approx_ttft
    LeastLoadSettings(),  # its least_tokens
    PrefixHashSettings(boundary=Boundary.BYTES, boundary_bytes=4096, load_factor=100.0),  # its hash_k2
    RoundRobinSettings(),
)


@pytest.fixture(scope="module")
def forest() -> Forest:
    return Forest(read_columns(FOUND[0]))


def told(forest: Forest, settings: Settings | None, replicas: int, blocks: int) -> dict[str, Any]:
    """The report on a policy; None is the clairvoyant choice."""
    model = FastEngineConfig(blocks)
    columns = forest.columns
    decider = Clairvoyant() if settings is None else Routed(settings, columns, model, replicas)
    scale = OFFERED * replicas * model.prefill_rate / columns.offered_tokens_per_s()
    return report(replay_fast(forest, model, replicas, decider, scale), columns)


@pytest.mark.parametrize(
    ("capacity", "expected"), [(1500, 4.8), (4000, 9.1), (12_000, 23.1), (32_000, 32.9), (None, 34.70)]
)
def test_one_cache_for_all_hits_what_the_reference_hits(forest: Forest, capacity: int | None, expected: float) -> None:
    assert 100 * (pooled_hit_rate(forest, capacity) or 0) == pytest.approx(expected, abs=0.055)


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
def test_strategies_and_the_clairvoyant_choice_bring_what_the_reference_has(
    forest: Forest, settings: Settings | None, size: tuple[int, int], hit: float, ttft: tuple[float, float, float]
) -> None:
    found = told(forest, settings, *size)

    # least_load goes by remaining tokens, which the reference's least_tokens does not know
    assert 100 * found["token_hit_rate"] == pytest.approx(hit, abs=1.3 if settings == LeastLoadSettings() else 1.0)
    assert [found["ttft_s"][key] for key in ("mean", "p50", "p99")] == pytest.approx(ttft, rel=0.10)


@pytest.mark.parametrize("size", [(4, 600), (4, 4000), (8, 4000), (16, 16_000)])
def test_the_default_strategy_is_as_good_as_the_clairvoyant_choice(forest: Forest, size: tuple[int, int]) -> None:
    best, found = told(forest, None, *size), told(forest, LowestCostSettings(), *size)

    assert found["ttft_s"]["mean"] <= 1.05 * best["ttft_s"]["mean"]
    assert found["ttft_s"]["p99"] <= 1.1 * best["ttft_s"]["p99"]
    assert found["token_hit_rate"] >= 0.95 * best["token_hit_rate"]
    assert found["load_max_over_mean"] < 1.3


def test_mean_ttft_puts_strategies_in_the_order_of_the_reference(forest: Forest) -> None:
    means = [told(forest, settings, 8, 4000)["ttft_s"]["mean"] for settings in ORDER]

    assert means == sorted(means)
