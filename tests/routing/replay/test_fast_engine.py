"""The fast engine gives the same results as the engine of single steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.replay.block_runs import Forest
from routing.replay.fast_engine import FastEngine, FastEngineConfig, ModelledRequest
from routing.replay.replay import RequestTooLargeError, replay, report
from routing.replay.tiers import TierConfig
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
    *, plans, choices, replicas, blocks, chunk, max_running
):
    compare(plans, choices, replicas, blocks=blocks, chunk_tokens=chunk, max_running=max_running)


def compare(plans: list[Plan], choices: list[int], replicas: int, **options: Any) -> None:
    """Replay with both engines and compare."""
    rows = rows_of(plans)
    columns = columns_of(rows)
    # binary fractions, so that sums are exact and some steps end just when a request arrives
    options |= {"block_tokens": BLOCK, "prefill_rate": 1024.0, "step_s": 1 / 64, "decode_s": 1 / 512}
    model = FastEngineConfig(**options)
    placer = ScriptedPlacer(choices)

    remaining_choices = iter(choices)
    expected = replay_steps(
        rows,
        EngineConfig(**options, reserve_output=True),
        replicas,
        lambda _row, _engines: next(remaining_choices) % replicas,
    )
    result = replay(Forest(columns), [model] * replicas, placer)

    assert list(result.cached_tokens) == [sequence.cached_tokens for sequence in expected.sequences]
    assert list(result.ttft_s) == [sequence.first_token_s - sequence.arrived_s for sequence in expected.sequences]
    ended = {index: now_s for now_s, kind, index in placer.events if kind == "ended"}
    assert [ended[index] for index in range(len(rows))] == [sequence.finished_s for sequence in expected.sequences]
    assert placer.events == sorted(placer.events, key=lambda event: event[0])


def replayed(rows: list[Row], replicas: int = 1, **options: object) -> dict[str, Any]:
    """Requests 10 s apart, placed in turn, on GPU caches of 4 blocks; a token takes 0.1 s to prefill."""
    columns = columns_of([replace(row, at_s=10.0 * number) for number, row in enumerate(rows)])
    config = FastEngineConfig(4, BLOCK, prefill_rate=10.0, step_s=0.0, kv_bytes_per_token=1, **options)
    result = replay(Forest(columns), [config] * replicas, ScriptedPlacer(range(len(rows))))
    return report(result, columns) | {"ttfts": list(result.ttft_s)}


FIRST = Row(0.0, 13, 1, (1, 2, 3, 4))  # each takes all blocks of a replica
SECOND = Row(0.0, 13, 1, (5, 6, 7, 8))
CPU = TierConfig("cpu", 10, latency_s=0.2, bytes_per_s=40.0)  # 0.1 s per block


def test_an_evicted_block_is_fetched_from_the_next_tier_when_that_is_faster_than_prefill():
    found = replayed([FIRST, SECOND, FIRST], tiers=(CPU,))

    assert found["hit_tokens"] == {"gpu": 0, "cpu": 12}
    assert found["token_hit_rate"] == pytest.approx(12 / 39)
    assert found["ttfts"] == pytest.approx([1.3, 1.3, 0.2 + 3 * 0.1 + 0.1])

    slow = replayed([FIRST, SECOND, FIRST], tiers=(replace(CPU, latency_s=1.0),))
    assert slow["hit_tokens"] == {"gpu": 0, "cpu": 0}
    assert slow["ttfts"] == pytest.approx([1.3, 1.3, 1.3])


def test_a_full_tier_demotes_its_least_recently_used_blocks_to_the_next_one():
    third = Row(0.0, 13, 1, (9, 10, 11, 12))
    remote = TierConfig("remote", 2, latency_s=0.0, bytes_per_s=400.0)

    found = replayed([FIRST, SECOND, third, FIRST], tiers=(replace(CPU, blocks=4), remote))

    # The CPU has the second prompt and block 1; blocks 3 and 2 of the first prompt were evicted first.
    assert found["hit_tokens"] == {"gpu": 0, "cpu": 4, "remote": 8}


@pytest.mark.parametrize(("shared", "hits"), [(True, 12), (False, 0)])
def test_replicas_fetch_each_other_s_blocks_from_a_shared_tier(*, shared, hits):
    tier = replace(CPU, shared=shared)

    found = replayed([FIRST, SECOND, SECOND, FIRST], replicas=2, tiers=(tier,))

    assert found["hit_tokens"]["cpu"] == hits


def test_a_request_that_shares_blocks_with_one_that_fetches_them_waits_for_the_same_fetch():
    """A fetch of 0.2 + 3 * 0.1 s begins at 20 s; then 1 + 4 tokens are prefilled in one step of 0.5 s."""
    second = Row(10.0, 21, 1, (5, 6, 7, 8, 9, 10))  # takes all blocks
    sharing = Row(20.1, 12, 1, (1, 2, 3))  # computes its last block
    columns = columns_of([FIRST, second, replace(FIRST, at_s=20.0), sharing])
    config = FastEngineConfig(6, BLOCK, prefill_rate=10.0, step_s=0.0, kv_bytes_per_token=1, tiers=(CPU,))
    result = replay(Forest(columns), [config], ScriptedPlacer([0] * 4))

    assert list(result.cached_tokens) == [0, 0, 12, 8]
    assert list(result.ttft_s)[2:] == pytest.approx([0.5 + 0.5, 0.4 + 0.5])


def test_a_trace_with_a_request_that_no_cache_can_hold_is_rejected_before_it_is_replayed():
    columns = columns_of([Row(0.0, 3, 1, (1,)), Row(0.0, 13, 4, (1, 2, 3, 4))])

    with pytest.raises(RequestTooLargeError, match="request 2 needs 5 blocks of 4 tokens"):
        replay(Forest(columns), [FastEngineConfig(4, block_tokens=BLOCK)], ScriptedPlacer([0, 0]))
