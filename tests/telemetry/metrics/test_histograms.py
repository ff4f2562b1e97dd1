"""Histograms: METRICS rules T2-T8."""

import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.metrics.engine import read_replica
from telemetry.metrics.histograms import (
    ROUTER_EDGES,
    Buckets,
    HistogramError,
    from_cumulative,
    from_sparse,
    merge,
    quantile,
    share_at_most,
    subtract,
)

EDGES = (0.1, 0.5, 1.0, 5.0)
VLLM_EDGES = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip

counts = st.dictionaries(st.integers(0, 4), st.integers(1, 100))


def observed(edges, values):
    """The histogram of some observations."""
    found = {}
    for value in values:
        position = sum(edge < value for edge in edges)
        found[position] = found.get(position, 0) + 1
    return Buckets(edges, found, sum(values))


def test_a_real_engine_s_edges_are_those_it_documents():
    """T2"""
    text = (Path(__file__).resolve().parents[2] / "data/vllm/vllm-metrics-0.32.0-after.txt").read_text("utf-8")

    (engine,) = read_replica(text).engines.values()
    assert engine.histograms["ttft"].edges == VLLM_EDGES


def test_cumulative_lines_become_counts_per_bucket():
    buckets = from_cumulative([(0.5, 3), (0.1, 1), (math.inf, 6), (1.0, 3), (5.0, 5)], 9.0)

    assert buckets == Buckets(EDGES, {0: 1, 1: 2, 3: 2, 4: 1}, 9.0)
    assert buckets.total == 6


def test_counts_that_fall_are_raised_before_anything_is_computed():
    """T7: scrapes of several processes can tear."""
    assert from_cumulative([(0.1, 5), (0.5, 4), (1.0, 7), (math.inf, 7)]).counts == {0: 5, 2: 2}


@pytest.mark.parametrize("lines", [[], [(0.1, 1)], [(0.1, 1), (0.1, 2), (math.inf, 2)], [(math.inf, math.nan)]])
def test_what_is_no_histogram_is_refused(lines):
    with pytest.raises(HistogramError):
        from_cumulative(lines)


def test_a_mixed_fleet_s_median_is_that_of_all_requests():
    """T4: true p50 48 ms, mean of the replicas' p50s 646 ms, for a fleet of hot and cold replicas."""
    generator = random.Random(7)
    hot = [generator.lognormvariate(math.log(0.04), 0.4) for _ in range(900)]
    cold = [generator.lognormvariate(math.log(1.2), 0.4) for _ in range(100)]
    parts = [observed(VLLM_EDGES, hot), observed(VLLM_EDGES, cold)]

    merged = quantile(merge(parts).buckets, 0.5).value
    mean_of_medians = sum(quantile(part, 0.5).value for part in parts) / 2

    true = sorted(hot + cold)[500]
    assert merged == pytest.approx(true, rel=0.3)
    assert mean_of_medians > 10 * true


def test_a_quantile_comes_with_the_bucket_that_holds_it():
    """T5: inside a bucket any answer is a guess."""
    found = quantile(Buckets(EDGES, {1: 10}), 0.5)

    assert (found.value, found.low, found.high, found.at_least) == (pytest.approx(0.3), 0.1, 0.5, False)


def test_above_the_last_edge_a_quantile_is_that_edge_and_says_so():
    """T7"""
    found = quantile(Buckets(EDGES, {0: 1, 4: 9}), 0.95)

    assert (found.value, found.high, found.at_least) == (5.0, math.inf, True)


def test_no_observations_have_no_quantile():
    assert quantile(Buckets(EDGES, {}), 0.5) is None


def test_the_share_at_an_edge_is_exact_and_elsewhere_unknown():
    """T6"""
    buckets = Buckets(EDGES, {0: 97, 3: 3})

    assert share_at_most(buckets, 0.5) == 0.97
    assert share_at_most(buckets, 0.6) is None


def test_identical_edges_merge_exactly():
    merged = merge([Buckets(EDGES, {0: 1, 4: 2}, 3.0), Buckets(EDGES, {0: 2}, 1.0)])

    assert (merged.buckets, merged.exact) == (Buckets(EDGES, {0: 3, 4: 2}, 4.0), True)


def test_different_edges_merge_on_the_common_ones_and_are_marked():
    """T3"""
    merged = merge([Buckets((0.1, 0.5, 1.0), {0: 1, 1: 2, 3: 4}), Buckets((0.3, 1.0), {0: 5, 1: 6, 2: 7})])

    assert merged.buckets == Buckets((1.0,), {0: 1 + 2 + 5 + 6, 1: 4 + 7})
    assert not merged.exact


def test_the_router_s_sparse_lines_find_their_edges():
    """T8: edges 0.001 * 1.05**i; only buckets that hold something are named."""
    buckets = from_sparse([(ROUTER_EDGES[3], 2), (ROUTER_EDGES[274], 5), (math.inf, 6)])

    assert (buckets.edges, buckets.counts) == (ROUTER_EDGES, {3: 2, 274: 3, 275: 1})


def test_an_edge_that_is_not_the_router_s_is_refused():
    with pytest.raises(HistogramError):
        from_sparse([(0.00102, 1), (math.inf, 1)])


def test_the_router_s_buckets_bring_a_quantile_within_2_and_a_half_percent():
    """T8"""
    generator = random.Random(11)
    values = [generator.lognormvariate(math.log(0.3), 1.0) for _ in range(5000)]
    buckets = observed(ROUTER_EDGES, values)

    for q in (0.5, 0.95, 0.99):
        true = sorted(values)[math.ceil(q * len(values)) - 1]
        assert quantile(buckets, q).value == pytest.approx(true, rel=0.025)


@given(parts=st.lists(counts, min_size=1, max_size=5))
def test_merging_adds_and_order_does_not_matter(parts):
    histograms = [Buckets(EDGES, part) for part in parts]

    merged = merge(histograms).buckets

    assert merged.total == sum(histogram.total for histogram in histograms)
    assert merged.counts == merge(histograms[::-1]).buckets.counts


@given(earlier=counts, added=counts)
def test_subtracting_what_was_there_leaves_what_was_added(earlier, added):
    before = Buckets(EDGES, earlier)
    after = merge([before, Buckets(EDGES, added)]).buckets

    assert subtract(after, before).counts == added


@given(part=counts.filter(bool), q=st.floats(0, 1))
def test_a_quantile_lies_in_its_bucket_and_rises_with_q(part, q):
    buckets = Buckets(EDGES, part)
    found = quantile(buckets, q)

    assert found.low <= found.value <= found.high
    assert quantile(buckets, 0).value <= found.value <= quantile(buckets, 1).value
