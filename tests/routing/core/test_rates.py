from __future__ import annotations

import math
import random

import pytest

from routing.core.rates import DEFAULT_RATE, PrefillRates
from tests.routing.building import names

A, B = names(2)


def test_a_replica_nobody_measured_has_the_default_rate() -> None:
    assert PrefillRates().rate(A) == pytest.approx(DEFAULT_RATE)


def test_a_rate_is_learnt_and_is_each_replicas_own() -> None:
    rates = PrefillRates()
    rates.learn(A, 10_000, 0.5)

    assert rates.rate(A) == pytest.approx(20_000)
    assert rates.rate(B) == pytest.approx(DEFAULT_RATE)


def test_noise_is_averaged_and_stalls_hardly_count() -> None:
    rates, rng = PrefillRates(), random.Random(3)
    for number in range(500):
        stall_s = 30.0 if number % 20 == 7 else 0.0
        tokens = rng.randint(600, 20_000)
        rates.learn(A, tokens, tokens / 8000 * math.exp(rng.gauss(0, 0.2)) + stall_s)

    assert 7000 < rates.rate(A) < 9000


def test_a_change_is_followed() -> None:
    rates = PrefillRates()
    for _ in range(200):
        rates.learn(A, 8000, 1.0)
    for _ in range(200):
        rates.learn(A, 8000, 0.1)

    assert rates.rate(A) == pytest.approx(80_000, rel=0.05)


@pytest.mark.parametrize(("tokens", "ttft_s"), [(511, 1.0), (0, 1.0), (-5, 1.0), (10_000, 0.0), (10_000, -1.0)])
def test_what_says_nothing_about_the_rate_is_passed_over(tokens: int, ttft_s: float) -> None:
    rates = PrefillRates()
    rates.learn(A, tokens, ttft_s)

    assert len(rates) == 0


def test_rates_stay_within_reason_and_leave_with_their_replica() -> None:
    rates = PrefillRates()
    rates.learn(A, 1_000_000, 1e-9)
    rates.learn(B, 1000, 1e9)
    assert rates.rate(A) == pytest.approx(5_000_000)
    assert rates.rate(B) == pytest.approx(50)

    rates.forget_all_but([B])
    assert len(rates) == 1
