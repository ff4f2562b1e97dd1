"""A decline over hours, each compared with the same hour of the days before."""

from __future__ import annotations

import math
import random
from datetime import timedelta

from telemetry.alerts.detection.level import DAY, HOUR, Hour, find_decline
from tests.telemetry.conftest import T0


def hours(days: int, fallen: int, by: float, seed: int = 1) -> dict:
    """A daily cycle of 60 to 80 %, of which the newest hours lie lower, each a little more than the one before."""
    rng, found = random.Random(seed), {}
    last = T0.replace(minute=0) - HOUR
    for back in range(days * 24):
        at = last - HOUR * back
        usual = 0.7 + 0.1 * math.cos(at.hour / 24 * 2 * math.pi) + rng.gauss(0, 0.01)
        lower = by * (fallen - back) / fallen if back < fallen else 0.0
        found[at] = Hour(usual - lower, 1e6, 1000)
    return found


def decline(known: dict, days: int = 7):
    return find_decline(known, T0, drop=0.1, days=days, quiet_days=70)


def test_a_decline_of_a_point_or_two_an_hour_is_found() -> None:
    found = decline(hours(8, 12, 0.2))

    assert found is not None
    assert 0.08 < found.level - found.ratio < 0.2
    assert T0 - timedelta(hours=12) <= found.change_point


def test_a_daily_cycle_is_no_decline() -> None:
    assert [decline(hours(8, 1, 0.0, seed)) for seed in range(20)] == [None] * 20


def test_two_days_of_history_are_too_few() -> None:
    known = {at: hour for at, hour in hours(8, 12, 0.2).items() if at > T0 - 2 * DAY}

    assert decline(known) is None
    assert decline({}) is None
