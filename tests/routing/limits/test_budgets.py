"""Token buckets and the retry budget never allow more than their rates."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.limits.budgets import WINDOW_S, Budget, RetryBudget

steps = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 50)), max_size=100)


@given(steps, st.floats(0.1, 10), st.integers(1, 20))
def test_a_budget_allows_at_most_the_burst_and_the_rate(
    steps: list[tuple[float, float]], per_s: float, burst: int
) -> None:
    budget, now, spent, dearest = Budget(per_s, burst, 0.0), 0.0, 0.0, 0.0
    for pause, amount in steps:
        now += pause
        if not budget.wait_s(now):
            budget.spend(amount, now)
            spent += amount
            dearest = max(dearest, amount)

    assert spent <= burst + now * per_s + dearest + 1e-6


@given(steps, st.floats(0.1, 10), st.integers(1, 20))
def test_units_are_available_after_the_reported_wait(
    steps: list[tuple[float, float]], per_s: float, burst: int
) -> None:
    budget, now = Budget(per_s, burst, 0.0), 0.0
    for pause, amount in steps:
        now += pause
        budget.spend(amount, now)
        assert budget.wait_s(now + budget.wait_s(now)) == pytest.approx(0.0, abs=1e-6)


def test_an_overdrawn_budget_refills_to_its_capacity() -> None:
    budget = Budget(2.0, 10, 0.0)
    budget.spend(15, 0.0)

    assert (budget.available(0.0), budget.wait_s(0.0), budget.full_in_s(0.0)) == (0, 3.0, 7.5)
    assert (budget.available(3.0), budget.wait_s(3.0)) == (1, 0.0)
    assert budget.available(1e9) == 10


def test_a_new_rate_adds_no_units() -> None:
    for capacity, left in ((100, 3), (2, 2)):
        budget = Budget(1.0, 10, 0.0)
        budget.spend(8, 0.0)
        budget.configure(1.0, capacity, 0.0)
        assert budget.available(1.0) == left


def test_a_new_rate_applies_from_now_on() -> None:
    budget = Budget(1.0, 10, 0.0)
    budget.spend(10, 0.0)
    budget.configure(100.0, 100, 5.0)

    assert (budget.available(5.0), budget.available(5.5)) == (5, 55)


def spend_all(budget: RetryBudget) -> int:
    count = 0
    while budget.spend():
        count += 1
    return count


def test_the_floor_applies_without_traffic() -> None:
    budget = RetryBudget(0.2, 10)
    assert spend_all(budget) == 10 * WINDOW_S
    assert budget.rejected == 1


def test_traffic_allows_a_share_of_retries() -> None:
    budget = RetryBudget(0.2, 0)
    budget.tick(100, 0)
    budget.tick(101, 1000)
    assert spend_all(budget) == 200


def test_old_traffic_and_retries_do_not_count() -> None:
    budget = RetryBudget(0.2, 1)
    budget.tick(100, 0)
    budget.tick(101, 10_000)
    spend_all(budget)
    for second in range(102, 103 + WINDOW_S):
        budget.tick(second, 10_000)
    assert spend_all(budget) == WINDOW_S


def test_retries_stay_below_ratio_and_floor() -> None:
    chance = random.Random(7)
    budget, requests, tries, now = RetryBudget(0.2, 10), 0, 0, 50.0
    for _ in range(4000):
        now += 0.25
        requests += chance.randrange(200)
        budget.tick(now, requests)
        tries += spend_all(budget)  # every request fails
    assert tries <= 0.2 * requests + 10 * (now - 50.0) + 10 * WINDOW_S
    assert tries >= 0.19 * requests, "the budget allows almost all permitted retries"
