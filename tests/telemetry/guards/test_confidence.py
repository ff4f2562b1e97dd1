"""Confidence bounds that hold for repeated analyses."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.guards.confidence import Cell, difference, max_error, student

parts = st.lists(st.integers(0, 1000).flatmap(lambda of: st.tuples(st.integers(0, of), st.just(of))), max_size=30)


def cell(numerators, denominators=None, *, bins=None, prompts=None) -> Cell:
    """Requests of prompts and bins of their own, unless stated otherwise."""
    numbers, each = np.array(numerators, np.float64), np.arange(len(numerators))
    of = np.ones(len(numerators)) if denominators is None else np.array(denominators, np.float64)
    return Cell(numbers, of, each if bins is None else np.array(bins), each if prompts is None else np.array(prompts))


def margin(now, before=None, *, effective_prompts=None, counts_events=False) -> float:
    return difference(now, before, effective_prompts=effective_prompts, counts_events=counts_events).margin


def test_the_truth_stays_within_the_margin_in_19_of_20_runs() -> None:
    lost = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        bins = np.repeat(np.arange(100), rng.integers(20, 100, 100))
        sides = [(rng.random(len(bins)) < 0.3) * 1.0 for _ in range(2)]
        for until in range(5, 100, 3):
            end = int(np.searchsorted(bins, until))
            found = difference(
                tuple(cell(side[:end], bins=bins[:end]) for side in sides),
                None,
                effective_prompts=None,
                counts_events=False,
            )
            if abs(found.value) > found.margin:
                lost += 1
                break
    assert lost <= 3


@given(parts)
def test_a_ratio_is_sum_over_sum_and_never_a_mean_of_rates(bins: list[tuple[int, int]]) -> None:
    found = cell([part for part, _ in bins], [of for _, of in bins])
    total = sum(of for _, of in bins)
    if total == 0:
        assert found.ratio is None
    else:
        assert found.ratio == pytest.approx(sum(part for part, _ in bins) / total)
        assert found.deviations.sum() == pytest.approx(0, abs=1e-9)


def test_a_share_of_events_is_never_certain() -> None:
    none = cell([0.0] * 300, bins=[number // 100 for number in range(300)])
    assert margin((none, none)) == 0
    assert margin((none, none), counts_events=True) > 0.01


def test_common_changes_are_no_difference() -> None:
    moods = np.random.default_rng(3).uniform(0.2, 0.8, 20)
    one, other = cell(1000 * moods, [1000] * 20), cell(2000 * moods - 100, [2000] * 20)
    found = difference((one, other), None, effective_prompts=None, counts_events=False)
    assert found.value == pytest.approx(0.05)
    assert found.margin < 1e-9


def test_a_prompt_s_own_level_is_no_difference() -> None:
    """One side has the prompts that always hit, the other those that never do; neither has changed."""
    bins, prompts = np.tile(np.arange(20), 10), np.repeat(np.arange(10), 20)
    ours, theirs = (cell((prompts % 2 == side) * 1.0, bins=bins, prompts=prompts + 10 * side) for side in (0, 1))
    high, low = cell([1.0] * 200, bins=bins, prompts=prompts), cell([0.0] * 200, bins=bins, prompts=prompts + 10)
    now = difference((high, low), None, effective_prompts=10.0, counts_events=False)
    found = difference((high, low), (high, low), effective_prompts=10.0, counts_events=False)
    assert (now.value, found.value) == (1.0, 0.0)
    unchanged = difference((ours, theirs), (ours, theirs), effective_prompts=10.0, counts_events=False)
    assert unchanged.margin < margin((ours, theirs), effective_prompts=10.0) / 5


def test_the_jackknife_moves_as_if_a_prompt_were_left_out() -> None:
    rng = np.random.default_rng(5)
    numerators, denominators, prompts = rng.random(50), 1 + rng.random(50), rng.integers(0, 7, 50)
    whole = cell(numerators, denominators, prompts=prompts)
    for prompt, moved in enumerate(whole.moves(7)):
        rest = prompts != prompt
        assert whole.ratio - moved == pytest.approx(numerators[rest].sum() / denominators[rest].sum())


def test_few_prompts_widen_the_margin() -> None:
    rng = np.random.default_rng(7)
    bins = np.arange(4000) % 20
    hits = [(rng.random(4000) < 0.5) * 1.0 for _ in range(2)]
    widths = []
    for prompts in (5, 50):
        pair = tuple(cell(side, bins=bins, prompts=rng.integers(0, prompts, 4000)) for side in hits)
        widths.append(margin(pair, effective_prompts=min(each.effective_prompts for each in pair)))
    assert widths[0] > 1.5 * widths[1]


def test_one_prompt_has_an_infinite_margin_and_an_effective_number_of_1() -> None:
    lone, other = cell([0, 1, 1, 0], prompts=[0] * 4), cell([0, 1, 1, 0])
    assert lone.effective_prompts == 1
    assert margin((lone, other), effective_prompts=2.0) == inf


def test_bounds_tighten_with_the_number_of_bins() -> None:
    assert max_error(3) > max_error(10) > max_error(100) > max_error(1000)
    pair = cell([0, 1]), cell([1, 0])
    assert margin(pair) == inf
    assert margin((cell([0, 1, 1]), cell([1, 0, 1]))) < inf


@pytest.mark.parametrize(("freedom", "expected"), [(4, 8.61), (9, 4.78), (30, 3.65), (1e6, 3.29)])
def test_student_s_quantile_is_close_to_the_tables(freedom: float, expected: float) -> None:
    assert student(3.2905, freedom) == pytest.approx(expected, rel=0.06)  # one in 2,000
