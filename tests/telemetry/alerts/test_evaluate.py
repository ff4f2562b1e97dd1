"""The rule and its state machine, as data in and an answer out."""

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.alerts.evaluate import (
    LIMITS,
    MIN_WINDOWS,
    Answer,
    DropSettings,
    OpenAlert,
    Reason,
    RuleError,
    Step,
    WindowSum,
    baseline_span,
    evaluate_drop,
    next_step,
)
from tests.telemetry.conftest import T0

SETTINGS = DropSettings.parse({})


def window(ratio=0.8, *, queries=100_000.0, requests=100.0):
    hits = None if ratio is None else ratio * queries
    return WindowSum(T0, queries, hits, requests)


def judged(newest, past=(0.8, 0.8, 0.8), **settings):
    return evaluate_drop(replace(SETTINGS, **settings), newest, [window(ratio) for ratio in past])


@pytest.mark.parametrize(
    ("value", "answer"), [(0.66, Answer.OK), (0.65, Answer.BREACH), (0.2, Answer.BREACH), (0.95, Answer.OK)]
)
def test_a_rate_15_points_below_its_baseline_is_a_breach(value, answer):
    verdict = judged(window(value))

    assert verdict.answer is answer
    assert (verdict.value_ratio, verdict.baseline_ratio) == pytest.approx((value, 0.8))


@pytest.mark.parametrize(
    "newest",
    [
        pytest.param(window(0.1, requests=49), id="requests"),
        pytest.param(window(0.1, queries=19_999), id="tokens"),
        pytest.param(WindowSum(T0, 0.0, 0.0, 0.0), id="none at all"),
    ],
)
def test_a_window_below_a_floor_says_nothing(newest):
    assert (judged(newest).answer, judged(newest).reason) == (Answer.NO_DATA, Reason.LITTLE_TRAFFIC)


def test_a_window_without_readings_is_no_data_and_not_a_rate_of_zero():
    verdict = judged(WindowSum(T0, None, None, None))

    assert (verdict.answer, verdict.reason, verdict.value_ratio) == (Answer.NO_DATA, Reason.NO_READINGS, None)


def test_unknown_requests_are_judged_by_the_tokens_alone():
    assert judged(window(0.1, requests=None)).answer is Answer.BREACH


def test_three_windows_of_history_are_enough_and_two_are_not():
    assert judged(window(0.1), past=[0.8] * MIN_WINDOWS).answer is Answer.BREACH
    few = judged(window(0.1), past=[0.8] * (MIN_WINDOWS - 1))
    assert (few.answer, few.reason, few.windows) == (Answer.NO_DATA, Reason.LITTLE_HISTORY, 2)


def test_past_windows_without_enough_traffic_are_left_out_of_the_baseline():
    past = [window(0.8), window(0.8), window(0.8), *[window(0.0, requests=1)] * 10]

    assert evaluate_drop(SETTINGS, window(0.7), past).baseline_ratio == pytest.approx(0.8)


def test_the_baseline_is_the_median_so_that_a_few_bad_windows_do_not_move_it():
    assert judged(window(0.7), past=[0.8] * 6 + [0.0] * 5).baseline_ratio == pytest.approx(0.8)


def test_the_baseline_ends_where_the_newest_window_begins_or_an_alert_began():
    window_s, history_s = SETTINGS.window_s, SETTINGS.baseline_s
    assert baseline_span(SETTINGS, T0, None)[1] == T0 - timedelta(seconds=window_s)
    opened = T0 - timedelta(seconds=600)
    start, end = baseline_span(SETTINGS, T0, opened)
    assert end == opened - timedelta(seconds=window_s)
    assert end - start == timedelta(seconds=history_s)
    long_ago = T0 - timedelta(seconds=history_s + 1)
    assert baseline_span(SETTINGS, T0, long_ago)[1] == T0 - timedelta(seconds=window_s)


def later(seconds):
    return T0 + timedelta(seconds=seconds)


PENDING = OpenAlert(False, T0, T0)
FIRING = OpenAlert(True, T0, later(100))


@pytest.mark.parametrize(
    ("answer", "alert", "seconds", "step"),
    [
        (Answer.OK, None, 0, Step.NOTHING),
        (Answer.BREACH, None, 0, Step.OPEN),
        (Answer.BREACH, PENDING, 9, Step.EXTEND),
        (Answer.BREACH, PENDING, 10, Step.FIRE),
        (Answer.OK, PENDING, 5, Step.DROP),
        (Answer.BREACH, FIRING, 200, Step.EXTEND),
        (Answer.OK, FIRING, 159, Step.NOTHING),
        (Answer.OK, FIRING, 160, Step.RESOLVE),
        (Answer.NO_DATA, None, 0, Step.NOTHING),
        (Answer.NO_DATA, PENDING, 60, Step.NOTHING),
        (Answer.NO_DATA, PENDING, 61, Step.DROP),
        (Answer.NO_DATA, FIRING, 5000, Step.NOTHING),
    ],
)
def test_the_state_machine(answer, alert, seconds, step):
    assert next_step(SETTINGS, answer, alert, later(seconds)) is step


def test_a_rule_that_waits_for_nothing_fires_at_once():
    assert next_step(replace(SETTINGS, for_s=0.0), Answer.BREACH, None, T0) is Step.OPEN_FIRING


answers = st.lists(st.tuples(st.sampled_from(Answer), st.integers(1, 120)), max_size=60)


@given(answers=answers)
def test_no_data_alone_never_starts_nor_ends_anything_and_firing_needs_its_time(answers):
    alert, now = None, T0
    for answer, seconds in answers:
        now += timedelta(seconds=seconds)
        step = next_step(SETTINGS, answer, alert, now)
        if answer is Answer.NO_DATA:
            assert step is Step.NOTHING or (step is Step.DROP and not alert.is_firing)
        if step is Step.OPEN:
            alert = OpenAlert(False, now, now)
        elif step is Step.FIRE:
            assert (now - alert.started_at).total_seconds() >= SETTINGS.for_s
            alert = OpenAlert(True, alert.started_at, now)
        elif step is Step.EXTEND:
            alert = replace(alert, last_breach_at=now)
        elif step in {Step.DROP, Step.RESOLVE}:
            assert alert is not None
            assert answer is Answer.OK or not alert.is_firing
            alert = None


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"window_s": 5}, "window_s"),
        ({"drop_points": 0}, "drop_points"),
        ({"drop_points": "many"}, "drop_points"),
        ({"drop_points": True}, "drop_points"),
        ({"min_tokens": float("nan")}, "min_tokens"),
        ({"colour": 1}, "colour"),
        ({"window_s": 600, "baseline_s": 700}, "baseline_s"),
        ([], ""),
    ],
)
def test_settings_that_no_rule_can_have_are_refused_by_name(settings, field):
    with pytest.raises(RuleError) as caught:
        DropSettings.parse(settings)
    assert caught.value.field == field


def test_what_is_not_set_takes_the_documented_default():
    assert DropSettings.parse({"drop_points": 20}) == replace(SETTINGS, drop_points=20.0)
    assert {name: getattr(SETTINGS, name) for name in LIMITS} == {name: limit[2] for name, limit in LIMITS.items()}
    assert (SETTINGS.min_requests, SETTINGS.min_tokens) == (50, 20_000)  # OPERATORS 2.6
