"""Histograms: rules T2 to T8 of ``telemetry/metrics/README.md``."""

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
    Quantile,
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
    return Buckets(edges, found)


def test_a_real_engine_has_its_documented_edges():
    """T2"""
    text = (Path(__file__).resolve().parents[2] / "data/vllm/vllm-metrics-0.32.0-after.txt").read_text("utf-8")

    (engine,) = read_replica(text).engines.values()
    assert engine.histograms["ttft"].edges == VLLM_EDGES


def test_cumulative_counts_become_counts_per_bucket():
    buckets = from_cumulative([(0.5, 3), (0.1, 1), (math.inf, 6), (1.0, 3), (5.0, 5)])

    assert buckets == Buckets(EDGES, {0: 1, 1: 2, 3: 2, 4: 1})
    assert buckets.total == 6


def test_decreasing_cumulative_counts_are_raised_first():
    """T7: scrapes of several processes can tear."""
    assert from_cumulative([(0.1, 5), (0.5, 4), (1.0, 7), (math.inf, 7)]).counts == {0: 5, 2: 2}


@pytest.mark.parametrize(
    ("read", "lines"),
    [
        (from_cumulative, []),
        (from_cumulative, [(0.1, 1)]),
        (from_cumulative, [(0.1, 1), (0.1, 2), (math.inf, 2)]),
        (from_cumulative, [(math.inf, math.nan)]),
        (from_sparse, [(0.00102, 1), (math.inf, 1)]),  # not an edge of the router
    ],
)
def test_invalid_histograms_are_rejected(read, lines):
    with pytest.raises(HistogramError):
        read(lines)


def test_a_mixed_fleet_s_median_is_that_of_all_requests():
    """T4: true p50 48 ms, mean of the replicas' p50s 646 ms, for a fleet of hot and cold replicas."""
    generator = random.Random(7)
    hot = [generator.lognormvariate(math.log(0.04), 0.4) for _ in range(900)]
    cold = [generator.lognormvariate(math.log(1.2), 0.4) for _ in range(100)]
    parts = [observed(VLLM_EDGES, hot), observed(VLLM_EDGES, cold)]

    true = sorted(hot + cold)[500]
    assert quantile(merge(parts).buckets, 0.5).value == pytest.approx(true, rel=0.3)
    assert sum(quantile(part, 0.5).value for part in parts) / 2 > 10 * true


@pytest.mark.parametrize(
    ("counted", "q", "expected"),
    [
        pytest.param({1: 10}, 0.5, Quantile(pytest.approx(0.3), 0.1, 0.5), id="inside a bucket (T5)"),
        pytest.param({0: 1, 4: 9}, 0.95, Quantile(5.0, 5.0, math.inf, at_least=True), id="above the last edge (T7)"),
        pytest.param({}, 0.5, None, id="no observations"),
    ],
)
def test_a_quantile_comes_with_its_bucket(counted, q, expected):
    """T5, T7"""
    assert quantile(Buckets(EDGES, counted), q) == expected


def test_the_share_at_an_edge_is_exact_and_elsewhere_unknown():
    """T6"""
    buckets = Buckets(EDGES, {0: 97, 3: 3})

    assert share_at_most(buckets, 0.5) == 0.97
    assert share_at_most(buckets, 0.6) is None


def test_different_edges_merge_on_the_common_ones_and_are_marked():
    """T3: identical edges merge exactly."""
    same = merge([Buckets(EDGES, {0: 1, 4: 2}), Buckets(EDGES, {0: 2})])
    different = merge([Buckets((0.1, 0.5, 1.0), {0: 1, 1: 2, 3: 4}), Buckets((0.3, 1.0), {0: 5, 1: 6, 2: 7})])

    assert (same.buckets, same.exact) == (Buckets(EDGES, {0: 3, 4: 2}), True)
    assert (different.buckets, different.exact) == (Buckets((1.0,), {0: 1 + 2 + 5 + 6, 1: 4 + 7}), False)


def test_the_router_s_buckets_are_sparse_and_give_a_quantile_within_2_and_a_half_percent():
    """T8: edges 0.001 * 1.05**i; only buckets with observations have samples."""
    sparse = from_sparse([(ROUTER_EDGES[3], 2), (ROUTER_EDGES[274], 5), (math.inf, 6)])
    assert (sparse.edges, sparse.counts) == (ROUTER_EDGES, {3: 2, 274: 3, 275: 1})

    generator = random.Random(11)
    values = [generator.lognormvariate(math.log(0.3), 1.0) for _ in range(5000)]
    buckets = observed(ROUTER_EDGES, values)
    for q in (0.5, 0.95, 0.99):
        true = sorted(values)[math.ceil(q * len(values)) - 1]
        assert quantile(buckets, q).value == pytest.approx(true, rel=0.025)


@given(parts=st.lists(counts, min_size=1, max_size=5), added=counts)
def test_merging_adds_in_any_order_and_subtracting_undoes_it(parts, added):
    histograms = [Buckets(EDGES, part) for part in parts]
    merged = merge(histograms).buckets

    assert merged.total == sum(histogram.total for histogram in histograms)
    assert merged.counts == merge(histograms[::-1]).buckets.counts
    assert subtract(merge([merged, Buckets(EDGES, added)]).buckets, merged).counts == added
