from __future__ import annotations

from collections import Counter

import pytest

from routing.balancing.candidates import Candidates
from routing.balancing.load_tracker import JOURNAL_ENTRIES, LoadTracker
from tests.routing.building import names

A, B, C = names(3)
WEIGHTS = {A: 1.0, B: 2.0, C: 0.5}


@pytest.fixture
def tracker() -> LoadTracker:
    tracker = LoadTracker()
    for name in (A, A, B):
        tracker.dispatch(name, 1)
    return tracker


def test_sums_after_exclusion_cover_the_remaining_candidates(tracker) -> None:
    whole = Candidates(WEIGHTS, tracker)
    remaining = whole.without({A})

    assert (set(remaining), remaining.order.busy_ratio) == ({B, C}, 0.5)
    assert remaining.without({B}).unfiltered is whole


def test_a_subset_keeps_order_weights_and_bits(tracker) -> None:
    some = Candidates(WEIGHTS, tracker, bits={A: 1, B: 2, C: 4}, shares={C: 0.25}).subset([C, A])

    assert [(it.target, it.weight, it.bit, it.share) for it in some.members] == [(C, 0.5, 4, 0.25), (A, 1.0, 1, 1.0)]
    assert (some.mask, some.greatest_weight) == (5, 1.0)
    assert some.by_bit[4] is some.by_name[C]


A, B, C, D = names(4)


def all_of(tracker: LoadTracker, seed: int = 0) -> Candidates:
    return Candidates(dict.fromkeys(names(4), 1.0), tracker, seed)


def test_replicas_with_prompts_to_prefill_count_as_busy() -> None:
    tracker = LoadTracker()
    ticket = tracker.dispatch(A, 5)
    candidates = all_of(tracker)
    tracker.dispatch(A, 5)
    others = [tracker.dispatch(name, tokens) for name, tokens in ((B, 5), (C, 0))]
    assert candidates.order.busy_ratio == 0.5

    others[0].record_first_byte()
    ticket.end()
    assert candidates.order.busy_ratio == 0.25


def test_sums_are_correct_after_more_changes_than_the_journal_keeps() -> None:
    tracker = LoadTracker()
    candidates = all_of(tracker)
    for _ in range(3 * JOURNAL_ENTRIES):
        tracker.dispatch(A, 1).end()
    tracker.dispatch(B, 1)

    assert candidates.order.busy_ratio == 0.25


@pytest.mark.parametrize("weight", [1e-20, 5e-324])
def test_a_replica_of_tiny_weight_has_the_most_work(weight: float) -> None:
    tracker = LoadTracker()
    candidates = Candidates({A: weight, B: 1.0}, tracker, bits={A: 1, B: 2})
    for name in (A, B, B):
        tracker.dispatch(name, 100)

    assert candidates.order.least_loaded() == B
    assert candidates.order.work_classes()[-1] == 1


def test_equally_loaded_replicas_take_turns() -> None:
    tracker = LoadTracker()
    candidates = all_of(tracker)
    turns = Counter()
    for _ in range(400):
        chosen = candidates.order.least_loaded()
        turns[chosen] += 1
        tracker.dispatch(chosen, 50).end()  # it ends before the next request

    assert set(turns.values()) == {100}


def test_equally_loaded_replicas_take_turns_with_many_changes_in_between() -> None:
    tracker = LoadTracker()
    candidates = all_of(tracker)
    turns = Counter()
    for _ in range(400):
        chosen = candidates.order.least_loaded()
        turns[chosen] += 1
        tracker.dispatch(chosen, 50).end()
        for name in names(4) * 20:  # requests of others start and end, in the order of the configuration
            tracker.dispatch(name, 10).end()

    assert max(turns.values()) < 160


def test_routers_with_different_seeds_start_at_different_replicas() -> None:
    assert len({all_of(LoadTracker(), seed).order.least_loaded() for seed in range(40)}) == 4


def test_the_heap_stays_small() -> None:
    tracker = LoadTracker()
    candidates = all_of(tracker)
    for _ in range(5000):
        tracker.dispatch(candidates.order.least_loaded(), 10)

    assert len(candidates.order._heap) < 100
