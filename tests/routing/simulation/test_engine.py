"""The engine model: batching, chunked prefill, preemption, and when each metric is counted."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.simulation.engine import Engine, EngineConfig, Sequence, State

FAST = EngineConfig(blocks=100, block_tokens=16, prefill_rate=1000.0, step_s=0.01, decode_s=0.001, chunk_tokens=64)

unique_keys = count(1000)


def engine(**changes: Any) -> Engine:
    return Engine(replace(FAST, **changes))


def sequence(prompt: int, output: int, keys: list[int] | None = None, at_s: float = 0.0) -> Sequence:
    first_key = next(unique_keys) * 1000
    return Sequence(keys if keys is not None else [first_key + i for i in range(prompt // 16)], prompt, output, at_s)


def submitted(model: Engine, *sequences: Sequence) -> None:
    for each in sequences:
        model.submit(each)


def run(model: Engine, now_s: float = 0.0, until_s: float = 0.0) -> float:
    """Step until idle; the time at which the engine is idle."""
    while (step := model.plan_step(now_s, until_s)) is not None:
        now_s = step.end_s
        model.finish(step)
    return now_s


def step_once(model: Engine, now_s: float = 0.0) -> float:
    step = model.plan_step(now_s)
    assert step is not None
    model.finish(step)
    return step.end_s


def test_a_step_takes_its_fixed_time_plus_decoding_and_prefill():
    model = engine()
    model.submit(sequence(40, 3))
    end_s = step_once(model)
    assert end_s == pytest.approx(0.01 + 40 / 1000)
    assert step_once(model, end_s) - end_s == pytest.approx(0.01 + 0.001)


def test_the_first_token_comes_once_all_chunks_of_the_prompt_are_computed():
    model, long = engine(), sequence(150, 1)
    model.submit(long)
    run(model)
    assert long.first_token_s == pytest.approx(3 * 0.01 + 150 / 1000)
    assert long.state is State.FINISHED


def test_the_rest_of_a_chunk_goes_to_the_next_prompt():
    model = engine()
    submitted(model, sequence(40, 1), sequence(40, 1))
    step = model.plan_step(0.0)
    assert step is not None
    assert step.prefill_tokens == 64
    assert [each.prompt_tokens for each in step.prefilled] == [40]


def test_the_last_token_of_a_prompt_is_always_computed():
    model = engine()
    for _ in range(2):
        model.submit(sequence(64, 1, keys=[1, 2, 3, 4]))
        run(model)
    assert (model.statistics.queries, model.statistics.hits) == (128, 48)


def test_a_prompt_shares_blocks_with_a_running_request():
    model, second = engine(), sequence(33, 1, keys=[1, 2])
    model.submit(sequence(33, 50, keys=[1, 2]))
    end_s = step_once(model)
    model.submit(second)
    model.plan_step(end_s)
    assert second.cached_tokens == 32
    assert model.pool.held == 3 + 1


def test_generated_blocks_are_cached_for_the_next_turn():
    model, second = engine(), sequence(64, 1, keys=[1, 2, 3, 4])
    model.submit(sequence(16, 33, keys=[1, 2, 3]))
    run(model)
    model.submit(second)
    run(model)
    assert second.cached_tokens == 48


def test_sequences_beyond_max_running_wait_in_order():
    model, sequences = engine(max_running=2), [sequence(16, 5) for _ in range(4)]
    submitted(model, *sequences)
    model.plan_step(0.0)
    assert [each.state for each in sequences] == [State.PREFILLING] * 2 + [State.WAITING] * 2
    assert (model.statistics.running, model.statistics.waiting) == (2, 2)


def test_a_prompt_that_does_not_fit_yet_blocks_those_behind_it():
    model = engine(blocks=5)
    sequences = [sequence(48, 20), sequence(64, 4), sequence(8, 2)]
    submitted(model, *sequences)
    end_s = step_once(model)
    assert model.statistics.waiting == 2
    run(model, end_s)
    assert [each.state for each in sequences] == [State.FINISHED] * 3


def test_the_newest_request_is_preempted_when_blocks_run_out_and_is_counted_once():
    model, first, second = engine(blocks=6), sequence(32, 40), sequence(32, 40)
    submitted(model, first, second)
    now_s = 0.0
    while not second.preemptions:
        now_s = step_once(model, now_s)
    assert (model.statistics.waiting, model.statistics.preemptions) == (1, 0), "counted when it runs again"

    run(model, now_s)
    statistics = model.statistics
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert (first.generated_tokens, second.generated_tokens) == (40, 40)
    assert statistics.preemptions == statistics.request_preemptions.total == 1
    assert statistics.queries == statistics.prompt_tokens == 64
    assert statistics.time_to_first_token.count == 2


def test_nothing_is_preempted_if_the_output_is_reserved():
    model, first, second = engine(blocks=6, reserve_output=True), sequence(32, 40), sequence(32, 40)
    submitted(model, first, second)
    model.plan_step(0.0)
    assert second.state is State.WAITING
    run(model)
    assert model.statistics.preemptions == 0


def test_metrics_are_counted_at_admission_first_token_and_end():
    model = engine()
    model.submit(sequence(100, 5))
    statistics = model.statistics
    assert statistics.queries == 0
    end_s = step_once(model)
    assert (statistics.queries, statistics.prompt_tokens) == (100, 0)
    end_s = step_once(model, end_s)
    assert (statistics.prompt_tokens, statistics.time_to_first_token.count) == (100, 1)
    assert statistics.end_to_end.count == 0
    end_s = run(model, end_s)
    assert statistics.end_to_end.total == pytest.approx(end_s)
    assert statistics.finished["length"] == 1
    assert statistics.generation_tokens == 5
    assert statistics.inter_token.count == 4
    assert statistics.iteration_tokens.total == 100 + 5
    assert statistics.decode_time.total == pytest.approx(4 * 0.011)


def test_no_duration_is_negative_if_a_step_is_planned_late_for_a_request_that_came_after_its_start():
    """Sums of histograms would decrease, which looks like a restart of the engine."""
    model = engine()
    model.submit(sequence(100, 1, at_s=10.0))
    run(model, now_s=5.0)
    statistics = model.statistics

    assert statistics.end_to_end.count == 1
    durations = (statistics.end_to_end, statistics.queue_time, statistics.prefill_time, statistics.inference_time)
    assert [duration.total for duration in durations] == [0.0] * 4


def test_kv_usage_counts_held_blocks_only():
    model, finished = engine(blocks=10), sequence(64, 8)
    model.submit(finished)
    model.plan_step(0.0)
    assert model.statistics.kv_usage_ratio == pytest.approx(0.4)

    model = engine(blocks=10)
    model.submit(finished)
    run(model)
    assert model.statistics.kv_usage_ratio == 0
    assert len(model.pool.lookup(finished.keys, 10)) == 4


def test_an_aborted_request_releases_its_blocks_and_is_not_counted():
    model, aborted = engine(), sequence(48, 50)
    submitted(model, aborted, sequence(16, 5))
    step = model.plan_step(0.0)
    assert step is not None
    model.abort(aborted)
    model.finish(step)
    run(model, step.end_s)
    assert sum(model.statistics.finished.values()) == 1
    assert model.statistics.time_to_first_token.count == 1
    assert model.pool.held == 0


def test_equal_steps_taken_at_once_have_the_results_of_single_steps():
    results = []
    for until_s in (0.0, 1e9):
        model, sequences = engine(), [sequence(20 + 7 * i, 10 + 3 * i, keys=[]) for i in range(5)]
        submitted(model, *sequences)
        run(model, 0.0, until_s)
        statistics = model.statistics
        counts = statistics.inter_token.buckets, statistics.iteration_tokens.buckets, statistics.generation_tokens
        results.append(([each.finished_s for each in sequences], counts))
    assert results[0][1] == results[1][1]
    assert results[0][0] == pytest.approx(results[1][0])


@settings(max_examples=100, deadline=None)
@given(
    plans=st.lists(
        # prompt tokens, output tokens, prefix, whether the client disconnects
        st.tuples(st.integers(1, 60), st.integers(1, 30), st.integers(0, 2), st.sampled_from([False, False, True])),
        min_size=1,
        max_size=12,
    ),
    blocks=st.integers(24, 40),
    chunk=st.sampled_from([4, 16, 64]),
    reserve=st.booleans(),
)
def test_every_request_ends_once_and_no_token_is_lost(plans, blocks, chunk, reserve):
    model = engine(blocks=blocks, block_tokens=4, chunk_tokens=chunk, max_running=4, reserve_output=reserve)
    sequences = [
        sequence(prompt, output, [prefix * 100 + i for i in range(prompt // 4)]) for prompt, output, prefix, _ in plans
    ]
    unsent = list(zip(sequences, plans, strict=True))
    finished: list[Sequence] = []
    disconnecting: list[Sequence] = []
    now_s = 0.0
    while unsent or model.outstanding:
        if unsent:
            arriving, plan = unsent.pop(0)
            arriving.arrived_s = now_s
            model.submit(arriving)
            if plan[3]:
                disconnecting.append(arriving)
        step = model.plan_step(now_s)
        if step is None:
            continue
        if disconnecting and len(unsent) % 2:
            model.abort(disconnecting.pop(0))
        now_s = step.end_s
        finished += model.finish(step).finished
        check_invariants(model)
    assert len(finished) == len(set(finished))
    for ended in sequences:
        assert ended.state is (State.FINISHED if ended in finished else State.ABORTED)
        assert ended.state is State.ABORTED or ended.generated_tokens == ended.output_tokens
    assert model.pool.held == 0


def check_invariants(model: Engine) -> None:
    pool, statistics = model.pool, model.statistics
    assert pool.capacity is not None
    assert 0 <= pool.held <= pool.capacity
    assert {block for each in model.running for block in each.blocks} == {i for i, n in enumerate(pool._refs) if n}
    assert statistics.prompt_tokens <= statistics.queries >= statistics.hits
    assert statistics.generation_tokens == statistics.time_to_first_token.count + statistics.inter_token.count
