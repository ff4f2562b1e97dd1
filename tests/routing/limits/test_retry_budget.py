from __future__ import annotations

import random

from routing.limits.budgets import WINDOW_S, RetryBudget


def spend_all(budget: RetryBudget) -> int:
    count = 0
    while budget.spend():
        count += 1
    return count


def test_without_traffic_there_is_the_floor() -> None:
    budget = RetryBudget(0.2, 10)
    assert spend_all(budget) == 10 * WINDOW_S
    assert budget.rejected == 1


def test_traffic_allows_a_fifth_of_it() -> None:
    budget = RetryBudget(0.2, 0)
    budget.tick(100, 0)
    budget.tick(101, 1000)
    assert spend_all(budget) == 200


def test_traffic_and_tries_of_long_ago_count_no_more() -> None:
    budget = RetryBudget(0.2, 1)
    budget.tick(100, 0)
    budget.tick(101, 10_000)
    spend_all(budget)
    for second in range(102, 103 + WINDOW_S):
        budget.tick(second, 10_000)
    assert spend_all(budget) == WINDOW_S


def test_over_any_time_tries_stay_below_ratio_and_floor() -> None:
    chance = random.Random(7)
    budget, requests, tries, now = RetryBudget(0.2, 10), 0, 0, 50.0
    for _ in range(4000):
        now += 0.25
        requests += chance.randrange(200)
        budget.tick(now, requests)
        tries += spend_all(budget)  # everything fails
    assert tries <= 0.2 * requests + 10 * (now - 50.0) + 10 * WINDOW_S
    assert tries >= 0.19 * requests, "and what is allowed can be had"
