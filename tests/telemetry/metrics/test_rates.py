"""Marks into readings: METRICS rules H1-H3 and H8-H12, the golden vectors and what must hold for any of them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.metrics.counters import RawCounters, ReadingState, increase
from telemetry.metrics.histograms import Buckets
from telemetry.metrics.rates import hit_rate_ratio, ratio
from telemetry.metrics.windows import cacheable_tokens

EDGES = (0.1, 1.0)


def mark(at_s, queries, hits, **more):
    return RawCounters(at_s, at_s + 0.1, {"queries": queries, "hits": hits}, **more)


def additions(marks, **options):
    """The reading of each mark after the one before."""
    before, readings = None, []
    for now in marks:
        addition = increase(before, now, interval_s=10, **options)
        if addition is not None:
            readings.append(addition)
            before = now
    return readings


def windowed(samples):
    """(queries, hits) every 10 s -> the hit rate of the window."""
    readings = additions([mark(10 * number, *sample) for number, sample in enumerate(samples)])
    known = [reading.counters for reading in readings if reading.counters]
    queries = sum(counters["queries"] for counters in known)
    hits = sum(counters["hits"] for counters in known)
    return hit_rate_ratio(queries, hits)


@pytest.mark.parametrize(
    ("samples", "rate"),
    [
        pytest.param([(100_000, 90_000), (101_000, 90_800), (500, 100), (1500, 500)], 0.52, id="restart"),
        pytest.param([(1000, 10), (1500, 20), (900, 600)], 0.4357, id="reset hidden in hits"),
        pytest.param([(1_000_000, 900_000), (1_010_000, 900_500)], 0.05, id="long-lived server, bad hour"),
        pytest.param([(5, 2), (5, 2), (5, 2)], None, id="idle"),
    ],
)
def test_the_golden_vectors(samples, rate):
    """H1, METRICS section 1.2: restart 52.0 %, hidden reset 43.57 %, bad hour 5.0 %, idle undefined."""
    assert windowed(samples) == (None if rate is None else pytest.approx(rate, abs=5e-5))


def test_a_fleet_is_a_sum_over_a_sum():
    """H2: true 65.0 %, mean of replicas 57.5 %."""
    assert hit_rate_ratio(8000 + 2000, 5600 + 900) == pytest.approx(0.65)


def test_total_reuse_adds_external_hits_and_never_external_queries():
    """H3"""
    assert hit_rate_ratio(1000, 400, 300) == pytest.approx(0.7)


@pytest.mark.parametrize(("part", "whole"), [(None, 10), (1, None), (0, 0), (1, 0)])
def test_a_rate_of_nothing_is_undefined(part, whole):
    """H11"""
    assert ratio(part, whole) is None


def test_the_first_mark_has_nothing_to_compare_with():
    (first,) = additions([mark(0, 1000, 100)])

    assert (first.state, first.interval_s, first.counters) == (ReadingState.FIRST, None, {})


def test_one_fallen_counter_starts_a_new_epoch_for_all():
    """H8: per-series handling would have taken 900 - 20 hits beside 900 queries."""
    *_, last = additions([mark(0, 1000, 10), mark(10, 1500, 20), mark(20, 900, 600)])

    assert (last.state, last.counters) == (ReadingState.RESET, {"queries": 900, "hits": 600})


@pytest.mark.parametrize("clue", ["started_s", "created_s"])
def test_a_restart_that_no_counter_shows_is_seen_by_the_process_s_own_times(clue):
    """H9"""
    before = replace(mark(0, 100, 50), **{clue: 1000.0})
    now = replace(mark(10, 5000, 60), **{clue: 1500.0})

    reading = increase(before, now, interval_s=10)

    assert (reading.state, reading.counters["queries"]) == (ReadingState.RESET, 5000)


def test_times_that_are_absent_or_wobble_are_no_restart():
    """H9: absent behind several API servers."""
    before, now = mark(0, 100, 50, started_s=1000.0), mark(10, 200, 60)

    assert increase(before, now, interval_s=10).state is ReadingState.OK
    assert increase(before, replace(now, started_s=1000.6), interval_s=10).state is ReadingState.OK


def test_a_gap_keeps_the_total_and_shows_its_length():
    """H10"""
    *_, last = additions([mark(0, 1000, 100), mark(60, 1600, 400)])

    assert (last.state, last.interval_s) == (ReadingState.GAP, pytest.approx(60))
    assert last.counters == {"queries": 600, "hits": 300}


def test_a_counter_that_appears_is_unknown_once_unless_absence_means_zero():
    before = mark(0, 100, 50)
    now = replace(mark(10, 200, 60), counters={"queries": 200, "hits": 60, "external_hits": 7})

    assert "external_hits" not in increase(before, now, interval_s=10).counters
    assert increase(before, now, interval_s=10, absent_is_zero=True).counters["external_hits"] == 7


def test_a_late_and_a_duplicated_mark_make_no_reading():
    before = mark(10, 200, 60)

    assert increase(before, mark(10, 300, 70), interval_s=10) is None
    assert increase(before, mark(0, 100, 50), interval_s=10) is None


def test_a_clock_set_back_by_an_hour_starts_anew_rather_than_stopping():
    """R17"""
    assert increase(mark(3610, 200, 60), mark(10, 300, 70), interval_s=10).state is ReadingState.FIRST


def test_edges_that_changed_are_a_restart():
    """T3: they are chosen when the process starts."""
    before = mark(0, 100, 50, histograms={"ttft": Buckets(EDGES, {0: 5})})
    now = mark(10, 150, 60, histograms={"ttft": Buckets((0.2, 1.0), {0: 6})})

    assert increase(before, now, interval_s=10).state is ReadingState.RESET


@pytest.mark.parametrize(("tokens", "percent"), [(17, 94.1), (32, 50.0), (33, 97.0), (100, 96.0), (1000, 99.2)])
def test_the_ceiling_of_one_prompt(tokens, percent):
    """H7, at block 16"""
    assert round(100 * cacheable_tokens(tokens, 16) / tokens, 1) == percent


# --- what holds for every history ---

# what happens between two ticks: requests (queries, hits), a restart, a failed scrape, a scrape delivered twice or late
happenings = st.lists(
    st.one_of(
        st.tuples(st.just("traffic"), st.integers(0, 50), st.integers(0, 50)),
        st.tuples(st.just("restart"), st.integers(0, 50), st.integers(0, 50)),
        st.tuples(st.just("gap"), st.integers(0, 50), st.integers(0, 50)),
        st.tuples(st.just("twice"), st.integers(0, 50), st.integers(0, 50)),
        st.tuples(st.just("late"), st.integers(0, 50), st.integers(0, 50)),
    ),
    max_size=30,
)


def history(happenings, *, tells_start):
    """The marks that arrive, in order, and the (queries, hits) that are lost: between a mark and a restart."""
    queries = hits = 0
    started = 1000.0
    marks = [mark(0, 0, 0, started_s=started if tells_start else None)]
    unseen, lost, late = [0, 0], [0, 0], None
    for number, (what, asked, at_most) in enumerate(happenings, start=1):
        found = min(asked, at_most)
        if what == "restart":
            lost = [lost[0] + unseen[0], lost[1] + unseen[1]]
            queries = hits = 0
            unseen, started = [0, 0], started + 100
        queries, hits = queries + asked, hits + found
        unseen = [unseen[0] + asked, unseen[1] + found]
        now = mark(10 * number, queries, hits, started_s=started if tells_start else None)
        if what == "gap":
            continue
        if what == "late" and late is not None:
            marks.append(late)
        marks.append(now)
        if what == "twice":
            marks.append(now)
        unseen, late = [0, 0], now
    return marks, lost, unseen


@given(happenings=happenings)
def test_totals_are_exact_but_for_what_a_restart_took_with_it(happenings):
    """H8, H9, H10, R19: gaps, duplicates and late scrapes cost nothing."""
    marks, lost, unseen = history(happenings, tells_start=True)
    readings = additions(marks)

    for name, position in (("queries", 0), ("hits", 1)):
        asked = sum(min(what[1], what[2]) if position else what[1] for what in happenings)
        counted = sum(reading.counters.get(name, 0) for reading in readings)
        assert counted == asked - lost[position] - unseen[position]


@given(happenings=happenings)
def test_without_start_times_nothing_is_negative_nor_more_than_there_was(happenings):
    """H8: a restart may hide, but never as a negative or a surplus; and hits never exceed queries in a new epoch."""
    marks, _, _ = history(happenings, tells_start=False)

    for reading in additions(marks):
        assert all(value >= 0 for value in reading.counters.values())
    total = sum(reading.counters.get("queries", 0) for reading in additions(marks))
    assert total <= sum(what[1] for what in happenings)


@given(happenings=happenings)
def test_intervals_side_by_side_cover_the_time_between_the_first_and_last_mark(happenings):
    marks, _, _ = history(happenings, tells_start=True)
    readings = additions(marks)

    covered = sum(reading.interval_s or 0 for reading in readings)
    assert covered == pytest.approx(max(each.due_s for each in marks))
