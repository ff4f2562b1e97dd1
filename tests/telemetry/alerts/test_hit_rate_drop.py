"""The drop rule, as data in and an answer out."""

from datetime import timedelta

import pytest

from controlplane.errors import InvalidError
from telemetry.alerts.kinds import KINDS
from telemetry.alerts.kinds.hit_rate_drop import MIN_WINDOWS, baseline_span, compare
from telemetry.alerts.past import WindowSum
from telemetry.alerts.verdict import Answer, Reason
from tests.telemetry.alerts.pasts import judged, only, past, step, window
from tests.telemetry.conftest import T0

KIND = KINDS["hit_rate_drop"]
SETTINGS = KIND.read({})


def compared(newest, before=(0.8, 0.8, 0.8), days=()):
    return compare(SETTINGS, newest, [window(ratio) for ratio in before], [window(ratio) for ratio in days])


@pytest.mark.parametrize(
    ("value", "answer"), [(0.66, Answer.OK), (0.65, Answer.BREACH), (0.2, Answer.BREACH), (0.95, Answer.OK)]
)
def test_a_rate_15_points_below_its_baseline_is_a_breach(value, answer):
    verdict = compared(window(value))

    assert verdict.answer is answer
    assert (verdict.value, verdict.baseline, verdict.limit) == pytest.approx((value, 0.8, 0.65))


@pytest.mark.parametrize(
    "newest",
    [
        pytest.param(window(0.1, requests=49), id="requests"),
        pytest.param(window(0.1, queries=19_999), id="tokens"),
        pytest.param(WindowSum(T0, 0.0, 0.0, 0.0), id="none at all"),
    ],
)
def test_a_window_below_a_floor_says_nothing(newest):
    assert (compared(newest).answer, compared(newest).reason) == (Answer.NO_DATA, Reason.LITTLE_TRAFFIC)


def test_a_window_without_readings_is_no_data_and_not_a_rate_of_zero():
    verdict = compared(WindowSum(T0, None, None, None))

    assert (verdict.answer, verdict.reason, verdict.value) == (Answer.NO_DATA, Reason.NO_READINGS, None)


def test_unknown_requests_are_judged_by_the_tokens_alone():
    assert compared(window(0.1, requests=None)).answer is Answer.BREACH


def test_three_windows_of_history_are_enough_and_two_are_not():
    assert compared(window(0.1), before=[0.8] * MIN_WINDOWS).answer is Answer.BREACH
    few = compared(window(0.1), before=[0.8] * (MIN_WINDOWS - 1))
    assert (few.answer, few.reason, few.figures["windows"]) == (Answer.NO_DATA, Reason.LITTLE_HISTORY, 2)


def test_past_windows_without_enough_traffic_are_left_out_of_the_baseline():
    before = [window(0.8), window(0.8), window(0.8), *[window(0.0, requests=1)] * 10]

    assert compare(SETTINGS, window(0.7), before).baseline == pytest.approx(0.8)


def test_the_baseline_is_the_median_so_that_a_few_bad_windows_do_not_move_it():
    assert compared(window(0.7), before=[0.8] * 6 + [0.0] * 5).baseline == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("days", "baseline", "of"),
    [
        ([0.4, 0.5, 0.9], 0.5, "days"),
        ([0.4, 0.5], 0.8, "windows"),
        ([], 0.8, "windows"),
    ],
)
def test_this_hour_of_three_days_is_the_baseline_and_recent_windows_where_there_are_fewer(days, baseline, of):
    """OPERATORS 2.6: what is usual at night is no drop, though an hour ago it was day."""
    verdict = compared(window(0.45), days=days)

    assert (verdict.baseline, verdict.figures["baseline_of"]) == (pytest.approx(baseline), of)
    assert (verdict.answer is Answer.BREACH) is (of == "windows")


def test_days_with_too_little_traffic_at_this_hour_do_not_count():
    days = [window(0.4), window(0.4), window(0.4, requests=3)]

    assert compare(SETTINGS, window(0.7), [window()] * 3, days).figures["baseline_of"] == "windows"


def test_the_hours_are_those_of_the_days_before():
    hour = T0.replace(minute=0)
    hours = {"": {hour - timedelta(days=back): window(0.4) for back in (1, 2, 3)}}
    seen = past(60, count=5, engines={"r1": [step(0.45)] * 5}, windows={"": [window(0.45)] * 5}, hours=hours)

    assert only(judged("hit_rate_drop", seen, days=3)).figures["baseline_of"] == "days"
    assert only(judged("hit_rate_drop", seen, days=2)).figures["baseline_of"] == "windows"
    assert only(judged("hit_rate_drop", seen, days=0)).figures["baseline_of"] == "windows"


def test_the_baseline_ends_where_the_newest_window_begins_or_an_alert_began():
    window_s, history_s = SETTINGS.window_s, SETTINGS.baseline_s
    assert baseline_span(SETTINGS, T0, None)[1] == T0 - timedelta(seconds=window_s)
    opened = T0 - timedelta(seconds=600)
    start, end = baseline_span(SETTINGS, T0, opened)
    assert end == opened - timedelta(seconds=window_s)
    assert end - start == timedelta(seconds=history_s)
    long_ago = T0 - timedelta(seconds=history_s + 1)
    assert baseline_span(SETTINGS, T0, long_ago)[1] == T0 - timedelta(seconds=window_s)


def restarted_past(*, others):
    """Two replicas, one of which restarted a minute ago and hits nothing; what the other one hits."""
    steps = {"r1": [*[step(0.8)] * 5, step(0.0)], "r2": [*[step(0.8)] * 5, step(others)]}
    together = [window(0.8, queries=200_000, at=T0 - timedelta(seconds=60 * back)) for back in range(6, 1, -1)]
    newest = window(others / 2, queries=200_000, at=T0 - timedelta(seconds=60))
    restarts = {"r1": [T0 - timedelta(seconds=70)]}
    return past(60, count=6, engines=steps, windows={"": [*together, newest]}, restarts=restarts)


@pytest.mark.parametrize(("others", "cold"), [(0.8, ["r1"]), (0.3, None)])
def test_a_drop_is_a_restarted_replica_s_own_only_if_without_it_there_is_none(others, cold):
    """H18"""
    verdict = only(judged("hit_rate_drop", restarted_past(others=others)))

    assert verdict.answer is Answer.BREACH
    assert verdict.figures.get("restarted") == cold


def test_after_the_warm_up_a_restart_explains_nothing_any_more():
    verdict = only(judged("hit_rate_drop", restarted_past(others=0.8), warm_up_s=60))

    assert "restarted" not in verdict.figures


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"window_s": 5}, "$.settings.window_s"),
        ({"drop_points": 0}, "$.settings.drop_points"),
        ({"drop_points": "many"}, "$.settings.drop_points"),
        ({"drop_points": True}, "$.settings.drop_points"),
        ({"min_tokens": float("nan")}, "$.settings"),
        ({"colour": 1}, "$.settings"),
        ({"window_s": 600, "baseline_s": 700}, "$.settings.baseline_s"),
        ([], "$.settings"),
    ],
)
def test_settings_that_no_rule_can_have_are_refused_by_name(settings, path):
    with pytest.raises(InvalidError) as caught:
        KIND.read(settings)
    assert [fault.path for fault in caught.value.faults] == [path]


def test_the_floors_are_what_operators_expect():
    """OPERATORS 2.6"""
    assert (SETTINGS.min_requests, SETTINGS.min_tokens) == (50, 20_000)
    assert SETTINGS.keep_firing_s >= 2 * SETTINGS.window_s
