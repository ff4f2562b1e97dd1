"""The comparison of three hit rates of one replica (H17): which pairs are compared, and the reasons where none is."""

from dataclasses import replace

import pytest

from telemetry.metrics.rates import MIN_REQUESTS, Agreement, EngineCounts, RouterCounts, compare

ENGINE = EngineCounts(queries=100_000, hits=40_000, external_hits=10_000, requests=1000, prompt_tokens=101_000)
RESPONSES = RouterCounts(
    requests=1000, reported_responses=1000, prompt_tokens=101_000, cached_tokens=50_000, predicted_responses=800,
    predicted_prompt_tokens=80_000, predicted_tokens=41_000, predicted_cached_tokens=40_000,
)  # fmt: skip
NO_PREDICTION = replace(
    RESPONSES,
    predicted_responses=None,
    predicted_prompt_tokens=None,
    predicted_tokens=None,
    predicted_cached_tokens=None,
)


@pytest.mark.parametrize(
    ("engine", "responses", "points", "reason"),
    [
        pytest.param({}, {}, 1.25, "1.2 points", id="all three agree"),
        pytest.param({"hits": 0, "external_hits": 0}, {}, 49.5, "engine's counters", id="counters stay at 0"),
        pytest.param({}, {"cached_tokens": 60_000}, 9.4, "engine's counters", id="responses report more"),
        pytest.param({}, {"predicted_tokens": 60_000}, 25.0, "prediction", id="the index is stale"),
        pytest.param({"reports": False}, {"predicted_tokens": 60_000}, 25.0, "not reported", id="only predictions"),
        pytest.param({}, {"predicted_responses": 199}, 0.5, "Fewer than 200 responses", id="few predictions"),
    ],
)
def test_the_pair_that_differs_most_is_the_result(engine, responses, points, reason):
    """H17"""
    result = compare(replace(ENGINE, **engine), replace(RESPONSES, **responses))

    assert result.agreement == (Agreement.AGREE if points < 5 else Agreement.DISAGREE)
    assert result.points == pytest.approx(points, abs=0.05)
    assert reason in result.reason


def test_a_difference_of_5_points_is_still_agreement():
    edge = replace(NO_PREDICTION, prompt_tokens=100_000, cached_tokens=55_000)

    assert compare(ENGINE, edge).agreement == Agreement.AGREE
    assert compare(ENGINE, replace(edge, cached_tokens=55_001)).agreement == Agreement.DISAGREE


def test_total_reuse_and_not_eligible_tokens_of_an_engine():
    """H3, H6"""
    assert (ENGINE.ratio, ENGINE.not_eligible_tokens) == (0.5, 1000)


FEW = MIN_REQUESTS - 1


@pytest.mark.parametrize(
    ("engine", "responses", "agreement", "reason"),
    [
        pytest.param({"requests": FEW}, {}, Agreement.TOO_FEW, "Fewer than 200", id="a quiet engine"),
        pytest.param({}, {"reported_responses": FEW}, Agreement.TOO_FEW, "Fewer than 200", id="few responses"),
        pytest.param({"requests": 5000}, {}, Agreement.TOO_FEW, "only 20 %", id="most traffic bypasses the routers"),
        pytest.param({"queries": None}, {}, Agreement.TOO_FEW, "Fewer than 200", id="not scraped"),
        pytest.param({"reports": False}, {}, Agreement.NOT_REPORTED, "this engine", id="no such counters"),
        pytest.param({}, {"reported_responses": 0}, Agreement.NOT_REPORTED, "do not report", id="no usage, H16"),
        pytest.param({"is_decode": True}, {}, Agreement.NOT_REPORTED, "transfers", id="a decode replica, H19"),
    ],
)
def test_rates_that_cannot_be_compared_have_a_reason_and_no_number(engine, responses, agreement, reason):
    result = compare(replace(ENGINE, **engine), replace(NO_PREDICTION, **responses))

    assert (result.agreement, result.points) == (agreement, None)
    assert reason in result.reason
