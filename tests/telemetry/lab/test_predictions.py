"""Figures, paired differences, verdicts and calibration of replayed scenarios."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from telemetry.lab.chains import coded
from telemetry.lab.predictions import (
    Difference,
    Interval,
    Outcome,
    Verdict,
    calibrate,
    corrected,
    describe,
    difference,
    figures,
    figures_by_group,
    timeline,
    verdict,
)


def outcome(hit: float, ttft_s: float, *, count: int = 2000, seed: int = 1, skew: float = 0.5) -> Outcome:
    """Ten minutes of requests at this mean hit rate and median TTFT; a share ``skew`` goes to the first engine."""
    rng = np.random.default_rng(seed)
    traffic = np.random.default_rng(7)
    prompt_tokens = traffic.integers(500, 4000, count)
    noise = traffic.normal(0, 0.1, count)
    cached = np.clip(hit + noise, 0, 1) * prompt_tokens
    return Outcome(
        np.linspace(0, 600, count),
        prompt_tokens,
        cached,
        ttft_s * np.exp(traffic.normal(0, 0.5, count)),
        (prompt_tokens - cached) / 8000,
        (rng.random(count) > skew).astype(np.int64),
        2,
        coded(["a" if number % 3 else "b" for number in range(count)]),
    )


def test_figures_are_sums_over_sums_and_quantiles_of_all_requests() -> None:
    found = figures(outcome(0.5, 0.2))

    assert found.requests == 2000
    assert found.hit_rate == pytest.approx(0.5, abs=0.02)
    assert found.ttft_p50_s == pytest.approx(0.2, rel=0.05)
    assert found.ttft_p95_s is not None
    assert found.ttft_p99_s is not None
    assert found.ttft_p50_s < found.ttft_p95_s < found.ttft_p99_s
    assert found.load_max_over_mean == pytest.approx(1.0, abs=0.1)


def test_figures_of_groups_add_up_to_all_requests_with_the_largest_first() -> None:
    groups = figures_by_group(outcome(0.5, 0.2))
    assert list(groups) == ["a", "b"]
    assert sum(group.requests for group in groups.values()) == 2000


def test_unknown_figures_are_none_and_never_0() -> None:
    known = outcome(0.5, 0.2, count=10)
    unknown = Outcome(
        known.at_s, known.prompt_tokens, known.cached_tokens * np.nan, known.ttft_s * np.nan, known.prefill_s * np.nan,
        known.engines, 2, known.groups,
    )  # fmt: skip
    found = figures(unknown)
    assert (found.hit_rate, found.ttft_p50_s, found.prefill_gpu_s) == (None, None, None)


def test_a_better_candidate_has_an_interval_above_0_that_contains_the_difference() -> None:
    change = difference(outcome(0.8, 0.1), outcome(0.5, 0.2), sampling_error=0.0)

    assert change.hit_rate is not None
    assert change.ttft_p50 is not None
    assert change.hit_rate.low < change.hit_rate.value < change.hit_rate.high
    assert change.hit_rate.value == pytest.approx(0.3, abs=0.01)
    assert change.ttft_p50.value == pytest.approx(-0.5, abs=0.03)
    assert verdict(change) is Verdict.BETTER
    assert verdict(change, overloaded_replicas=1) is Verdict.OVERLOAD
    assert verdict(difference(outcome(0.5, 0.2), outcome(0.8, 0.1), sampling_error=0.0)) is Verdict.WORSE


def test_the_error_of_block_sampling_widens_the_interval_of_the_hit_rate() -> None:
    exact = difference(outcome(0.55, 0.2), outcome(0.5, 0.2), sampling_error=0.0).hit_rate
    sampled = difference(outcome(0.55, 0.2), outcome(0.5, 0.2), sampling_error=0.04).hit_rate
    assert exact is not None
    assert sampled is not None
    assert exact.sign == 1
    assert sampled.sign == 0
    assert sampled.low == pytest.approx(exact.low - 1.96 * 0.04)


def test_without_a_difference_there_is_no_verdict() -> None:
    assert verdict(None) is Verdict.UNKNOWN
    empty = outcome(0.5, 0.2, count=1)
    assert difference(empty, empty, sampling_error=0.0) == Difference(None, None, None, None)


@pytest.mark.parametrize(
    ("replayed", "problem"),
    [
        (outcome(0.52, 0.22), None),
        (outcome(0.55, 0.2), "hit rate"),
        (outcome(0.5, 0.27), "TTFT p50"),
        (outcome(0.5, 0.2, count=1000), None),
    ],
)
def test_a_replay_is_calibrated_within_3_points_and_20_percent(replayed: Outcome, problem: str | None) -> None:
    found = calibrate(outcome(0.5, 0.2), replayed)
    assert found.is_calibrated is (problem is None)
    assert problem is None or problem in found.problems[0]


def test_too_few_requests_or_unknown_figures_are_not_calibrated() -> None:
    few = outcome(0.5, 0.2, count=50)
    assert "Only 50 requests" in calibrate(few, few).problems[0]
    known = outcome(0.5, 0.2)
    silent = Outcome(
        known.at_s, known.prompt_tokens, known.cached_tokens * np.nan, known.ttft_s * np.nan, known.prefill_s,
        known.engines, 2, known.groups,
    )  # fmt: skip
    assert len(calibrate(silent, known).problems) == 2


def test_a_replay_with_the_right_median_and_a_wrong_tail_is_not_calibrated() -> None:
    measured = outcome(0.5, 0.2)
    tail = measured.ttft_s > np.quantile(measured.ttft_s, 0.8)

    found = calibrate(replace(measured, ttft_s=np.where(tail, 2.2 * measured.ttft_s, measured.ttft_s)), measured)

    assert not found.is_calibrated
    assert [problem.partition(" of")[0] for problem in found.problems] == ["The replay's TTFT p95"]


def test_the_timeline_covers_all_requests_in_order() -> None:
    points = timeline(outcome(0.5, 0.2))
    assert 50 <= len(points) <= 61
    assert [point["at"] for point in points] == sorted(point["at"] for point in points)


def test_a_difference_is_described_with_its_interval() -> None:
    change = Difference(Interval(0.35, 0.31, 0.38), Interval(-0.5, -0.55, -0.45), None, None)
    assert describe("tiered", change) == "tiered: hit rate +31 to +38 points, TTFT p50 -55 to -45 %"


def test_a_difference_within_its_interval_is_none() -> None:
    change = Difference(Interval(0.0, -0.004, 0.003), Interval(-0.004, -0.006, -0.002), None, None)
    assert describe("tiered", change) == "tiered: no difference in hit rate, TTFT p50 -0.6 to -0.2 %"


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (0.5, 0.53),  # the active policy itself: what was measured
        (0.7, 0.73),  # more hits: as many points
        (0.25, 0.265),  # half as many hits: half as many points
    ],
)
def test_a_hit_rate_is_corrected_by_the_error_of_the_active_policy_s_replay(own: float, expected: float) -> None:
    before = outcome(own, 0.2)
    after = corrected(before, measured=0.53, replayed=0.5)

    assert figures(after).hit_rate == pytest.approx(expected, abs=0.005)
    uncached = (after.prompt_tokens - after.cached_tokens).sum() / (before.prompt_tokens - before.cached_tokens).sum()
    assert after.prefill_s.sum() == pytest.approx(before.prefill_s.sum() * uncached, rel=1e-6)
    assert (after.cached_tokens <= after.prompt_tokens).all()
