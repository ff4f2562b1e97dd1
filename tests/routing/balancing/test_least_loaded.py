from __future__ import annotations

from collections import Counter

import pytest

from routing.balancing.candidates import Candidates
from routing.balancing.load_tracker import JOURNAL_ENTRIES, LoadTracker
from tests.routing.building import names

A, B, C, D = names(4)


def all_of(book: LoadTracker, seed: int = 0) -> Candidates:
    return Candidates(dict.fromkeys(names(4), 1.0), book, seed)


def test_requests_that_ran_before_are_counted() -> None:
    book = LoadTracker()
    book.dispatch(A, 1)

    assert all_of(book).order.running == 1


def test_sums_follow_every_change() -> None:
    book = LoadTracker()
    candidates = all_of(book)
    tickets = [book.dispatch(name, 5) for name in (A, B, B)]
    assert candidates.order.running == 3

    tickets[1].end()
    assert candidates.order.running == 2


def test_those_count_as_busy_that_have_prompts_to_prefill() -> None:
    book = LoadTracker()
    ticket = book.dispatch(A, 5)
    candidates = all_of(book)
    book.dispatch(A, 5)
    others = [book.dispatch(name, tokens) for name, tokens in ((B, 5), (C, 0))]
    assert candidates.order.busy_ratio == 0.5

    others[0].first_byte()
    ticket.end()
    assert candidates.order.busy_ratio == 0.25


def test_sums_are_right_after_more_changes_than_are_remembered() -> None:
    book = LoadTracker()
    candidates = all_of(book)
    for _ in range(3 * JOURNAL_ENTRIES):
        book.dispatch(A, 1).end()
    book.dispatch(B, 1)

    assert candidates.order.running == 1


def test_the_least_loaded_has_the_least_work_by_weight() -> None:
    book = LoadTracker()
    candidates = Candidates({A: 4.0, B: 1.0}, book)
    for _ in range(3):
        book.dispatch(A, 100)
    book.dispatch(B, 100)

    assert candidates.order.least_loaded() == A


@pytest.mark.parametrize("weight", [1e-20, 5e-324])
def test_whoever_has_next_to_no_weight_has_the_most_work(weight: float) -> None:
    book = LoadTracker()
    candidates = Candidates({A: weight, B: 1.0}, book, bits={A: 1, B: 2})
    for name in (A, B, B):
        book.dispatch(name, 100)

    assert candidates.order.least_loaded() == B
    assert candidates.order.work_classes()[-1] == 1


def test_a_waiting_prompt_outweighs_a_running_answer() -> None:
    book = LoadTracker()
    candidates = Candidates({A: 1.0, B: 1.0}, book)
    book.dispatch(A, 8000)
    for _ in range(3):
        book.dispatch(B, 8000).first_byte()

    assert candidates.order.least_loaded() == B


def test_equal_work_is_shared_in_turn_and_never_all_to_the_same() -> None:
    book = LoadTracker()
    candidates = all_of(book)
    met = Counter()
    for _ in range(400):
        chosen = candidates.order.least_loaded()
        met[chosen] += 1
        book.dispatch(chosen, 50).end()  # refused at once, or answered before the next one comes

    assert set(met.values()) == {100}


def test_equal_work_is_shared_however_much_happens_between_two_requests() -> None:
    book = LoadTracker()
    candidates = all_of(book)
    met = Counter()
    for _ in range(400):
        chosen = candidates.order.least_loaded()
        met[chosen] += 1
        book.dispatch(chosen, 50).end()
        for name in names(4) * 20:  # others of the same pool come and go, in the order of the configuration
            book.dispatch(name, 10).end()

    assert max(met.values()) < 160


def test_all_take_part_though_they_change_together_in_the_order_of_the_configuration() -> None:
    book = LoadTracker()
    candidates = all_of(book)
    first = candidates.order.least_loaded()
    for name in (A, B, C, D, first):
        book.dispatch(name, 50).end()

    assert candidates.order.least_loaded() == next(name for name in names(4) if name != first)


def test_routers_with_other_seeds_begin_elsewhere() -> None:
    assert len({all_of(LoadTracker(), seed).order.least_loaded() for seed in range(40)}) == 4


def test_the_heap_stays_small() -> None:
    book = LoadTracker()
    candidates = all_of(book)
    for _ in range(5000):
        book.dispatch(candidates.order.least_loaded(), 10)

    assert len(candidates.order._heap) < 100
