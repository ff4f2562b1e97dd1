"""Verdicts of the analysis on a canary and a baseline whose true difference is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from controlplane.services.policies.rollout_plans import GuardLimits, read_guard
from controlplane.services.policies.rollouts import NO_VERDICT, Verdict
from telemetry.guards.analysis import Measured, Requests, Side, analyze, overall
from tests.telemetry.guards.sides import PROMPTS, minutes, nothing, two_sides

LIMITS = GuardLimits()
OWN = {"first_prompt": PROMPTS}  # prompts of the canary
CALM = {"requests": 300, "unrest": 0.0}


def verdicts(measured: Measured, limits: GuardLimits = LIMITS) -> tuple[Verdict, dict[str, Any]]:
    verdict, figures = analyze(limits, measured)
    return verdict, {figure["name"]: figure for figure in figures}


def until(measured: Measured, minute: int) -> Measured:
    """The first minutes of the canary."""
    sides = (
        Side(side.now.take(slice(int(np.searchsorted(side.now.bins, minute)))), side.before) for side in measured.sides
    )
    return Measured(*sides, measured.is_split_by_prompt, measured.has_common_prompts)


@pytest.mark.parametrize("past", [False, True])
def test_a_harmless_canary_rarely_fails_in_repeated_analyses(past: bool) -> None:
    failures = 0
    for seed in range(20):
        measured = two_sides(seed, 40, past=past)
        failures += any(verdicts(until(measured, minute))[0] is Verdict.FAILED for minute in range(4, 41, 2))
    assert failures <= 1


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize(
    ("name", "harm"),
    [("hit_rate", {"hit_rate": 0.35}), ("ttft_p95_s", {"ttft_s": 0.6}), ("error_ratio", {"error_ratio": 0.1})],
)
def test_a_harmful_canary_fails_within_15_minutes(name: str, harm: dict[str, float], past: bool) -> None:
    found = [verdicts(two_sides(seed, 15, canary=harm, past=past)) for seed in range(20)]
    assert sum(figures[name]["verdict"] == Verdict.FAILED for _, figures in found) >= 18
    assert all(verdict is Verdict.FAILED for verdict, figures in found if figures[name]["verdict"] == "failed")


def unlike(hit_rate: float, others: float, *, before: float, others_before: float, count: int = 40) -> Measured:
    """Sides that differed before."""
    return Measured(
        Side(minutes(1, count, **CALM, **OWN, hit_rate=hit_rate), minutes(3, 60, **CALM, **OWN, hit_rate=before)),
        Side(minutes(2, count, **CALM, hit_rate=others), minutes(4, 60, **CALM, hit_rate=others_before)),
    )


def test_prompts_that_always_hit_less_do_not_count_against_the_canary() -> None:
    measured = unlike(0.4, 0.7, before=0.4, others_before=0.7)
    blind = Measured(*(Side(side.now, nothing()) for side in measured.sides))
    assert verdicts(blind)[0] is Verdict.FAILED
    _, figures = verdicts(measured)
    assert figures["hit_rate"]["verdict"] == Verdict.PASSED
    assert figures["hit_rate"]["limit"] == pytest.approx(0.4 - 0.05, abs=0.03)
    assert "(40." in figures["hit_rate"]["detail"] or "(39." in figures["hit_rate"]["detail"]


def test_a_bad_revision_on_lucky_prompts_fails() -> None:
    """The canary still hits more than the baseline, but less than its own prompts did."""
    verdict, figures = verdicts(unlike(0.65, 0.5, before=0.8, others_before=0.5, count=15))
    assert (verdict, figures["hit_rate"]["verdict"]) == (Verdict.FAILED, Verdict.FAILED)
    assert figures["hit_rate"]["canary"] > figures["hit_rate"]["baseline"]


def test_what_changes_on_both_sides_is_not_the_canary() -> None:
    _, figures = verdicts(unlike(0.4, 0.4, before=0.7, others_before=0.7))
    assert figures["hit_rate"]["verdict"] == Verdict.PASSED


def test_slow_or_failing_prompts_are_compared_with_their_own_past() -> None:
    slow = {"ttft_s": 0.9, "error_ratio": 0.2}
    measured = two_sides(5, 30, canary={**CALM, **slow}, baseline=CALM)
    past = Side(measured.canary.now, minutes(7, 60, **CALM, **OWN, **slow))
    measured = Measured(past, Side(measured.baseline.now, minutes(8, 60, **CALM)))
    _, figures = verdicts(measured)
    assert (figures["ttft_p95_s"]["verdict"], figures["error_ratio"]["verdict"]) == (Verdict.PASSED, "inconclusive")
    assert figures["ttft_p95_s"]["limit"] == pytest.approx(2.4 * 1.25, rel=0.2)


def most_of_few(measured: Measured, few: int) -> Requests:
    """The canary's requests, of which the first ``few`` prompts have nine tenths, now and before."""
    for requests in measured.canary:
        numbers = np.arange(len(requests))
        requests.prompts[numbers % 10 > 0] = PROMPTS + numbers[numbers % 10 > 0] % few
    return measured.canary.now


@pytest.mark.parametrize(("canary", "few"), [(3, 0), (40, 2)])
def test_too_few_prompts_have_no_verdict_by_hit_rate_and_ttft(canary: int, few: int) -> None:
    """However bad it looks. Errors are no property of prompts, so they still fail."""
    measured = two_sides(9, 20, canary={**CALM, "prompts": canary, "hit_rate": 0.1, "ttft_s": 3.0}, past=True)
    if few:
        most_of_few(measured, few)
    verdict, figures = verdicts(measured)
    assert [figures[name]["verdict"] for name in ("hit_rate", "ttft_p95_s")] == [NO_VERDICT] * 2
    assert figures["hit_rate"]["detail"] == (
        f"{canary} prompts in the canary{', of which few have most of the work' if few else ''}: "
        "no verdict by hit rate."
    )
    assert verdict is not Verdict.FAILED

    failing = two_sides(9, 20, canary={**CALM, "prompts": canary, "error_ratio": 0.2}, past=True)
    assert verdicts(failing)[1]["error_ratio"]["verdict"] == Verdict.FAILED


@pytest.mark.parametrize(("harmed", "verdict"), [("the others too", Verdict.FAILED), ("it alone", "inconclusive")])
def test_beside_a_prompt_with_most_of_the_work_the_others_decide(harmed: str, verdict: str) -> None:
    measured = two_sides(6, 15, canary={**CALM, "prompts": 40}, baseline=CALM, past=True)
    canary = most_of_few(measured, 1)
    is_harmed = (np.arange(len(canary)) % 3 > 0) & ((canary.prompts == PROMPTS) | (harmed == "the others too"))
    canary.cached_tokens[is_harmed] = 0.0
    assert verdicts(measured)[1]["hit_rate"]["verdict"] == verdict


def test_a_prompt_that_changed_by_itself_does_not_roll_back() -> None:
    """It has an eighth of the canary's work, and never hits again."""
    measured = two_sides(4, 15, canary={**CALM, "prompts": 8}, baseline=CALM, past=True)
    canary = measured.canary.now
    canary.cached_tokens[canary.prompts == PROMPTS] = 0.0
    figures = verdicts(measured)[1]
    assert figures["hit_rate"]["canary"] < figures["hit_rate"]["limit"]
    assert figures["hit_rate"]["verdict"] == Verdict.INCONCLUSIVE


def test_few_prompts_that_both_routers_have_are_compared() -> None:
    def by_router(hit_rate: float) -> Measured:
        sides = [
            Side(minutes(seed, 50, **CALM, prompts=2, hit_rate=rate), minutes(seed + 10, 60, **CALM, prompts=2))
            for seed, rate in ((1, hit_rate), (2, 0.6))
        ]
        return Measured(*sides, is_split_by_prompt=False, has_common_prompts=True)

    assert verdicts(by_router(0.4))[0] is Verdict.FAILED
    assert verdicts(by_router(0.6))[1]["hit_rate"]["verdict"] == Verdict.PASSED


def test_without_a_past_only_a_random_split_is_compared() -> None:
    """Which prompts a group has is not random: a group that always hit less would look harmful."""
    measured = two_sides(3, 30, canary={**CALM, "hit_rate": 0.2}, baseline=CALM)
    assert verdicts(measured)[0] is Verdict.FAILED
    of_group = Measured(*measured.sides, is_split_by_prompt=False)
    figures = verdicts(of_group)[1]
    assert (figures["hit_rate"]["verdict"], figures["ttft_p95_s"]["verdict"]) == (NO_VERDICT, NO_VERDICT)
    assert "from before the rollout" in figures["hit_rate"]["detail"]


def test_ttft_is_compared_among_streamed_responses_only() -> None:
    """The latency of whole responses beside first tokens would fail any canary that gets more of the former."""
    _, figures = verdicts(
        two_sides(
            1,
            40,
            canary={**CALM, "streamed_ratio": 0.2, "plain_s": 9.0},
            baseline={**CALM, "streamed_ratio": 0.9},
        )
    )
    assert "plain_latency_p95_s" not in figures
    assert figures["ttft_p95_s"]["verdict"] != Verdict.FAILED
    assert figures["ttft_p95_s"]["canary"] == pytest.approx(figures["ttft_p95_s"]["baseline"], rel=0.2)


def test_plain_latency_is_compared_if_nothing_is_streamed() -> None:
    found = [
        verdicts(
            two_sides(seed, 15, canary={"streamed_ratio": 0.01, "plain_s": 8.0}, baseline={"streamed_ratio": 0.0})
        )[1]
        for seed in range(20)
    ]
    assert all("ttft_p95_s" not in figures for figures in found)
    assert sum(figures["plain_latency_p95_s"]["verdict"] == Verdict.FAILED for figures in found) >= 18


def test_a_harmless_canary_passes_eventually() -> None:
    passed = [verdicts(two_sides(seed, 60, canary=CALM, baseline=CALM, past=True))[0] for seed in range(10)]
    assert passed.count(Verdict.PASSED) >= 9
    assert Verdict.FAILED not in passed


@pytest.mark.parametrize(("canary", "baseline"), [(1, 40), (40, 1), (0, 40), (40, 0), (1, 1)])
def test_too_little_traffic_is_inconclusive(canary: int, baseline: int) -> None:
    measured = Measured(Side(minutes(1, canary, **OWN, hit_rate=0.1), nothing()), Side(minutes(2, baseline), nothing()))
    verdict, figures = verdicts(measured)
    assert verdict is Verdict.INCONCLUSIVE
    assert {figure["verdict"] for figure in figures.values()} == {"inconclusive"}
    assert "of at least 100 requests" in figures["hit_rate"]["detail"]


def test_a_figure_without_limit_is_shown_and_never_fails() -> None:
    off = GuardLimits(max_hit_rate_drop=None, max_ttft_p95_growth=None, max_error_ratio=None)
    verdict, figures = verdicts(two_sides(1, 30, canary={"hit_rate": 0.1, "ttft_s": 3.0, "error_ratio": 0.5}), off)
    assert verdict is Verdict.PASSED
    assert {figure["verdict"] for figure in figures.values()} == {"off"}
    assert figures["hit_rate"]["canary"] == pytest.approx(0.1, abs=0.05)


def test_unreported_cached_tokens_leave_the_verdict_to_the_other_figures() -> None:
    def mute(requests: Requests) -> Requests:
        none = np.zeros(len(requests))
        return Requests(requests.bins, requests.prompts, requests.answered, requests.failed, none, none,
                        requests.ttft_s, requests.plain_latency_s)  # fmt: skip

    measured = two_sides(1, 60, canary=CALM, baseline=CALM)
    measured = Measured(Side(mute(measured.canary.now), nothing()), measured.baseline)
    verdict, figures = verdicts(measured)
    assert figures["hit_rate"]["canary"] is None
    assert figures["hit_rate"]["detail"].startswith("The canary's responses do not report cached tokens: no verdict")
    assert (figures["hit_rate"]["verdict"], verdict) == (NO_VERDICT, Verdict.PASSED)


def test_few_requests_without_failure_are_inconclusive() -> None:
    assert verdicts(two_sides(1, 4))[1]["error_ratio"]["verdict"] == "inconclusive"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (["passed", "off"], Verdict.PASSED),
        (["off"], Verdict.PASSED),
        (["passed", "inconclusive"], Verdict.INCONCLUSIVE),
        (["passed", "no_verdict"], Verdict.PASSED),
        (["no_verdict", "off"], Verdict.INCONCLUSIVE),
        (["failed", "no_verdict"], Verdict.FAILED),
        (["passed", "inconclusive", "failed"], Verdict.FAILED),
    ],
)
def test_overall_verdict_is_the_worst(found: list[str], expected: Verdict) -> None:
    assert overall(found) == expected


def test_limits_of_an_older_rollout_are_read_without_those_that_no_longer_exist() -> None:
    assert read_guard({"max_load_skew": 1.5, "min_requests": 30}) == GuardLimits(min_requests=30)
