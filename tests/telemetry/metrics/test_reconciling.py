"""Three hit rates held against each other (H17): which pairs are compared, and what is said where none can be."""

from dataclasses import replace

import pytest

from telemetry.metrics.rates import MIN_REQUESTS, Agreement, EngineCounts, RouterCounts, compare

ENGINE = EngineCounts(queries=100_000, hits=40_000, external_hits=10_000, requests=1000, prompt_tokens=101_000)
ANSWERS = RouterCounts(
    requests=1000, reported_responses=1000, prompt_tokens=101_000, cached_tokens=50_000, predicted_answers=800,
    predicted_prompt_tokens=80_000, predicted_tokens=41_000, predicted_cached_tokens=40_000,
)  # fmt: skip
NO_PREDICTION = replace(
    ANSWERS,
    predicted_answers=None,
    predicted_prompt_tokens=None,
    predicted_tokens=None,
    predicted_cached_tokens=None,
)


def test_three_that_are_near_each_other_agree():
    found = compare(ENGINE, ANSWERS)

    assert (found.agreement, found.points) == (Agreement.AGREE, pytest.approx(1.25))
    assert "1.2 points" in found.reason
    assert (ENGINE.ratio, ENGINE.not_eligible_tokens) == (0.5, 1000)  # H3, H6


@pytest.mark.parametrize(
    ("engine", "answers", "points", "said"),
    [
        pytest.param({"hits": 0, "external_hits": 0}, {}, 49.5, "engine's counters", id="counters stay at 0"),
        pytest.param({}, {"cached_tokens": 60_000}, 9.4, "engine's counters", id="answers tell more"),
        pytest.param({}, {"predicted_tokens": 60_000}, 25.0, "prediction", id="the index is stale"),
        pytest.param({"reports": False}, {"predicted_tokens": 60_000}, 25.0, "not reported", id="one pair left"),
    ],
)  # fmt: skip
def test_the_pair_that_differs_most_is_named(engine, answers, points, said):
    """H17"""
    found = compare(replace(ENGINE, **engine), replace(ANSWERS, **answers))

    assert (found.agreement, found.points) == (Agreement.DISAGREE, pytest.approx(points, abs=0.05))
    assert said in found.reason


def test_a_difference_of_5_points_is_still_agreement():
    edge = replace(NO_PREDICTION, prompt_tokens=100_000, cached_tokens=55_000)

    assert compare(ENGINE, edge).agreement == Agreement.AGREE
    assert compare(ENGINE, replace(edge, cached_tokens=55_001)).agreement == Agreement.DISAGREE


@pytest.mark.parametrize(
    ("engine", "answers", "agreement", "said"),
    [
        pytest.param({"requests": MIN_REQUESTS - 1}, {}, Agreement.TOO_FEW, "Fewer than 200", id="a quiet engine"),
        pytest.param(
            {}, {"reported_responses": MIN_REQUESTS - 1}, Agreement.TOO_FEW, "Fewer than 200", id="few responses"
        ),
        pytest.param({"requests": 5000}, {}, Agreement.TOO_FEW, "only 20 %", id="most traffic passes the routers by"),
        pytest.param({"queries": None}, {}, Agreement.TOO_FEW, "Fewer than 200", id="nothing read"),
        pytest.param({"reports": False}, {}, Agreement.NOT_REPORTED, "this engine", id="no such counters"),
        pytest.param({}, {"reported_responses": 0}, Agreement.NOT_REPORTED, "do not report", id="no usage, H16"),
        pytest.param({"decodes": True}, {}, Agreement.NOT_REPORTED, "transfers", id="a decode replica, H19"),
    ],
)
def test_what_cannot_be_compared_says_why_and_has_no_number(engine, answers, agreement, said):
    found = compare(replace(ENGINE, **engine), replace(NO_PREDICTION, **answers))

    assert (found.agreement, found.points) == (agreement, None)
    assert said in found.reason


def test_few_predictions_leave_the_other_pair():
    found = compare(ENGINE, replace(ANSWERS, predicted_answers=199, predicted_tokens=80_000))

    assert found.agreement == Agreement.AGREE
    assert "Fewer than 200 responses had a prediction" in found.reason


def test_nothing_at_all_is_too_few():
    assert compare(EngineCounts(), RouterCounts()).agreement == Agreement.TOO_FEW
