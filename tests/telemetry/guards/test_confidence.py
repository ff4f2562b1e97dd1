"""Confidence bounds that hold for repeated analyses."""

from __future__ import annotations

import random
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.guards.confidence import (
    Estimate,
    Part,
    difference_of_ratios,
    max_error,
    ratio_of_sums,
    with_chance_variance,
)

parts = st.lists(
    st.integers(0, 10_000).flatmap(lambda of: st.integers(0, of).map(lambda counted: Part(counted, of))), max_size=30
)


def test_the_truth_stays_within_the_margin_in_19_of_20_runs() -> None:
    lost = 0
    for seed in range(100):
        rng = random.Random(seed)
        bins: list[Part] = []
        for _ in range(100):
            of = rng.randint(20, 100)
            bins.append(Part(sum(rng.random() < 0.3 for _ in range(of)), of))
            estimate = ratio_of_sums(bins)
            assert estimate is not None
            if len(bins) >= 5 and abs(estimate.value - 0.3) > estimate.margin:
                lost += 1
                break
    assert lost <= 5


@given(parts)
def test_a_ratio_is_sum_over_sum_and_never_a_mean_of_rates(bins: list[Part]) -> None:
    estimate = ratio_of_sums(bins)
    total = sum(part.denominator for part in bins)
    if total == 0:
        assert estimate is None
    else:
        assert estimate is not None
        assert estimate.value == pytest.approx(sum(part.numerator for part in bins) / total)
        assert estimate.variance >= 0


@given(parts)
def test_a_share_of_events_is_never_certain(bins: list[Part]) -> None:
    estimate = ratio_of_sums(bins)
    assert estimate is None or with_chance_variance(estimate, bins).variance > 0


def test_common_changes_are_no_difference() -> None:
    rng = random.Random(3)
    moods = [rng.uniform(0.2, 0.8) for _ in range(20)]
    ones, others = [Part(1000 * mood, 1000) for mood in moods], [Part(2000 * mood - 100, 2000) for mood in moods]
    together = difference_of_ratios(ones, others)
    one, other = ratio_of_sums(ones), ratio_of_sums(others)
    assert one is not None
    assert other is not None
    assert together is not None
    assert together.value == pytest.approx((one - other).value) == pytest.approx(0.05)
    assert together.margin < 1e-9 < (one - other).margin


def test_bounds_tighten_with_the_number_of_bins() -> None:
    assert max_error(3) > max_error(10) > max_error(100) > max_error(1000)
    assert Estimate(0.5, 0.01, 2).margin == inf
    assert Estimate(0.5, 0.01, 3).margin < inf
