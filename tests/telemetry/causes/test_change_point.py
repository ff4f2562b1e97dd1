"""The change point: the time at which a rate fell."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

import pytest

from telemetry.causes.evidence import Bin, find_change_point

T0 = datetime(2031, 3, 4, 12, tzinfo=UTC)


def series(*levels: tuple[int, float], seed: int = 1, unrest: float = 0.03) -> list[Bin]:
    """Bins of a minute, so many of each level."""
    rng = random.Random(seed)
    rates = [rate + rng.gauss(0, unrest) for count, rate in levels for _ in range(count)]
    return [Bin(T0 + timedelta(minutes=n), 1000.0, 1000 * rate) for n, rate in enumerate(rates)]


@pytest.mark.parametrize("seed", range(10))
def test_the_change_point_is_found(seed: int) -> None:
    found = find_change_point(series((40, 0.8), (12, 0.5), seed=seed))

    assert found is not None
    assert abs(found - (T0 + timedelta(minutes=40))) <= timedelta(minutes=1)


def test_a_rise_a_constant_rate_and_no_traffic_have_no_change_point() -> None:
    assert find_change_point(series((20, 0.5), (20, 0.8))) is None
    assert find_change_point(series((40, 0.7), unrest=0.001)) is None
    assert find_change_point([]) is None
    assert find_change_point([Bin(T0 + timedelta(minutes=n), 0.0, 0.0) for n in range(20)]) is None


def test_bins_are_weighted_by_their_tokens() -> None:
    odd = [Bin(T0 + timedelta(minutes=n), 1.0, 0.0) for n in (-2, -1)]  # before all others
    found = find_change_point([*odd, *series((30, 0.8), (30, 0.6))])

    assert found == T0 + timedelta(minutes=30)
