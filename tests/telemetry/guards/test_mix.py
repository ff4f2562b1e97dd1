"""A baseline is weighed until it is mixed as the trial is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.guards.confidence import mix_weights

GROUPS = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 1000))


@given(trial=GROUPS, baseline=GROUPS, known=st.sets(st.sampled_from("abcd")))
def test_weights_keep_the_baseline_s_total(trial, baseline, known):
    found = mix_weights(trial, baseline, known)
    assert found.keys() == baseline.keys()
    assert sum(baseline[group] * weight for group, weight in found.items()) == pytest.approx(sum(baseline.values()))


def test_known_groups_are_weighted_to_the_canary_s_mix():
    found = mix_weights({"a": 30, "b": 10}, {"a": 100, "b": 100}, {"a", "b"})
    assert (found["a"] * 100, found["b"] * 100) == (pytest.approx(150), pytest.approx(50))


def test_groups_without_baseline_are_compared_with_all_of_it():
    found = mix_weights({"a": 10, "new": 30}, {"a": 100, "b": 100}, {"a", "b"})
    assert (found["a"] * 100, found["b"] * 100) == (pytest.approx(50 + 75), pytest.approx(75))


@pytest.mark.parametrize("known", [set(), {"a", "b"}])
def test_sides_without_common_groups_are_not_weighted(known):
    assert mix_weights({"": 7}, {"a": 100, "b": 300}, known) == pytest.approx({"a": 1.0, "b": 1.0})


@pytest.mark.parametrize(("trial", "baseline"), [({}, {"a": 3}), ({"a": 0}, {"a": 3}), ({"a": 3}, {"a": 0})])
def test_an_empty_side_is_not_weighted(trial, baseline):
    assert mix_weights(trial, baseline, {"a"}) == {"a": 1.0}
