from __future__ import annotations

import random

import pytest

from routing.balancing.allocation import MAX_KEYS, Shares


def counted(keys, half_life: float = 1e6) -> Shares:
    shares = Shares(half_life)
    for key in keys:
        shares.count(key)
    return shares


def test_shares_are_of_all_requests_the_largest_first() -> None:
    found = counted([1] * 20 + [2] * 70 + [3] * 10).above(0.15)

    assert [key for key, _ in found] == [2, 1]
    assert [share for _, share in found] == pytest.approx([0.7, 0.2], rel=0.01)


def test_nothing_has_a_share_before_anything_was_counted() -> None:
    assert counted([]).above(0.1) == []


def test_old_traffic_fades() -> None:
    shares = counted([1] * 10_000 + [2] * 100, half_life=100)

    assert dict(shares.above(0.1)) == pytest.approx({1: 0.5, 2: 0.5}, rel=0.02)


def test_shares_hold_however_long_it_goes_on() -> None:
    shares = counted((number % 4 for number in range(50_000)), half_life=20)

    assert [share for _, share in shares.above(0.1)] == pytest.approx([0.25] * 4, rel=0.1)


def test_however_many_keys_there_are_few_are_counted_and_heavy_ones_among_them() -> None:
    rng, shares, most = random.Random(5), Shares(10_000), 0
    for _ in range(50_000):
        shares.count(7 if rng.random() < 0.05 else rng.getrandbits(64))
        most = max(most, len(shares))

    assert most <= 2 * MAX_KEYS + 1
    assert [key for key, _ in shares.above(0.03)] == [7]
