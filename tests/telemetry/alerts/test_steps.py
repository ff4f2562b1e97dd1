"""The state machine of an alert, as data in and a step out."""

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.alerts.verdict import OpenAlert, Result, Step, Timing, next_step
from tests.telemetry.conftest import T0

TIMING = Timing(for_s=10, keep_firing_s=60, confirm_s=60)


def later(seconds):
    return T0 + timedelta(seconds=seconds)


PENDING = OpenAlert(False, T0, T0)
FIRING = OpenAlert(True, T0, later(100))


@pytest.mark.parametrize(
    ("answer", "alert", "seconds", "step"),
    [
        (Result.OK, None, 0, Step.NOTHING),
        (Result.BREACH, None, 0, Step.OPEN),
        (Result.BREACH, PENDING, 9, Step.EXTEND),
        (Result.BREACH, PENDING, 10, Step.FIRE),
        (Result.OK, PENDING, 5, Step.DROP),
        (Result.BREACH, FIRING, 200, Step.EXTEND),
        (Result.OK, FIRING, 159, Step.NOTHING),
        (Result.OK, FIRING, 160, Step.RESOLVE),
        (Result.NO_DATA, None, 0, Step.NOTHING),
        (Result.NO_DATA, PENDING, 60, Step.NOTHING),
        (Result.NO_DATA, PENDING, 61, Step.DROP),
        (Result.NO_DATA, FIRING, 5000, Step.NOTHING),
    ],
)
def test_the_state_machine(answer, alert, seconds, step):
    assert next_step(TIMING, answer, alert, later(seconds)) is step


def test_a_rule_that_waits_for_nothing_fires_at_once():
    assert next_step(replace(TIMING, for_s=0.0), Result.BREACH, None, T0) is Step.OPEN_FIRING


answers = st.lists(st.tuples(st.sampled_from(Result), st.integers(1, 120)), max_size=60)


@given(answers=answers)
def test_no_data_alone_never_starts_nor_ends_anything_and_firing_needs_its_time(answers):
    alert, now = None, T0
    for answer, seconds in answers:
        now += timedelta(seconds=seconds)
        step = next_step(TIMING, answer, alert, now)
        if answer is Result.NO_DATA:
            assert step is Step.NOTHING or (step is Step.DROP and not alert.is_firing)
        if step is Step.OPEN:
            alert = OpenAlert(False, now, now)
        elif step is Step.FIRE:
            assert (now - alert.started_at).total_seconds() >= TIMING.for_s
            alert = OpenAlert(True, alert.started_at, now)
        elif step is Step.EXTEND:
            alert = replace(alert, last_breach_at=now)
        elif step in {Step.DROP, Step.RESOLVE}:
            assert alert is not None
            assert answer is Result.OK or not alert.is_firing
            alert = None
