"""Captured traffic as replay input: block ids, output ids, and fitted engine parameters."""

from __future__ import annotations

import numpy as np
import pytest

from telemetry.lab.captured import CapturedTraffic, fit_engine, replay_input
from telemetry.lab.chains import coded
from tests.telemetry.lab.traces import HASH_TOKENS, Request, columns, request, sampled, traffic


def captured(requests: list[Request], **changes: object) -> CapturedTraffic:
    """Requests without sessions, one tier-1 prefix for each first block, 10 generated tokens."""
    count = len(requests)
    prefixes = np.array([row.blocks[0] if row.blocks else 0 for row in requests], np.uint64)
    values = {
        "ttft_s": np.full(count, np.nan),
        "latency_s": np.full(count, np.nan),
        "generated_tokens": np.full(count, 10.0),
        "prefixes": prefixes,
        "sessions": np.zeros(count, np.uint64),
        "routers": coded(["1"] * count),
        "revisions": np.ones(count, np.int64),
    }
    values |= changes
    values.setdefault("prefill_s", values["ttft_s"])
    return CapturedTraffic(columns(requests), **values)


def ids_of(requests: list[Request], **changes: object) -> list[list[int]]:
    columns_ = replay_input(captured(requests, **changes))
    return [columns_.ids[begin:end].tolist() for begin, end in zip(columns_.starts, columns_.starts[1:], strict=False)]


def shared(one: list[int], other: list[int]) -> int:
    """Number of leading ids that two prompts share."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def hit_rate(ids: list[list[int]]) -> float:
    """Of one unbounded cache, in blocks."""
    seen: set[int] = set()
    hits = 0
    for prompt in ids:
        hits += next((at for at, block in enumerate(prompt) if block not in seen), len(prompt))
        seen.update(prompt)
    return hits / sum(map(len, ids))


def test_prompts_share_exactly_the_ids_of_their_common_blocks() -> None:
    rows = [request(0, [1, 2, 3, 4]), request(1, [1, 2, 3, 9, 8]), request(2, [5, 6])]

    first, second, third = ids_of(rows)

    assert shared(first, second) == 3
    assert shared(first, third) == 0
    assert len(set(first) & set(second)) == 3
    assert [len(first), len(second), len(third)] == [5, 6, 3]  # with the partial block at the end


def test_equal_blocks_of_groups_with_other_tokens_per_byte_are_not_mixed() -> None:
    prose = [request(0, [1, 2, 3, 4], group="prose")]
    code = [request(1, [1, 2, 3, 4], group="code", prompt_tokens=552)]  # twice as many tokens for the same bytes

    first, second = ids_of(prose + code)

    assert shared(first, second) == 0
    assert len(second) > len(first)


@pytest.mark.parametrize(("ratio", "error"), [(1.0, 0.0), (0.25, 0.03), (0.0625, 0.05)])
def test_sampled_hashes_give_about_the_hit_rate_of_all_hashes(ratio: float, error: float) -> None:
    rows = traffic(300, prompts=12, sessions=40, longest=200)
    exact, estimated = ids_of(rows), ids_of(sampled(rows, ratio), prefixes=captured(rows).prefixes)

    assert hit_rate(estimated) == pytest.approx(hit_rate(exact), abs=error)


def test_ids_of_generated_tokens_come_from_the_next_turn() -> None:
    turn = request(0, [1, 2, 3])
    following = request(1, [1, 2, 3, 4, 5, 6, 7])
    generated = np.array([3.0 * HASH_TOKENS, 10.0])

    first, second = ids_of([turn, following], generated_tokens=generated)

    assert first == second[:6]  # three blocks of the prompt, three of the response, which the next prompt contains


@pytest.mark.parametrize(("session", "repeated"), [(7, 6), (0, 3)])
def test_a_prompt_that_ends_within_a_block_is_continued_by_its_session(session: int, repeated: int) -> None:
    tokens = 4 * HASH_TOKENS
    turn = request(
        0, [1, 2, 3], prompt_tokens=tokens, estimate_tokens=tokens - 1
    )  # the fourth block of bytes has no hash
    following = request(1, [1, 2, 3, 4, 5, 6, 7])
    generated = np.array([2.0 * HASH_TOKENS, 10.0])

    first, second = ids_of([turn, following], generated_tokens=generated, sessions=np.full(2, session, np.uint64))

    assert shared(first, second) == repeated


def test_a_response_that_no_prompt_repeats_has_no_ids() -> None:
    first, _ = ids_of([request(0, [1, 2, 3]), request(1, [1, 2, 9])], generated_tokens=np.array([640.0, 640.0]))
    assert len(first) == 4


def test_the_ids_of_a_window_are_bounded_by_larger_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = ids_of(traffic(200))
    monkeypatch.setattr("telemetry.lab.captured.MAX_IDS", 3000)
    result = replay_input(captured(traffic(200)))
    assert len(result.ids) < 3500
    assert result.block_tokens > 2 * HASH_TOKENS
    assert hit_rate(ids_of(traffic(200))) == pytest.approx(hit_rate(exact), abs=0.04)


def timed(count: int = 400, *, rate: float = 5000.0, overhead_s: float = 0.05, step_s: float = 0.02) -> CapturedTraffic:
    """Streamed responses of an engine that is idle for a third of the requests."""
    rng = np.random.default_rng(1)
    rows = [request(at, [1] * int(rng.integers(2, 60)), cached_tokens=64) for at in range(count)]
    uncached = np.array([row.prompt_tokens - 64 for row in rows], np.float64)
    queue_s = np.where(rng.random(count) < 1 / 3, 0.0, rng.exponential(0.3, count))
    ttft_s = overhead_s + step_s + uncached / rate + queue_s
    generated = rng.integers(20, 60, count).astype(np.float64)
    latency_s = ttft_s + (generated - 1) * step_s * (1 + rng.exponential(0.3, count))
    return captured(rows, ttft_s=ttft_s, latency_s=latency_s, generated_tokens=generated)


def test_engine_parameters_are_fitted_to_the_idle_part_of_the_responses() -> None:
    traffic_ = timed()

    fit = fit_engine(traffic_, np.arange(len(traffic_)))

    assert fit.prefill_rate == pytest.approx(5000, rel=0.1)
    assert fit.overhead_s == pytest.approx(0.05, abs=0.03)
    assert fit.step_s == pytest.approx(0.02, rel=0.15)
    assert fit.requests == 400


def test_too_few_streamed_responses_give_no_prefill_rate() -> None:
    traffic_ = timed(20)
    assert fit_engine(traffic_, np.arange(20)).prefill_rate is None


def test_a_ttft_that_does_not_grow_with_the_prompt_gives_no_prefill_rate() -> None:
    traffic_ = timed()
    flat = captured([request(at, [1] * (2 + at % 50), cached_tokens=64) for at in range(400)], ttft_s=np.full(400, 0.2))
    assert fit_engine(flat, np.arange(400)).prefill_rate is None
    assert len(traffic_) == 400


def test_prompts_of_one_group_in_several_languages_share_their_common_blocks() -> None:
    english = [request(at, [1] * 20, prompt_tokens=1100) for at in range(8)]
    russian = [request(10 + at, [2] * 20, prompt_tokens=5000) for at in range(2)]

    ids = ids_of(english + russian)

    assert shared(ids[0], ids[1]) >= 0.95 * len(ids[0])
    assert shared(ids[8], ids[9]) >= 0.95 * len(ids[8])


def test_a_saturated_engine_whose_decode_steps_contain_prefill_has_a_rate_too() -> None:
    count, rate = 200, 8000.0
    rows = [request(0.1 * at, [1] * 94, cached_tokens=36) for at in range(count)]  # 6,000 uncached tokens
    finished_s = np.cumsum(np.full(count, 6000 / rate + 3 * 0.01))
    ttft_s = finished_s - np.array([row.at_s for row in rows])
    fit = fit_engine(captured(rows, ttft_s=ttft_s, latency_s=ttft_s + 9 * 0.266), np.arange(count))
    assert fit.prefill_rate == pytest.approx(rate, rel=0.03)
