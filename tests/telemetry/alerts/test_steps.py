"""The state machine of an alert: from a state and a result to an action."""

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.alerts.findings import Action, OpenAlert, Result, Timing, next_action
from tests.telemetry.conftest import T0

TIMING = Timing(for_s=10, keep_firing_s=60, confirm_s=60)


def later(seconds):
    return T0 + timedelta(seconds=seconds)


PENDING = OpenAlert(False, T0, T0)
FIRING = OpenAlert(True, T0, later(100))


@pytest.mark.parametrize(
    ("result", "alert", "seconds", "step"),
    [
        (Result.OK, None, 0, Action.NONE),
        (Result.BREACH, None, 0, Action.OPEN),
        (Result.BREACH, PENDING, 9, Action.EXTEND),
        (Result.BREACH, PENDING, 10, Action.FIRE),
        (Result.OK, PENDING, 5, Action.DROP),
        (Result.BREACH, FIRING, 200, Action.EXTEND),
        (Result.OK, FIRING, 159, Action.NONE),
        (Result.OK, FIRING, 160, Action.RESOLVE),
        (Result.NO_DATA, None, 0, Action.NONE),
        (Result.NO_DATA, PENDING, 60, Action.NONE),
        (Result.NO_DATA, PENDING, 61, Action.DROP),
        (Result.NO_DATA, FIRING, 5000, Action.NONE),
    ],
)
def test_each_result_moves_an_alert_to_its_next_state(result, alert, seconds, step):
    assert next_action(TIMING, result, alert, later(seconds)) is step


def test_a_rule_without_for_s_fires_at_once():
    assert next_action(replace(TIMING, for_s=0.0), Result.BREACH, None, T0) is Action.OPEN_FIRING


results = st.lists(st.tuples(st.sampled_from(Result), st.integers(1, 120)), max_size=60)


@given(results=results)
def test_no_data_opens_and_resolves_nothing_and_firing_takes_for_s(results):
    alert, now = None, T0
    for result, seconds in results:
        now += timedelta(seconds=seconds)
        step = next_action(TIMING, result, alert, now)
        if result is Result.NO_DATA:
            assert step is Action.NONE or (step is Action.DROP and not alert.is_firing)
        if step is Action.OPEN:
            alert = OpenAlert(False, now, now)
        elif step is Action.FIRE:
            assert (now - alert.started_at).total_seconds() >= TIMING.for_s
            alert = OpenAlert(True, alert.started_at, now)
        elif step is Action.EXTEND:
            alert = replace(alert, last_breach_at=now)
        elif step in {Action.DROP, Action.RESOLVE}:
            assert alert is not None
            assert result is Result.OK or not alert.is_firing
            alert = None
