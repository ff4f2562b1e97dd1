"""Confidence bounds that hold for repeated analyses."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.guards.confidence import Cell, difference

parts = st.lists(st.integers(0, 1000).flatmap(lambda of: st.tuples(st.integers(0, of), st.just(of))), max_size=30)


def cell(numerators, denominators=None, *, bins=None, prompts=None) -> Cell:
    """Requests of prompts and bins of their own, unless stated otherwise."""
    numbers, each = np.array(numerators, np.float64), np.arange(len(numerators))
    of = np.ones(len(numerators)) if denominators is None else np.array(denominators, np.float64)
    return Cell(numbers, of, each if bins is None else np.array(bins), each if prompts is None else np.array(prompts))


def margin(now, before=None, *, by_prompts=False, counts_events=False, effect=0.0) -> float:
    return difference(now, before, by_prompts=by_prompts, counts_events=counts_events, effect=effect).margin


def lost(before: bool, ratio: float, *, counts_events: bool, rate: int = 60, runs: int = 60) -> int:
    """In how many runs a side without an effect is ever certainly higher."""
    found = 0
    for seed in range(runs):
        rng = np.random.default_rng(seed)

        def side(bins, rng=rng):
            each = np.repeat(np.arange(bins), rng.poisson(rate, bins))
            return (rng.random(len(each)) < ratio) * 1.0, each

        sides = [side(80) for _ in range(2)]
        past = tuple(cell(hits, bins=bins) for hits, bins in (side(60), side(60))) if before else None
        for until in range(3, 80, 2):
            now = (cell(hits[bins < until], bins=bins[bins < until]) for hits, bins in sides)
            result = difference(tuple(now), past, by_prompts=False, counts_events=counts_events)
            if result.value > result.margin:
                found += 1
                break
    return found


@pytest.mark.parametrize("before", [True, False])
def test_the_truth_stays_within_the_margin_in_19_of_20_runs(before: bool) -> None:
    assert lost(before, 0.3, counts_events=False) <= 3


@pytest.mark.parametrize("rate", [20, 200])
def test_rare_events_are_not_certain_because_they_are_skewed(rate: int) -> None:
    assert lost(True, 0.004, counts_events=True, rate=rate) <= 3


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
    assert margin((none, none), counts_events=True) > 0.01


def test_failures_that_come_at_once_are_not_as_many_events() -> None:
    """The baseline's past shows bursts of ten failures of a prompt; the canary has had none yet."""
    bins, prompts = np.repeat(np.arange(60), 100), np.tile(np.repeat(np.arange(10), 10), 60)
    bursts = ((bins % 10 == 3) & (prompts == 4)) * 1.0
    singles = ((np.arange(6000) % 100) == 7) * 1.0
    sides = [cell(failed, bins=bins, prompts=prompts) for failed in (singles, bursts)]
    now = cell(singles[:1000], bins=bins[:1000], prompts=prompts[:1000])
    with_bursts, without = (margin((now, now), (sides[0], past), counts_events=True) for past in reversed(sides))
    assert with_bursts > 2 * without


def test_a_prompt_s_own_level_is_no_difference() -> None:
    """One side has the prompts that always hit, the other those that never do; neither has changed."""
    bins, prompts = np.tile(np.arange(20), 10), np.repeat(np.arange(10), 20)
    ours, theirs = (cell((prompts % 2 == side) * 1.0, bins=bins, prompts=prompts + 10 * side) for side in (0, 1))
    high, low = cell([1.0] * 200, bins=bins, prompts=prompts), cell([0.0] * 200, bins=bins, prompts=prompts + 10)
    now = difference((high, low), None, by_prompts=True, counts_events=False)
    found = difference((high, low), (high, low), by_prompts=True, counts_events=False)
    assert (now.value, found.value) == (1.0, 0.0)
    unchanged = difference((ours, theirs), (ours, theirs), by_prompts=True, counts_events=False)
    assert unchanged.margin < margin((ours, theirs), by_prompts=True) / 5


def test_the_jackknife_moves_as_if_a_prompt_were_left_out() -> None:
    rng = np.random.default_rng(5)
    numerators, denominators, prompts = rng.random(50), 1 + rng.random(50), rng.integers(0, 7, 50)
    whole = cell(numerators, denominators, prompts=prompts)
    for prompt, moved in enumerate(whole.moves(7)):
        rest = prompts != prompt
        assert whole.ratio - moved == pytest.approx(numerators[rest].sum() / denominators[rest].sum())


@pytest.mark.parametrize("own_change", [0.0, 0.1])
def test_prompts_that_change_by_themselves_widen_the_margin_of_few_prompts(own_change: float) -> None:
    rng = np.random.default_rng(7)
    bins = np.arange(4000) % 20
    widths = []
    for prompts in (6, 60):
        cells = []
        for side in range(2):
            of = side * prompts + rng.integers(0, prompts, 4000)
            level = 0.5 + rng.normal(0, own_change, 2 * prompts)[of]
            cells.append([cell((rng.random(4000) < each) * 1.0, bins=bins, prompts=of) for each in (level, 0.5)])
        now, before = zip(*cells, strict=True)
        widths.append(margin(now, before, by_prompts=True))
    assert (widths[0] > 2 * widths[1]) == (own_change > 0)


def test_one_prompt_of_the_canary_does_not_decide() -> None:
    """One of eight prompts never hits again; the others, and those of the baseline, are as before."""
    bins, prompts = np.repeat(np.arange(20), 160), np.tile(np.arange(8), 400)
    hits = np.random.default_rng(3).random((4, 3200)) < 0.6
    before = tuple(cell(hits[side] * 1.0, bins=bins, prompts=prompts + 8 * side) for side in range(2))
    canary = cell(hits[2] * (prompts != 3), bins=bins, prompts=prompts)
    now = (canary, cell(hits[3] * 1.0, bins=bins, prompts=prompts + 8))
    found = difference(now, before, by_prompts=True, counts_events=False)
    assert found.value == pytest.approx(-0.6 / 8, abs=0.03)
    assert margin(now, before) < -found.value < found.margin


def test_what_chance_gives_a_prompt_does_not_widen_the_margin() -> None:
    """Eight prompts that have not changed: each moves the difference by chance alone."""
    bins, prompts = np.repeat(np.arange(20), 16), np.tile(np.arange(8), 40)
    hits = np.random.default_rng(11).random((4, 320)) < 0.6
    cells = [cell(hits[n] * 1.0, bins=bins, prompts=prompts + 8 * (n % 2)) for n in range(4)]
    now, before = (cells[0], cells[1]), (cells[2], cells[3])
    assert margin(now, before, by_prompts=True) < 1.05 * margin(now, before)


def test_one_prompt_has_an_infinite_margin_and_an_effective_number_of_1() -> None:
    lone, other = cell([0, 1, 1, 0], prompts=[0] * 4), cell([0, 1, 1, 0], prompts=[1, 2, 3, 4])
    assert lone.effective_prompts == 1
    assert margin((lone, other), by_prompts=True) == inf
