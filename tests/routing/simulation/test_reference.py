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

import pytest

from routing.simulation.driver_virtual import quantile, replay, replay_in_order
from routing.simulation.engine import Engine, EngineConfig
from routing.workload.trace import BLOCK_TOKENS, TraceRequest, read_trace

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
