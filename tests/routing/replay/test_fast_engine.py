"""The fast engine gives the same results as the engine of single steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.replay.block_runs import Forest
from routing.replay.fast_engine import FastEngine, FastEngineConfig, ModelledRequest
from routing.replay.replay import RequestTooLargeError, replay
from routing.simulation.engine import EngineConfig
from tests.routing.replay.prompts import BLOCK, Plan, Row, columns_of, plans, rows_of
from tests.routing.simulation.stepwise import replay as replay_steps


@dataclass
class ScriptedPlacer:
    """Places requests on given engines, and records events."""

    choices: Sequence[int]

    def __post_init__(self) -> None:
        self.events: list[tuple[float, str, int]] = []

    def place(self, request: ModelledRequest, engines: Sequence[FastEngine], _now_s: float) -> int:
        return self.choices[request.index] % len(engines)

    def on_first_token(self, request: ModelledRequest, now_s: float) -> None:
        self.events.append((now_s, "first", request.index))

    def on_ended(self, request: ModelledRequest, now_s: float) -> None:
        self.events.append((now_s, "ended", request.index))


@settings(max_examples=300, deadline=None)
@given(
    plans=plans,
    choices=st.lists(st.integers(0, 5), min_size=25, max_size=25),
    replicas=st.integers(1, 3),
    blocks=st.integers(10, 30),
    chunk=st.sampled_from([3, 8, 16]),
    max_running=st.sampled_from([2, 256]),
)
def test_times_hits_and_the_order_of_events_are_those_of_single_steps(
    *, plans: list[Plan], choices: list[int], replicas: int, blocks: int, chunk: int, max_running: int
) -> None:
    rows = rows_of(plans)
    columns = columns_of(rows)
    # binary fractions, so that sums are exact and some steps end just when a request arrives
    times = {"prefill_rate": 1024.0, "step_s": 1 / 64, "decode_s": 1 / 512, "max_running": max_running}
    config = EngineConfig(blocks=blocks, block_tokens=BLOCK, chunk_tokens=chunk, reserve_output=True, **times)
    model = FastEngineConfig(blocks, block_tokens=BLOCK, chunk_tokens=chunk, **times)
    placer = ScriptedPlacer(choices)

    remaining_choices = iter(choices)
    expected = replay_steps(rows, config, replicas, lambda _row, _engines: next(remaining_choices) % replicas)
    result = replay(Forest(columns), [model] * replicas, placer)

    assert list(result.cached_tokens) == [sequence.cached_tokens for sequence in expected.sequences]
    assert list(result.ttft_s) == [sequence.first_token_s - sequence.arrived_s for sequence in expected.sequences]
    ended = {index: now_s for now_s, kind, index in placer.events if kind == "ended"}
    assert [ended[index] for index in range(len(rows))] == [sequence.finished_s for sequence in expected.sequences]
    assert placer.events == sorted(placer.events, key=lambda event: event[0])


def test_a_trace_with_a_request_that_no_cache_can_hold_is_rejected_before_it_is_replayed() -> None:
    columns = columns_of([Row(0.0, 3, 1, (1,)), Row(0.0, 13, 4, (1, 2, 3, 4))])

    with pytest.raises(RequestTooLargeError, match="request 2 needs 5 blocks of 4 tokens"):
        replay(Forest(columns), [FastEngineConfig(4, block_tokens=BLOCK)], ScriptedPlacer([0, 0]))
