"""Shards of a fleet: which targets they have, and when each is due."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.scraping.cycle import MAX_SHARDS, Shard, missed_cycles, shards_for
from tests.telemetry.scraping.cycles import WHOLE

intervals = st.integers(1, 300)
shards = st.integers(1, MAX_SHARDS).flatmap(lambda of: st.builds(Shard, st.integers(0, of - 1), st.just(of)))


@pytest.mark.parametrize(
    ("now_s", "last_due_s", "due_s", "missed"),
    [
        pytest.param(100.0, None, 100.0, 0, id="the first cycle"),
        pytest.param(107.3, 100.0, 105.0, 0, id="in its interval"),
        pytest.param(104.9, 100.0, 105.0, 0, id="a little early"),
        pytest.param(102.5, 100.0, None, 0, id="a second message"),
        pytest.param(104.9, 105.0, None, 0, id="an early one twice"),
        pytest.param(105.1, 105.0, None, 0, id="after an early one"),
        pytest.param(300.0, 100.0, 300.0, 39, id="after a pause"),
        pytest.param(100.0, 3700.0, 100.0, 0, id="the clock was set back"),
    ],
)
def test_the_due_time_of_a_cycle(now_s, last_due_s, due_s, missed):
    assert WHOLE.due_s(now_s, 5.0, last_due_s) == due_s
    assert missed_cycles(last_due_s, due_s or now_s, 5.0) == missed


def test_cycles_that_start_a_little_early_or_late_miss_no_due_time():
    due_times = [None]
    for number in range(50):
        due_times.append(WHOLE.due_s(1000.0 + 5 * number + (0.02 if number % 2 else -0.02), 5.0, due_times[-1]))

    assert [after - before for before, after in pairwise(due_times[2:])] == [5.0] * 48


def test_a_fleet_of_a_thousand_has_even_shards_at_even_distances():
    of_fleet = shards_for(1000)
    names = [f"replica {number}" for number in range(1000)]

    sizes = Counter(shard.number for name in names for shard in of_fleet if shard.holds(name))
    due_times = sorted(shard.due_s(1000.0, 10.0, None) for shard in of_fleet)

    assert sizes.total() == 1000  # each target in exactly one shard
    assert len(sizes) == len(of_fleet)
    assert max(sizes.values()) < 1.3 * 1000 / len(of_fleet)
    assert [round(after - before, 6) for before, after in pairwise(due_times)] == [1.25] * 7
    assert [len(shards_for(targets)) for targets in (0, 1, 128, 129, 10**6)] == [1, 1, 1, 2, MAX_SHARDS]


@given(shard=shards, interval_s=intervals, late=st.lists(st.floats(0, 0.49), min_size=20, max_size=20))
def test_beat_that_is_late_by_half_an_interval_schedules_every_cycle(shard, interval_s, late):
    scheduled = {
        round(due_s, 6)
        for number, share in enumerate(late)
        for due_s in shard.upcoming_s(1e9 + (number + share) * interval_s, interval_s)
    }

    assert {round(after - before, 3) for before, after in pairwise(sorted(scheduled))} == {interval_s}
    assert len(scheduled) >= 19


@given(shard=shards, interval_s=intervals, now_s=st.floats(1e9, 2e9))
def test_a_cycle_takes_its_scheduled_due_time_once(shard, interval_s, now_s):
    (due_s, *_) = shard.upcoming_s(now_s, interval_s)

    assert shard.due_s(due_s, interval_s, None) == pytest.approx(due_s, abs=1e-6)
    assert shard.due_s(due_s + 0.1 * interval_s, interval_s, due_s) is None
