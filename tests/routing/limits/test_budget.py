"""A budget lets no more through than its rate, however it is asked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.limits.budgets import Budget

steps = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 50)), max_size=100)


@given(steps, st.floats(0.1, 10), st.integers(1, 20))
def test_what_is_let_through_is_at_most_a_burst_and_the_rate(
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
def test_whoever_waits_as_told_is_let_through(steps: list[tuple[float, float]], per_s: float, burst: int) -> None:
    budget, now = Budget(per_s, burst, 0.0), 0.0
    for pause, amount in steps:
        now += pause
        budget.spend(amount, now)
        assert budget.wait_s(now + budget.wait_s(now)) == pytest.approx(0.0, abs=1e-6)


def test_an_overdrawn_budget_refills_to_its_capacity_and_no_further() -> None:
    budget = Budget(2.0, 10, 0.0)
    budget.spend(15, 0.0)

    assert (budget.available(0.0), budget.wait_s(0.0), budget.full_in_s(0.0)) == (0, 3.0, 7.5)
    assert (budget.available(3.0), budget.wait_s(3.0)) == (1, 0.0)
    assert budget.available(1e9) == 10


def test_a_new_rate_is_no_new_allowance() -> None:
    for capacity, left in ((100, 3), (2, 2)):
        budget = Budget(1.0, 10, 0.0)
        budget.spend(8, 0.0)
        budget.configure(1.0, capacity, 0.0)
        assert budget.available(1.0) == left


def test_a_new_rate_holds_from_now_on() -> None:
    budget = Budget(1.0, 10, 0.0)
    budget.spend(10, 0.0)
    budget.configure(100.0, 100, 5.0)

    assert (budget.available(5.0), budget.available(5.5)) == (5, 55)
