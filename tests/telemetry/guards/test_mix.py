"""Weights that give the baseline the canary's mix of task groups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.guards.confidence import mix_weights

GROUPS = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 1000))


@given(canary=GROUPS, baseline=GROUPS, measured_groups=st.sets(st.sampled_from("abcd")))
def test_weights_keep_the_baseline_s_total(canary, baseline, measured_groups):
    weights = mix_weights(canary, baseline, measured_groups)
    assert weights.keys() == baseline.keys()
    assert sum(baseline[group] * weight for group, weight in weights.items()) == pytest.approx(sum(baseline.values()))


def test_known_groups_are_weighted_to_the_canary_s_mix():
    weights = mix_weights({"a": 30, "b": 10}, {"a": 100, "b": 100}, {"a", "b"})
    assert (weights["a"] * 100, weights["b"] * 100) == (pytest.approx(150), pytest.approx(50))


def test_groups_without_baseline_are_compared_with_all_of_it():
    weights = mix_weights({"a": 10, "new": 30}, {"a": 100, "b": 100}, {"a", "b"})
    assert (weights["a"] * 100, weights["b"] * 100) == (pytest.approx(50 + 75), pytest.approx(75))


@pytest.mark.parametrize("measured_groups", [set(), {"a", "b"}])
def test_sides_without_common_groups_are_not_weighted(measured_groups):
    assert mix_weights({"": 7}, {"a": 100, "b": 300}, measured_groups) == pytest.approx({"a": 1.0, "b": 1.0})


@pytest.mark.parametrize(("canary", "baseline"), [({}, {"a": 3}), ({"a": 0}, {"a": 3}), ({"a": 3}, {"a": 0})])
def test_an_empty_side_is_not_weighted(canary, baseline):
    assert mix_weights(canary, baseline, {"a"}) == {"a": 1.0}
