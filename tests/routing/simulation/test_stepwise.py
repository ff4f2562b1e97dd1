"""Replays, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.simulation.engine import Engine, EngineConfig
from tests.routing.simulation.stepwise import Replay, replay, replay_in_order

CONFIG = EngineConfig(blocks=40, block_tokens=4, prefill_rate=1000.0, step_s=0.01, decode_s=0.001, chunk_tokens=32)


@dataclass(frozen=True)
class Row:
    at_s: float
    prompt_tokens: int
    output_tokens: int
    keys: tuple[int, ...] = ()


def test_a_lone_request_waits_for_its_own_prefill_only() -> None:
    result = replay([Row(5.0, 20, 3)], CONFIG, 2, lambda _row, _engines: 1)

    assert result.placed == [1]
    assert result.ttft_s() == pytest.approx([0.01 + 20 / 1000])
    assert result.sequences[0].finished_s == pytest.approx(5.0 + 0.03 + 2 * 0.011)


def test_a_time_scale_of_two_plays_twice_as_fast() -> None:
    rows = [Row(0.0, 20, 3), Row(8.0, 20, 3)]

    result = replay(rows, CONFIG, 1, lambda _row, _engines: 0, time_scale=2.0)

    assert result.sequences[1].arrived_s == 4.0


def test_a_choice_sees_the_engines_as_they_are_at_the_arrival() -> None:
    seen: list[int] = []

    def choose(_row: Row, engines: Sequence[Engine]) -> int:
        seen.append(engines[0].outstanding)
        return 0

    replay([Row(0.0, 20, 3), Row(0.001, 20, 3), Row(9.0, 20, 3)], CONFIG, 1, choose)

    assert seen == [0, 1, 0]


def test_nothing_gives_no_hit_rate() -> None:
    assert replay([], CONFIG, 1, lambda _row, _engines: 0).hit_rate is None
    assert replay_in_order([], 4, 10, 1) is None
    assert Replay().ttft_s() == []


rows = st.lists(
    st.builds(
        lambda gap, prompt, output, prefix: (gap, prompt, output, prefix),
        st.floats(0, 0.2),
        st.integers(1, 50),
        st.integers(1, 20),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=20,
)


@settings(max_examples=60, deadline=None)
@given(plans=rows, replicas=st.integers(1, 3))
def test_a_replay_serves_every_request_and_is_the_same_each_time(
    plans: list[tuple[float, int, int, int]], replicas: int
) -> None:
    at_s, requests = 0.0, []
    for gap_s, prompt, output, prefix in plans:
        at_s += gap_s
        requests.append(Row(at_s, prompt, output, tuple(prefix * 100 + index for index in range(prompt // 4))))

    def run() -> Replay:
        turn = count()
        return replay(requests, CONFIG, replicas, lambda _row, engines: next(turn) % len(engines))

    first, second = run(), run()

    assert [s.finished_s for s in first.sequences] == [s.finished_s for s in second.sequences]
    for sequence, row in zip(first.sequences, requests, strict=True):
        assert sequence.generated_tokens == row.output_tokens
        assert sequence.first_token_s is not None
        assert sequence.first_token_s - row.at_s >= CONFIG.step_s
