"""A fleet cut into shards: who belongs where, and when each is due."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.scraping.cycle import MAX_SHARDS, Shard, missed_cycles, shards_for

WHOLE = Shard(0, 1)
intervals = st.integers(1, 300)
ofs = st.integers(1, MAX_SHARDS)


@pytest.mark.parametrize(
    ("now_s", "taken_s", "due_s"),
    [
        pytest.param(100.0, None, 100.0, id="the first tick"),
        pytest.param(107.3, 100.0, 105.0, id="in its interval"),
        pytest.param(104.9, 100.0, 105.0, id="a little early"),
        pytest.param(102.5, 100.0, None, id="a second beat"),
        pytest.param(104.9, 105.0, None, id="the early one came twice"),
        pytest.param(105.1, 105.0, None, id="after an early one"),
        pytest.param(300.0, 100.0, 300.0, id="after a pause"),
        pytest.param(100.0, 3700.0, 100.0, id="the clock was set back"),
    ],
)
def test_every_tick_finds_its_place_on_the_grid(now_s, taken_s, due_s):
    """R17"""
    assert WHOLE.due_s(now_s, 5.0, taken_s) == due_s


def test_ticks_that_wobble_around_the_grid_miss_no_place():
    taken_s, places = None, []
    for number in range(50):
        due_s = WHOLE.due_s(1000.0 + 5 * number + (0.02 if number % 2 else -0.02), 5.0, taken_s)
        places.append(due_s)
        taken_s = due_s

    assert [after - before for before, after in pairwise(places[1:])] == [5.0] * 48


def test_a_fleet_of_a_thousand_is_cut_into_even_shards():
    shards = shards_for(1000)
    names = [f"replica {number}" for number in range(1000)]

    sizes = Counter(shard.number for name in names for shard in shards if shard.holds(name))

    assert sizes.total() == 1000  # each in one shard and no more
    assert (len(sizes), max(sizes.values()) < 1.3 * 1000 / len(shards)) == (len(shards), True)
    assert [len(shards_for(targets)) for targets in (0, 1, 128, 129, 10**6)] == [1, 1, 1, 2, MAX_SHARDS]


def test_shards_are_due_at_even_distances():
    dues = sorted(shard.due_s(1000.0, 10.0, None) for shard in shards_for(1000))

    assert [round(after - before, 6) for before, after in pairwise(dues)] == [1.25] * 7


@given(of=ofs, interval_s=intervals, late=st.lists(st.floats(0, 0.49), min_size=20, max_size=20), data=st.data())
def test_a_beat_that_comes_late_by_half_an_interval_leaves_no_place_out(of, interval_s, late, data):
    shard = Shard(data.draw(st.integers(0, of - 1)), of)
    told = {
        round(due_s, 6)
        for number, share in enumerate(late)
        for due_s in shard.upcoming_s(1e9 + (number + share) * interval_s, interval_s)
    }

    assert {round(after - before, 3) for before, after in pairwise(sorted(told))} == {interval_s}
    assert len(told) >= 19


@given(of=ofs, interval_s=intervals, now_s=st.floats(1e9, 2e9), data=st.data())
def test_a_shard_takes_the_place_that_it_was_told_of_and_takes_it_once(of, interval_s, now_s, data):
    shard = Shard(data.draw(st.integers(0, of - 1)), of)
    (due_s, *_) = shard.upcoming_s(now_s, interval_s)

    assert shard.due_s(due_s, interval_s, None) == pytest.approx(due_s, abs=1e-6)
    assert shard.due_s(due_s + 0.1 * interval_s, interval_s, due_s) is None


@pytest.mark.parametrize(
    ("last_s", "due_s", "missed"), [(None, 100.0, 0), (95.0, 100.0, 0), (80.0, 100.0, 3), (3700.0, 100.0, 0)]
)
def test_ticks_that_never_were_are_counted(last_s, due_s, missed):
    assert missed_cycles(last_s, due_s, 5.0) == missed
