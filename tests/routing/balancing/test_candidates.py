from __future__ import annotations

import pytest

from routing.balancing.candidates import Candidates
from routing.balancing.load_tracker import LoadTracker
from tests.routing.building import names

A, B, C = names(3)
WEIGHTS = {A: 1.0, B: 2.0, C: 0.5}


@pytest.fixture
def book() -> LoadTracker:
    book = LoadTracker()
    for name in (A, A, B):
        book.dispatch(name, 1)
    return book


def test_without_counts_only_who_is_left(book) -> None:
    whole = Candidates(WEIGHTS, book)
    left = whole.without({A})

    assert (set(left), left.order.running, left.weight) == ({B, C}, 1, 2.5)
    assert left.without({B}).unfiltered is whole


def test_some_keep_their_order_weights_and_bits(book) -> None:
    some = Candidates(WEIGHTS, book, bits={A: 1, B: 2, C: 4}, shares={C: 0.25}).subset([C, A])

    assert [(it.target, it.weight, it.bit, it.share) for it in some.members] == [(C, 0.5, 4, 0.25), (A, 1.0, 1, 1.0)]
    assert (some.mask, some.greatest_weight, some.is_even) == (5, 1.0, False)
    assert some.by_bit[4] is some.by_name[C]
