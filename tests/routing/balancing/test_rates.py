from __future__ import annotations

import math
import random

import pytest

from routing.balancing.rates import DEFAULT_RATE, PrefillRate


def test_a_replica_nobody_measured_has_the_default_rate() -> None:
    assert (PrefillRate().tokens_per_s, PrefillRate().samples) == (DEFAULT_RATE, 0)


def test_a_rate_is_learnt() -> None:
    rate = PrefillRate()
    rate.learn(10_000, 0.5)

    assert rate.tokens_per_s == pytest.approx(20_000)


def test_noise_is_averaged_and_stalls_hardly_count() -> None:
    rate, rng = PrefillRate(), random.Random(3)
    for number in range(500):
        stall_s = 30.0 if number % 20 == 7 else 0.0
        tokens = rng.randint(600, 20_000)
        rate.learn(tokens, tokens / 8000 * math.exp(rng.gauss(0, 0.2)) + stall_s)

    assert 7000 < rate.tokens_per_s < 9000


def test_a_change_is_followed() -> None:
    rate = PrefillRate()
    for _ in range(200):
        rate.learn(8000, 1.0)
    for _ in range(2000):
        rate.learn(8000, 0.1)

    assert rate.tokens_per_s == pytest.approx(80_000, rel=0.05)


@pytest.mark.parametrize(("tokens", "ttft_s"), [(511, 1.0), (0, 1.0), (-5, 1.0), (10_000, 0.0), (10_000, -1.0)])
def test_what_says_nothing_about_the_rate_is_passed_over(tokens: int, ttft_s: float) -> None:
    rate = PrefillRate()
    rate.learn(tokens, ttft_s)

    assert rate.samples == 0


@pytest.mark.parametrize(("tokens", "ttft_s", "learnt"), [(1_000_000, 1e-9, 5_000_000), (1000, 1e9, 50)])
def test_a_rate_stays_within_reason(tokens: int, ttft_s: float, learnt: float) -> None:
    rate = PrefillRate()
    rate.learn(tokens, ttft_s)

    assert rate.tokens_per_s == pytest.approx(learnt)


def test_a_replica_that_answered_nothing_is_taken_to_be_as_fast_as_the_others() -> None:
    fleet = PrefillRate()
    measured, unmeasured = PrefillRate(fleet), PrefillRate(fleet)
    for _ in range(100):
        measured.learn(8000, 0.2)

    assert unmeasured.tokens_per_s == pytest.approx(40_000)
    assert unmeasured.samples == 0
    assert unmeasured.is_measured


def test_without_any_answer_nothing_is_measured() -> None:
    fleet = PrefillRate()

    assert not PrefillRate(fleet).is_measured
    assert not fleet.is_measured


def test_few_answers_move_a_replica_little_from_the_others_and_many_all_the_way() -> None:
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
