"""The fast engine is the engine of single steps, only faster."""

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
class Scripted:
    """Places requests as told, and notes what happens."""

    choices: Sequence[int]

    def __post_init__(self) -> None:
        self.events: list[tuple[float, str, int]] = []

    def place(self, job: ModelledRequest, engines: Sequence[FastEngine], _now_s: float) -> int:
        return self.choices[job.index] % len(engines)

    def first_token(self, job: ModelledRequest, now_s: float) -> None:
        self.events.append((now_s, "first", job.index))

    def ended(self, job: ModelledRequest, now_s: float) -> None:
        self.events.append((now_s, "ended", job.index))


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
    # binary fractions, so that sums are exact and steps do end when requests arrive
    times = {"prefill_rate": 1024.0, "step_s": 1 / 64, "decode_s": 1 / 512, "max_running": max_running}
    config = EngineConfig(blocks=blocks, block_tokens=BLOCK, chunk_tokens=chunk, reserve_output=True, **times)
    model = FastEngineConfig(blocks, block_tokens=BLOCK, chunk_tokens=chunk, **times)
    decider = Scripted(choices)

    in_turn = iter(choices)
    expected = replay_steps(rows, config, replicas, lambda _row, _engines: next(in_turn) % replicas)
    outcome = replay(Forest(columns), model, replicas, decider)

    assert list(outcome.cached_tokens) == [sequence.cached_tokens for sequence in expected.sequences]
    assert list(outcome.ttft_s) == [s.first_token_s - s.arrived_s for s in expected.sequences]
    ended = {index: now_s for now_s, what, index in decider.events if what == "ended"}
    assert [ended[index] for index in range(len(rows))] == [s.finished_s for s in expected.sequences]
    assert decider.events == sorted(decider.events, key=lambda event: event[0])


def test_what_no_cache_can_hold_is_refused_before_anything_runs() -> None:
    columns = columns_of([Row(0.0, 3, 1, (1,)), Row(0.0, 13, 4, (1, 2, 3, 4))])

    with pytest.raises(RequestTooLargeError, match="request 2 needs 5 blocks of 4 tokens"):
        replay(Forest(columns), FastEngineConfig(4, block_tokens=BLOCK), 1, Scripted([0, 0]))
