"""Verdicts of the analysis on a canary and a baseline whose true difference is known."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.services.policies.rollout_plans import GuardLimits
from controlplane.services.policies.rollouts import Verdict
from telemetry.guards.analysis import Bin, Measured, Side, analyze, overall, skew, skew_by_chance
from tests.telemetry.guards.sides import minutes

LIMITS = GuardLimits(max_load_skew=None)


def verdicts(measured: Measured, limits: GuardLimits = LIMITS) -> tuple[Verdict, dict[str, Any]]:
    verdict, figures = analyze(limits, measured)
    return verdict, {figure["name"]: figure for figure in figures}


def two_sides(seed: int, count: int, **canary: Any) -> Measured:
    return Measured(Side(minutes(seed, count, **canary)), Side(minutes(seed + 10_000, count)))


def busy_sides(seed: int, count: int) -> Measured:
    canary, baseline = (minutes(start, count, requests=300, unrest=0.1) for start in (seed, seed + 10_000))
    return Measured(Side(canary), Side(baseline))


def test_a_harmless_canary_rarely_fails_in_repeated_analyses() -> None:
    looked = 0
    failures = 0
    for seed in range(30):
        canary, baseline = minutes(seed, 40), minutes(seed + 10_000, 40)
        looks = [verdicts(Measured(Side(canary[:n]), Side(baseline[:n])))[0] for n in range(4, 41)]
        failures += Verdict.FAILED in looks
        looked += 1
    assert failures <= looked * 0.05


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("hit_rate", {"hit_rate": 0.35}),
        ("ttft_p95_s", {"ttft_s": 0.6}),
        ("error_ratio", {"error_ratio": 0.1}),
    ],
)
def test_a_harmful_canary_fails_within_15_minutes(name: str, harm: dict[str, float]) -> None:
    found = [verdicts(two_sides(seed, 15, **harm)) for seed in range(20)]
    assert sum(figures[name]["verdict"] == Verdict.FAILED for _, figures in found) >= 18
    assert all(verdict == Verdict.FAILED for verdict, figures in found if figures[name]["verdict"] == "failed")


def test_ttft_is_compared_among_streamed_responses_only() -> None:
    """The latency of whole responses beside first tokens would fail any canary that gets more of the former."""
    canary = minutes(1, 40, requests=300, unrest=0.1, streamed_ratio=0.2, plain_s=9.0)
    baseline = minutes(2, 40, requests=300, unrest=0.1, streamed_ratio=0.9)
    _, figures = verdicts(Measured(Side(canary), Side(baseline)))

    assert "plain_latency_p95_s" not in figures
    assert figures["ttft_p95_s"]["verdict"] != Verdict.FAILED
    assert figures["ttft_p95_s"]["canary"] == pytest.approx(figures["ttft_p95_s"]["baseline"], rel=0.2)


def test_plain_latency_is_compared_if_nothing_is_streamed() -> None:
    found = []
    for seed in range(20):
        canary, baseline = (
            minutes(seed, 15, streamed_ratio=0.01, plain_s=8.0),
            minutes(seed + 100, 15, streamed_ratio=0),
        )
        found.append(verdicts(Measured(Side(canary), Side(baseline)))[1])

    assert all("ttft_p95_s" not in figures for figures in found)
    assert sum(figures["plain_latency_p95_s"]["verdict"] == Verdict.FAILED for figures in found) >= 18


def test_a_canary_without_streams_is_inconclusive() -> None:
    canary, baseline = minutes(1, 15, streamed_ratio=0), minutes(2, 15)
    _, figures = verdicts(Measured(Side(canary), Side(baseline)))

    assert figures["ttft_p95_s"]["verdict"] == Verdict.INCONCLUSIVE
    assert "One side has no TTFT yet" in figures["ttft_p95_s"]["detail"]


def test_a_harmless_canary_passes_eventually() -> None:
    passed = [verdicts(busy_sides(seed, 60))[0] for seed in range(10)]
    assert passed.count(Verdict.PASSED) >= 9
    assert Verdict.FAILED not in passed


def test_a_better_canary_passes_sooner() -> None:
    assert verdicts(two_sides(3, 8, hit_rate=0.9, ttft_s=0.15))[0] == Verdict.PASSED


def test_an_earlier_difference_is_not_attributed_to_the_canary() -> None:
    """The canary's groups always hit less: beside the others it looks harmful, beside themselves it is not."""
    calm = {"requests": 400, "unrest": 0.1}
    now, others = minutes(1, 60, **calm, hit_rate=0.4, ttft_s=0.6), minutes(2, 60, **calm, hit_rate=0.7)
    before, others_before = minutes(3, 60, **calm, hit_rate=0.4, ttft_s=0.6), minutes(4, 60, **calm, hit_rate=0.7)
    blind, _ = verdicts(Measured(Side(now), Side(others)))
    fair, figures = verdicts(Measured(Side(now, before), Side(others, others_before)))
    assert (blind, fair) == (Verdict.FAILED, Verdict.PASSED)
    assert figures["hit_rate"]["limit"] == pytest.approx(0.4 - 0.05, abs=0.03)


def test_new_harm_is_found_in_spite_of_an_earlier_difference() -> None:
    now, others = minutes(1, 30, hit_rate=0.4), minutes(2, 30, hit_rate=0.4)
    before, others_before = minutes(3, 60, hit_rate=0.7), minutes(4, 60, hit_rate=0.4)
    verdict, figures = verdicts(Measured(Side(now, before), Side(others, others_before)))
    assert (verdict, figures["hit_rate"]["verdict"]) == (Verdict.FAILED, Verdict.FAILED)


@pytest.mark.parametrize(("canary", "baseline"), [(1, 40), (40, 1), (0, 40), (40, 0), (2, 2)])
def test_too_little_traffic_is_inconclusive(canary: int, baseline: int) -> None:
    verdict, figures = verdicts(Measured(Side(minutes(1, canary, hit_rate=0.1)), Side(minutes(2, baseline))))
    assert verdict == Verdict.INCONCLUSIVE
    assert {figure["verdict"] for figure in figures.values() if figure["name"] != "load_skew"} == {"inconclusive"}
    assert "of at least 200 requests" in figures["hit_rate"]["detail"]


def test_two_bins_are_inconclusive() -> None:
    measured = Measured(Side(minutes(1, 2, requests=500, hit_rate=0.1)), Side(minutes(2, 2, requests=500)))
    verdict, figures = verdicts(measured)
    assert verdict == Verdict.INCONCLUSIVE
    assert figures["hit_rate"]["detail"].startswith("Fewer than 3 time bins")


def test_a_figure_without_limit_is_shown_and_never_fails() -> None:
    off = GuardLimits(max_hit_rate_drop=None, max_ttft_p95_growth=None, max_error_ratio=None, max_load_skew=None)
    verdict, figures = verdicts(two_sides(1, 30, hit_rate=0.1, ttft_s=3.0, error_ratio=0.5), off)
    assert verdict == Verdict.PASSED
    assert {figure["verdict"] for figure in figures.values()} == {"off"}
    assert figures["hit_rate"]["canary"] == pytest.approx(0.1, abs=0.05)


def test_unreported_cached_tokens_leave_the_hit_rate_inconclusive() -> None:
    mute = [Bin(one.start, one.requests, one.answered, 0, 0, 0, one.ttft) for one in minutes(1, 40)]
    verdict, figures = verdicts(Measured(Side(mute), Side(minutes(2, 40))))
    assert verdict == Verdict.INCONCLUSIVE
    assert figures["hit_rate"]["canary"] is None
    assert figures["hit_rate"]["detail"] == "There is no data yet."
    assert figures["ttft_p95_s"]["verdict"] == "passed"


def test_few_requests_without_failure_are_inconclusive() -> None:
    measured = Measured(Side(minutes(1, 4, requests=60)), Side(minutes(2, 4, requests=60)))
    assert verdicts(measured)[1]["error_ratio"]["verdict"] == "inconclusive"


def test_only_new_load_skew_fails() -> None:
    limits = GuardLimits(max_hit_rate_drop=None, max_ttft_p95_growth=None, max_error_ratio=None, max_load_skew=1.5)
    even, piled = {"a": 1000.0, "b": 1010.0, "c": 990.0}, {"a": 2400.0, "b": 300.0, "c": 300.0}
    sides = (Side(minutes(1, 30)), Side(minutes(2, 30)))
    assert analyze(limits, Measured(*sides, piled, even))[0] == Verdict.FAILED
    assert analyze(limits, Measured(*sides, piled, piled))[0] == Verdict.PASSED
    assert analyze(limits, Measured(*sides, even, even))[0] == Verdict.PASSED
    assert analyze(limits, Measured(*sides, {}, even))[0] == Verdict.INCONCLUSIVE


def test_skew_is_maximum_over_mean_and_allows_for_chance() -> None:
    assert skew({"a": 30.0, "b": 10.0}) == 1.5
    assert skew({}) is None
    assert skew({"a": 0.0, "b": 0.0}) is None
    assert skew_by_chance({"a": 1e6, "b": 1e6}) < 0.01 < skew_by_chance({"a": 100.0, "b": 100.0}) < 0.2
    assert skew_by_chance({"a": 5.0}) == 0.0


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (["passed", "off"], Verdict.PASSED),
        (["off"], Verdict.PASSED),
        (["passed", "inconclusive"], Verdict.INCONCLUSIVE),
        (["passed", "inconclusive", "failed"], Verdict.FAILED),
    ],
)
def test_overall_verdict_is_the_worst(found: list[str], expected: Verdict) -> None:
    assert overall(found) == expected
