"""Quantiles in a report."""

from __future__ import annotations

from routing.replay.replay import quantile


def test_a_quantile_is_a_value_that_occurs() -> None:
    assert [quantile([1.0, 2.0, 3.0, 4.0], q) for q in (0.0, 0.5, 0.51, 1.0)] == [1.0, 2.0, 3.0, 4.0]


def test_no_values_have_no_quantile() -> None:
    assert quantile([], 0.5) is None
