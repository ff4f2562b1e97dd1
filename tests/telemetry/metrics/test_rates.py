"""Increases of counters and hit rates: rules H1 to H3 and H7 to H12, golden vectors, and properties of any history."""

from dataclasses import replace

import pytest

from telemetry.metrics.counters import RawCounters, ReadingState, increase
from telemetry.metrics.histograms import Buckets
from telemetry.metrics.rates import hit_rate_ratio, ratio
from telemetry.metrics.windows import cacheable_tokens


def scrape(due_s, queries, hits, **more):
    return RawCounters(due_s, due_s + 0.1, {"queries": queries, "hits": hits}, **more)


def increases(scrapes):
    """The increase of each scrape since the previous one; late and duplicate ones have none."""
    previous, found = None, []
    for current in scrapes:
        added = increase(previous, current, interval_s=10)
        if added is not None:
            found.append(added)
            previous = current
    return found


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
    """H1: restart 52.0 %, hidden reset 43.57 %, bad hour 5.0 %, idle undefined."""
    known = [added.counters for added in increases(scrape(10 * n, *sample) for n, sample in enumerate(samples))][1:]

    total = hit_rate_ratio(sum(counts["queries"] for counts in known), sum(counts["hits"] for counts in known))
    assert total == (None if rate is None else pytest.approx(rate, abs=5e-5))


def test_rates_are_sums_over_sums_and_external_queries_are_not_added():
    """H2: true 65.0 %, mean of replicas 57.5 %. H3: total reuse adds external hits."""
    assert hit_rate_ratio(8000 + 2000, 5600 + 900) == pytest.approx(0.65)
    assert hit_rate_ratio(1000, 400, 300) == pytest.approx(0.7)


@pytest.mark.parametrize(("part", "whole"), [(None, 10), (1, None), (0, 0), (1, 0)])
def test_a_rate_without_queries_is_undefined(part, whole):
    """H11"""
    assert ratio(part, whole) is None


def test_the_first_scrape_has_no_increase():
    (first,) = increases([scrape(0, 1000, 100)])

    assert (first.state, first.interval_s, first.counters) == (ReadingState.FIRST, None, {})


def test_one_decreased_counter_resets_all_counters():
    """H8: per-series handling would have counted 900 - 20 hits and 900 queries."""
    *_, last = increases([scrape(0, 1000, 10), scrape(10, 1500, 20), scrape(20, 900, 600)])

    assert (last.state, last.counters) == (ReadingState.RESET, {"queries": 900, "hits": 600})


@pytest.mark.parametrize(
    ("before", "after", "is_reset"),
    [
        pytest.param({"started_s": 1000.0}, {"started_s": 1500.0}, True, id="another start time"),
        pytest.param({"created_s": 1000.0}, {"created_s": 1500.0}, True, id="another creation time"),
        pytest.param({"boot": "a"}, {"boot": "b"}, True, id="another boot"),
        pytest.param({"started_s": 1000.0}, {"started_s": 1000.6}, False, id="a start time that wobbles"),
        pytest.param({"started_s": 1000.0}, {}, False, id="several API servers"),
        pytest.param({"histograms": {"ttft": Buckets((0.1, 1.0), {0: 5})}},
                     {"histograms": {"ttft": Buckets((0.2, 1.0), {0: 6})}}, True, id="other edges (T3)"),
    ],
)  # fmt: skip
def test_a_restart_shows_in_start_times_boot_and_edges(before, after, is_reset):
    """H9"""
    added = increase(scrape(0, 100, 50, **before), scrape(10, 5000, 60, **after), interval_s=10)

    assert (added.state is ReadingState.RESET) is is_reset
    assert added.counters["queries"] == (5000 if is_reset else 4900)


@pytest.mark.parametrize(
    ("after", "covered_s"),
    [
        pytest.param({"started_s": 3000.0}, 600.1, id="after an outage"),
        pytest.param({"started_s": 3000.0, "created_s": 3500.0}, 100.1, id="counters were created later"),
        pytest.param({"boot": "b"}, 3600, id="unknown start time"),
        pytest.param({"started_s": 4000.0}, 3600, id="a clock ahead"),
        pytest.param({"started_s": -5000.0}, 3600, id="a clock behind"),
    ],
)
def test_counters_cover_the_time_since_a_restart(after, covered_s):
    added = increase(scrape(0, 9000, 50, started_s=-9000.0, boot="a"), scrape(3600, 100, 60, **after), interval_s=10)

    assert (added.state, added.interval_s) == (ReadingState.RESET, pytest.approx(covered_s))


def test_a_gap_keeps_the_total_and_its_length():
    """H10"""
    *_, last = increases([scrape(0, 1000, 100), scrape(60, 1600, 400)])

    assert (last.state, last.interval_s) == (ReadingState.GAP, pytest.approx(60))
    assert last.counters == {"queries": 600, "hits": 300}


def test_a_new_counter_is_unknown_once_unless_absence_means_zero():
    before = scrape(0, 100, 50)
    now = replace(scrape(10, 200, 60), counters={"queries": 200, "hits": 60, "external_hits": 7})

    assert "external_hits" not in increase(before, now, interval_s=10).counters
    assert increase(before, now, interval_s=10, absent_is_zero=True).counters["external_hits"] == 7


def test_late_and_duplicate_scrapes_have_no_increase_and_a_clock_set_back_starts_anew():
    before = scrape(10, 200, 60)

    assert increase(before, scrape(10, 300, 70), interval_s=10) is None
    assert increase(before, scrape(0, 100, 50), interval_s=10) is None
    assert increase(scrape(3610, 200, 60), before, interval_s=10).state is ReadingState.FIRST


@pytest.mark.parametrize(("tokens", "percent"), [(17, 94.1), (32, 50.0), (33, 97.0), (100, 96.0), (1000, 99.2)])
def test_the_block_rounding_limit_of_one_prompt(tokens, percent):
    """H7, at block 16"""
    assert round(100 * cacheable_tokens(tokens, 16) / tokens, 1) == percent
