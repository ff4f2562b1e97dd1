"""Prefill rates, and tokens per byte, learnt from responses."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.balancing.load_tracker import (
    CLIP,
    DEFAULT_RATE,
    MAX_BLOCK_TOKENS,
    MIN_BLOCK_TOKENS,
    MIN_RATIO_BYTES,
    PrefillRate,
    TokenRatio,
    TokenRatios,
)


def test_an_unmeasured_replica_has_the_default_rate():
    assert (PrefillRate().tokens_per_s, PrefillRate().samples) == (DEFAULT_RATE, 0)


def test_noise_is_averaged_and_stalls_count_little():
    rate, rng = PrefillRate(), random.Random(3)
    for number in range(500):
        stall_s = 30.0 if number % 20 == 7 else 0.0
        tokens = rng.randint(600, 20_000)
        rate.learn(tokens, tokens / 8000 * math.exp(rng.gauss(0, 0.2)) + stall_s)

    assert 7000 < rate.tokens_per_s < 9000


def test_a_rate_follows_a_change_of_speed():
    rate = PrefillRate()
    for _ in range(200):
        rate.learn(8000, 1.0)
    for _ in range(2000):
        rate.learn(8000, 0.1)

    assert rate.tokens_per_s == pytest.approx(80_000, rel=0.05)


@pytest.mark.parametrize(("tokens", "ttft_s"), [(511, 1.0), (0, 1.0), (-5, 1.0), (10_000, 0.0), (10_000, -1.0)])
def test_unusable_samples_are_ignored(tokens, ttft_s):
    rate = PrefillRate()
    rate.learn(tokens, ttft_s)

    assert rate.samples == 0


@pytest.mark.parametrize(("tokens", "ttft_s", "learnt"), [(1_000_000, 1e-9, 5_000_000), (1000, 1e9, 50)])
def test_rates_are_bounded(tokens, ttft_s, learnt):
    rate = PrefillRate()
    rate.learn(tokens, ttft_s)

    assert rate.tokens_per_s == pytest.approx(learnt)


def test_a_replica_without_samples_has_the_fleets_rate():
    fleet = PrefillRate()
    measured, unmeasured = PrefillRate(fleet), PrefillRate(fleet)
    for _ in range(100):
        measured.learn(8000, 0.2)

    assert unmeasured.tokens_per_s == pytest.approx(40_000)
    assert unmeasured.samples == 0
    assert unmeasured.is_measured


def test_few_samples_move_a_rate_little_from_the_fleets_and_many_all_the_way():
    fleet = PrefillRate()
    slow, others = PrefillRate(fleet), [PrefillRate(fleet) for _ in range(9)]
    for number in range(900):
        others[number % 9].learn(8000, 0.2)
    slow.learn(8000, 0.8)
    assert slow.tokens_per_s > 35_000

    for number in range(3000):
        others[number % 9].learn(8000, 0.2)
        slow.learn(8000, 0.8)
    assert slow.tokens_per_s < 13_000


PROMPT_BYTES = 4096


def taught(ratio: TokenRatio, prompts: int, tokens_per_byte: float, seed: int = 1) -> TokenRatio:
    """A ratio after ``prompts`` with up to a fifth of noise."""
    chance = random.Random(seed)
    for _ in range(prompts):
        ratio.learn(PROMPT_BYTES, round(PROMPT_BYTES * tokens_per_byte * chance.uniform(0.8, 1.2)))
    return ratio


def test_until_there_are_samples_four_bytes_are_a_token():
    ratio = TokenRatio()

    assert (ratio.block_tokens, ratio.tokens(4000), ratio.tokens(0), ratio.tokens(1)) == (64, 1000, 0, 1)
    assert ratio.tokens_per_byte == 0.25


@pytest.mark.parametrize("tokens_per_byte", [0.18, 0.23, 0.28, 0.42])
def test_a_tokenizer_is_learnt_from_few_prompts(tokens_per_byte):
    ratio = taught(TokenRatio(), 60, tokens_per_byte)

    assert ratio.tokens(100_000) == pytest.approx(100_000 * tokens_per_byte, rel=0.06)


def test_another_tokenizer_is_learnt_after_a_long_time_with_the_first():
    ratio = taught(TokenRatio(), 20_000, 0.25)
    taught(ratio, 4000, 0.42)

    assert ratio.tokens_per_byte == pytest.approx(0.42, rel=0.06)


def test_odd_text_of_one_client_in_ten_moves_the_ratio_little():
    ratio = taught(TokenRatio(), 2000, 0.25)
    for number in range(4000):
        taught(ratio, 9, 0.25, seed=number)
        ratio.learn(PROMPT_BYTES, 8 * PROMPT_BYTES)

    assert ratio.tokens_per_byte < 0.25 * (1 + 0.13)


def test_one_enormous_prompt_counts_no_more_than_a_few():
    ratio = taught(TokenRatio(), 200, 0.25)
    ratio.learn(8 << 20, 8 << 20)

    assert ratio.tokens_per_byte == pytest.approx(0.25, rel=0.03)


@given(st.lists(st.tuples(st.integers(0, 1 << 24), st.integers(0, 1 << 30)), max_size=60))
def test_no_reported_usage_moves_the_ratio_out_of_its_bounds(samples):
    ratio = TokenRatio()
    for size, tokens in samples:
        before = ratio.tokens_per_byte
        ratio.learn(size, tokens)
        assert before / CLIP <= ratio.tokens_per_byte <= before * CLIP
        assert MIN_BLOCK_TOKENS <= ratio.block_tokens <= MAX_BLOCK_TOKENS


def test_short_prompts_are_ignored_because_they_are_mostly_the_template():
    ratio = TokenRatio()
    for _ in range(100):
        ratio.learn(MIN_RATIO_BYTES - 1, MIN_RATIO_BYTES)

    assert (ratio.samples, ratio.block_tokens) == (0, 64)


def test_the_tokens_of_a_block_stay_the_same_while_the_ratio_fluctuates():
    ratio = taught(TokenRatio(), 3000, 0.30)
    seen = set()
    for number in range(300):
        taught(ratio, 1, 0.30, seed=number)
        seen.add(ratio.block_tokens)

    assert len(seen) == 1


def test_each_model_of_each_pool_has_its_own_ratio_and_removed_models_are_dropped():
    ratios = TokenRatios()
    taught(ratios.for_model("chat", "small"), 100, 0.42)

    assert ratios.for_model("chat", "large").samples == ratios.for_model("code", "small").samples == 0
    ratios.forget_all_but([("chat", "small")])
    assert [name for name, _ in ratios.items()] == [("chat", "small")]
    assert ratios.for_model("chat", "small").samples == 100
