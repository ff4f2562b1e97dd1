"""Candidates of a capacity sweep, and the curves read back from its result."""

from datetime import UTC, datetime

import pytest

from telemetry.lab.costs import Price
from telemetry.lab.sweeps import Sweep, is_sweep, sweep_candidates, with_curves

PRICE = Price(2.5, 4, "USD")  # 240 a day for each replica


@pytest.mark.parametrize(
    ("replicas", "most", "counts"),
    [(4, 200, [2, 3, 5, 6, 8]), (1, 200, [2, 3, 5]), (2, 200, [1, 3, 4, 6]), (200, 200, [198, 199]), (1, 1, [])],
)
def test_numbers_of_replicas_stay_within_their_limits(replicas, most, counts):
    assert [row["replicas"] for row in sweep_candidates(replicas, None, max_replicas=most)] == counts


def test_caches_are_halved_doubled_and_quadrupled_and_names_differ():
    found = sweep_candidates(4, 1000, max_replicas=200)
    assert [row["cache_tokens"] for row in found if "cache_tokens" in row] == [500, 2000, 4000]
    assert len({row["name"] for row in found}) == len(found) == 8
    assert sweep_candidates(2, None, max_replicas=9)[0]["name"] == "1 replica"


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        (sweep_candidates(4, 1000, max_replicas=200), True),
        (sweep_candidates(1, None, max_replicas=200), True),
        ([{"name": "a", "replicas": 2}, {"name": "b", "replicas": 3}], False),  # two points are no curve
        ([{"name": "a", "replicas": n, "cache_tokens": n} for n in (1, 2, 3)], False),
        ([{"name": "a", "replicas": n, "settings": {"strategy": "random"}} for n in (1, 2, 3)], False),
        ([{"name": "a", "settings": None}] * 3, False),
    ],
)
def test_a_what_if_over_sizes_alone_is_a_sweep(candidates, expected):
    assert is_sweep(candidates) is expected


def interval(low: float, high: float) -> dict[str, float]:
    return {"value": (low + high) / 2, "low": low, "high": high}


def row(replicas: int, cache: int, hit_rate: float, change: dict | None, verdict: str = "unknown") -> dict:
    figures = {"hit_rate": hit_rate, "ttft_p50_s": 0.2, "ttft_p95_s": 0.9, "prefill_gpu_s": 50.0}
    return {
        "name": f"{replicas}/{cache}",
        "replicas": replicas,
        "cache_tokens": replicas * cache,
        "figures": figures,
        "difference": change,
        "verdict": verdict,
        "reason": "",
    }


WORSE = {
    "hit_rate": interval(-0.08, -0.04),
    "ttft_p50": interval(0.1, 0.3),
    "ttft_p95": None,
    "prefill": interval(0.1, 0.2),
}
CANDIDATES = [
    {"name": "5 replicas", "replicas": 5},
    {"name": "3 replicas", "replicas": 3},
    {"name": "cache x 2", "cache_tokens": 2000},
]
RESULT = {
    "candidates": [
        row(4, 1000, 0.5, None),
        {**row(5, 1000, 0.0, None), "figures": None, "reason": "No room."},
        row(3, 1000, 0.44, WORSE, "worse"),
        row(4, 2000, 0.6, WORSE, "worse"),
    ],
    "calibration": {"is_calibrated": True, "problems": []},
    "counted_from": "2026-01-01T00:00:00+00:00",
    "to": "2026-01-01T00:01:40+00:00",
    "counted_requests": 1000,
}


def read_sweep(result=RESULT, price=PRICE) -> Sweep:
    return with_curves(Sweep(1, "done", "", datetime(2026, 1, 1, tzinfo=UTC)), CANDIDATES, result, price)


def test_curves_ascend_and_contain_the_present_size():
    sweep = read_sweep()
    assert [point.replicas for point in sweep.by_replicas] == [3, 4, 5]
    assert [point.is_current for point in sweep.by_replicas] == [False, True, False]
    assert [point.cache_tokens for point in sweep.by_cache] == [1000, 2000]
    assert sweep.by_replicas[0].money_per_day == pytest.approx(720)
    assert sweep.by_replicas[0].prefill_s_per_day == pytest.approx(50 * 864)
    assert sweep.by_replicas[2].prefill_s_per_day is None


def test_sentences_state_money_for_one_replica_fewer_and_the_reason_of_a_failed_candidate():
    texts = read_sweep().summaries
    assert texts == [
        "One replica fewer: hit rate -8 to -4 points, TTFT p50 +10 to +30 % (worse). It would save 240.00 USD a day.",
        "One replica more: No room.",
    ]
    unpriced = read_sweep(price=None)
    assert "save" not in unpriced.summaries[0]
    assert unpriced.current.money_per_day is None


def test_a_size_that_overloads_replicas_is_no_saving():
    active, more, _, cache = RESULT["candidates"]
    result = {**RESULT, "candidates": [active, more, row(3, 1000, 0.6, WORSE, "overload"), cache]}
    fewer, _ = read_sweep(result).summaries
    assert fewer.endswith("TTFT p50 +10 to +30 % (overload: queues grow until the end).")
