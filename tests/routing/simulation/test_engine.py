"""The engine model: batching, chunks, preemption, and when each figure is counted."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.simulation.engine import Engine, EngineConfig, TooLongError
from routing.simulation.sequence import Sequence, State

FAST = EngineConfig(blocks=100, block_tokens=16, prefill_rate=1000.0, step_s=0.01, decode_s=0.001, chunk_tokens=64)

fresh_keys = count(1000)


def engine(**changes: Any) -> Engine:
    settings_ = {name: getattr(FAST, name) for name in FAST.__dataclass_fields__} | changes
    return Engine(EngineConfig(**settings_))


def sequence(prompt: int, output: int, keys: list[int] | None = None, at_s: float = 0.0) -> Sequence:
    own = next(fresh_keys) * 1000
    return Sequence(keys if keys is not None else [own + i for i in range(prompt // 16)], prompt, output, at_s)


def run(model: Engine, now_s: float = 0.0, until_s: float = 0.0) -> float:
    """Step until idle; the time it is then."""
    while (step := model.begin(now_s, until_s)) is not None:
        now_s = step.end_s
        model.finish(step)
    return now_s


def test_a_step_takes_the_fixed_time_the_decoding_and_the_prefill() -> None:
    model = engine()
    first = sequence(40, 3)
    model.submit(first)

    prefill = model.begin(0.0)
    assert prefill is not None
    assert prefill.end_s == pytest.approx(0.01 + 40 / 1000)
    model.finish(prefill)
    decode = model.begin(prefill.end_s)
    assert decode is not None
    assert decode.end_s - decode.start_s == pytest.approx(0.01 + 0.001)


def test_the_first_token_comes_when_the_whole_prompt_is_computed_in_chunks() -> None:
    model = engine()
    long = sequence(150, 1)
    model.submit(long)

    run(model)

    assert long.first_token_s == pytest.approx(3 * 0.01 + 150 / 1000)
    assert long.state is State.FINISHED


def test_what_is_left_of_a_chunk_goes_to_the_next_in_line() -> None:
    model = engine()
    for prompt in (40, 40):
        model.submit(sequence(prompt, 1))

    step = model.begin(0.0)

    assert step is not None
    assert step.prefill_tokens == 64
    assert [one.prompt_tokens for one in step.prefilled] == [40]


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    model = engine()
    for _ in range(2):
        model.submit(sequence(64, 1, keys=[1, 2, 3, 4]))
        run(model)

    assert model.statistics.queries == 128
    assert model.statistics.hits == 48


def test_a_prompt_shares_blocks_with_one_that_is_still_running() -> None:
    model = engine()
    model.submit(sequence(33, 50, keys=[1, 2]))
    step = model.begin(0.0)
    assert step is not None
    model.finish(step)
    second = sequence(33, 1, keys=[1, 2])

    model.submit(second)
    model.begin(step.end_s)

    assert second.cached_tokens == 32
    assert model.pool.held == 3 + 1


def test_the_generated_blocks_join_the_cache_for_the_next_turn() -> None:
    model = engine()
    model.submit(sequence(16, 33, keys=[1, 2, 3]))
    run(model)
    second = sequence(64, 1, keys=[1, 2, 3, 4])

    model.submit(second)
    run(model)

    assert second.cached_tokens == 48


def test_no_more_run_than_allowed_and_the_rest_wait_in_order() -> None:
    model = engine(max_running=2)
    waiting = [sequence(16, 5) for _ in range(4)]
    for one in waiting:
        model.submit(one)

    model.begin(0.0)

    assert [one.state for one in waiting] == [State.PREFILLING] * 2 + [State.WAITING] * 2
    gauges = model.statistics.gauges
    assert (gauges.running, gauges.waiting) == (2, 2)


def test_a_prompt_that_does_not_fit_now_waits_and_holds_up_those_behind() -> None:
    model = engine(blocks=5)
    big, bigger, small = sequence(48, 20), sequence(64, 4), sequence(8, 2)
    for one in (big, bigger, small):
        model.submit(one)

    step = model.begin(0.0)
    assert step is not None
    assert model.statistics.gauges.waiting == 2
    model.finish(step)
    run(model, step.end_s)
    assert (big.state, bigger.state, small.state) == (State.FINISHED,) * 3


def test_what_can_never_fit_is_refused() -> None:
    with pytest.raises(TooLongError, match="97 tokens do not fit into 6 blocks of 16"):
        engine(blocks=6).submit(sequence(90, 7))


def test_the_newest_running_is_preempted_when_blocks_run_out_and_finishes_later() -> None:
    model = engine(blocks=6)
    first, second = sequence(32, 40), sequence(32, 40)
    model.submit(first)
    model.submit(second)

    run(model)

    assert (first.preemptions, second.preemptions) == (0, 1)
    assert (first.generated_tokens, second.generated_tokens) == (40, 40)
    assert model.statistics.preemptions == 1
    assert model.statistics.request_preemptions.total == 1


def test_a_preemption_is_counted_only_when_the_request_runs_again() -> None:
    model = engine(blocks=6)
    first, second = sequence(32, 40), sequence(32, 40)
    model.submit(first)
    model.submit(second)
    now_s = 0.0
    while not second.preemptions:
        step = model.begin(now_s)
        assert step is not None
        now_s = step.end_s
        model.finish(step)

    assert model.statistics.gauges.waiting == 1
    assert model.statistics.preemptions == 0


def test_a_preempted_request_counts_its_queries_and_prompt_tokens_once() -> None:
    model = engine(blocks=6)
    model.submit(sequence(32, 40))
    model.submit(sequence(32, 40))

    run(model)

    assert model.statistics.queries == 64
    assert model.statistics.prompt_tokens == 64
    assert model.statistics.time_to_first_token.count == 2


def test_nothing_is_preempted_where_the_output_is_reserved() -> None:
    model = engine(blocks=6, reserve_output=True)
    first, second = sequence(32, 40), sequence(32, 40)
    model.submit(first)
    model.submit(second)

    model.begin(0.0)
    assert second.state is State.WAITING
    run(model)
    assert model.statistics.preemptions == 0


def test_queries_count_at_admission_and_prompt_tokens_at_the_first_token() -> None:
    model = engine()
    model.submit(sequence(100, 2))
    assert model.statistics.queries == 0

    step = model.begin(0.0)
    assert step is not None
    assert (model.statistics.queries, model.statistics.prompt_tokens) == (100, 0)
    model.finish(step)
    assert model.statistics.prompt_tokens == 0
    run(model, step.end_s)
    assert model.statistics.prompt_tokens == 100


def test_request_figures_count_at_the_end() -> None:
    model = engine()
    model.submit(sequence(20, 5))
    step = model.begin(0.0)
    assert step is not None
    model.finish(step)
    assert model.statistics.time_to_first_token.count == 1
    assert model.statistics.end_to_end.count == 0

    end_s = run(model, step.end_s)

    counted = model.statistics
    assert counted.end_to_end.total == pytest.approx(end_s)
    assert counted.finished["length"] == 1
    assert counted.generation_tokens == 5
    assert counted.inter_token.count == 4
    assert counted.iteration_tokens.total == 20 + 5
    assert counted.decode_time.total == pytest.approx(4 * 0.011)


def test_kv_usage_counts_what_running_requests_hold_and_not_what_is_cached() -> None:
    model = engine(blocks=10)
    model.submit(sequence(64, 8))
    model.begin(0.0)
    assert model.statistics.gauges.kv_usage_ratio == pytest.approx(0.4)

    other, done = engine(blocks=10), sequence(64, 8)
    other.submit(done)
    run(other)
    assert other.statistics.gauges.kv_usage_ratio == 0
    assert len(other.pool.lookup(done.keys, 10)) == 4


def test_an_aborted_request_gives_its_blocks_back_and_is_counted_nowhere() -> None:
    model = engine()
    gone, stays = sequence(48, 50), sequence(16, 5)
    model.submit(gone)
    model.submit(stays)
    step = model.begin(0.0)
    assert step is not None

    model.abort(gone)
    model.finish(step)
    run(model, step.end_s)

    assert sum(model.statistics.finished.values()) == 1
    assert model.statistics.time_to_first_token.count == 1
    assert model.pool.held == 0


def test_many_equal_steps_at_once_bring_what_single_steps_bring() -> None:
    outcomes = []
    for until_s in (0.0, 1e9):
        model = engine()
        sequences = [sequence(20 + 7 * i, 10 + 3 * i, keys=[]) for i in range(5)]
        for one in sequences:
            model.submit(one)
        run(model, 0.0, until_s)
        counted = model.statistics
        outcomes.append(
            (
                [one.finished_s for one in sequences],
                counted.inter_token.buckets,
                counted.iteration_tokens.buckets,
                counted.generation_tokens,
            )
        )

    assert outcomes[0][1:] == outcomes[1][1:]
    assert outcomes[0][0] == pytest.approx(outcomes[1][0])


requests = st.lists(
    st.tuples(
        st.integers(1, 60),  # prompt tokens
        st.integers(1, 30),  # output tokens
        st.integers(0, 2),  # which prefix
        st.sampled_from(["stay", "stay", "stay", "leave"]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(requests=requests, blocks=st.integers(24, 40), chunk=st.sampled_from([4, 16, 64]), reserve=st.booleans())
def test_every_request_ends_exactly_once_and_no_token_is_lost(
    requests: list[tuple[int, int, int, str]], blocks: int, chunk: int, reserve: bool
) -> None:
    outcomes = [play(requests, blocks, chunk, reserve) for _ in range(2)]

    assert outcomes[0] == outcomes[1]


def play(requests: list[tuple[int, int, int, str]], blocks: int, chunk: int, reserve: bool) -> list[Any]:
    """Submit one request a step, let some leave in the middle, and check the books at every step."""
    model = engine(blocks=blocks, block_tokens=4, chunk_tokens=chunk, max_running=4, reserve_output=reserve)
    made = [
        sequence(prompt, output, [prefix * 100 + i for i in range(prompt // 4)])
        for prompt, output, prefix, _ in requests
    ]
    left = list(zip(made, requests, strict=True))
    finished: list[Sequence] = []
    now_s, leaving = 0.0, []
    while left or model.outstanding:
        if left:
            one, plan = left.pop(0)
            one.arrived_s = now_s
            model.submit(one)
            if plan[3] == "leave":
                leaving.append(one)
        step = model.begin(now_s)
        if step is None:
            continue
        if leaving and len(left) % 2:
            model.abort(leaving.pop(0))
        now_s = step.end_s
        finished += model.finish(step).finished
        check_books(model)
    assert len(finished) == len(set(finished))
    for one in made:
        assert one.state in {State.FINISHED, State.ABORTED}
        assert (one in finished) == (one.state is State.FINISHED)
        assert one.state is State.ABORTED or one.generated_tokens == one.output_tokens
    assert model.pool.held == 0
    return [(one.first_token_s, one.finished_s, one.cached_tokens, one.preemptions) for one in made]


def check_books(model: Engine) -> None:
    pool, counted = model.pool, model.statistics
    assert pool.capacity is not None
    assert 0 <= pool.held <= pool.capacity
    assert {block for one in model.running for block in one.blocks} == {i for i, n in enumerate(pool._refs) if n}
    assert counted.hits <= counted.queries
    assert counted.prompt_tokens <= counted.queries
    assert counted.generation_tokens == counted.time_to_first_token.count + counted.inter_token.count
