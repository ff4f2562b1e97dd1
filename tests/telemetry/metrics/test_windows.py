from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.metrics.windows import POINTS, Window, choose_step

NOON = datetime(2031, 3, 4, 12, 0, 3, tzinfo=UTC)


def test_the_last_hour_begins_on_a_whole_step_so_that_refreshes_agree():
    first = Window.last(3600, until=NOON)
    second = Window.last(3600, until=NOON + timedelta(seconds=5))

    assert first.step_s == second.step_s == 15
    assert first.start == second.start == datetime(2031, 3, 4, 11, 0, tzinfo=UTC)
    assert first.end == NOON


def test_steps_cover_the_window_and_the_last_may_be_cut_short():
    window = Window(NOON, NOON + timedelta(seconds=25), 10)

    assert [(start - NOON).total_seconds() for start in window.starts()] == [0, 10, 20]


@given(length_s=st.floats(1, 90 * 86_400))
def test_a_step_draws_any_length_in_few_points(length_s):
    step = choose_step(length_s)

    assert length_s / step <= POINTS + 1
    assert step >= 5


@pytest.mark.parametrize(("end", "step_s"), [(NOON, 10), (NOON - timedelta(seconds=1), 10), (NOON + timedelta(1), 0)])
def test_a_window_that_is_none_is_refused(end, step_s):
    with pytest.raises(ValueError, match="window"):
        Window(NOON, end, step_s)
