"""The resolutions that a window is read from: every time exactly once."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.metrics.windows import Window
from telemetry.storage.rollup_tables import RESOLUTIONS_S, Span, fit_to_retention, plan_spans, usable_resolutions

T0 = datetime(2031, 3, 4, 12, tzinfo=UTC)
DAY_S = 86_400.0
moments = st.integers(-200_000, 200_000).map(lambda seconds: T0 + timedelta(seconds=seconds))
throughs = st.fixed_dictionaries({res: st.none() | moments for res in RESOLUTIONS_S})


@given(start=moments, length_s=st.integers(1, 200_000), through=throughs, some=st.sets(st.sampled_from(RESOLUTIONS_S)))
def test_spans_touch_and_never_overlap(start, length_s, through, some):
    end = start + timedelta(seconds=length_s)

    spans = plan_spans(start, end, sorted(some), through)

    assert [span.start for span in spans] == [start, *(span.end for span in spans[:-1])]
    assert spans[-1].end == end
    for span in spans:
        assert span.start < span.end
        if span.resolution_s is not None:
            assert span.resolution_s in some
            assert span.end <= through[span.resolution_s]
            assert (span.start.timestamp() % span.resolution_s, span.end.timestamp() % span.resolution_s) == (0, 0)


def test_a_long_window_is_read_from_hours_with_finer_bins_at_its_edges():
    through = {60: T0 + timedelta(minutes=58), 300: T0 + timedelta(minutes=55), 3600: T0, 21_600: None}
    start = T0 - timedelta(hours=30, minutes=7, seconds=30)

    spans = plan_spans(start, T0 + timedelta(hours=1), RESOLUTIONS_S, through)

    assert [span.resolution_s for span in spans] == [None, 60, 300, 3600, 300, 60, None]
    assert spans[3] == Span(3600, T0 - timedelta(hours=30), T0)
    assert spans[-1] == Span(None, T0 + timedelta(minutes=58), T0 + timedelta(hours=1))


@pytest.mark.parametrize(
    ("length_s", "step_s", "off_s", "expected"),
    [
        pytest.param(900, 60, 0, [], id="short windows come from readings"),
        pytest.param(3600, 60, 0, [60], id="an hour in minutes"),
        pytest.param(3600, 15, 0, [], id="steps below a minute"),
        pytest.param(3600, 60, 7, [], id="an alert rule's windows, which end now"),
        pytest.param(6 * 3600, 120, 0, [60], id="six hours"),
        pytest.param(86_400, 900, 0, [60, 300], id="a day"),
        pytest.param(30 * 86_400, 43_200, 0, [60, 300, 3600, 21_600], id="thirty days"),
        pytest.param(30 * 86_400, 10_800, 7, [60, 300], id="thirty days, from no round time"),
        pytest.param(7 * 86_400, 60, 7, [60], id="a week of an alert's windows"),
    ],
)
def test_a_step_is_made_of_whole_bins(length_s, step_s, off_s, expected):
    start = T0 + timedelta(seconds=off_s)
    window = Window(start, start + timedelta(seconds=length_s), step_s)

    assert usable_resolutions(window, whole=False) == expected


@pytest.mark.parametrize(("age_days", "step_s"), [(1, 5), (5, 60), (30, 300), (200, 3600), (900, 3600)])
def test_steps_are_as_wide_as_the_retained_resolution(age_days, step_s):
    kept_s = {60: 14 * DAY_S, 300: 60 * DAY_S, 3600: 400 * DAY_S}
    start = T0 - timedelta(days=age_days, seconds=7)
    window = fit_to_retention(Window(start, start + timedelta(hours=1), 5), T0, kept_s, 3 * DAY_S)

    assert window.step_s == step_s
    assert start - timedelta(seconds=step_s) < window.start <= start
