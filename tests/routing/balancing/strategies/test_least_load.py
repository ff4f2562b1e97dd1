from __future__ import annotations

from collections import Counter

from routing.balancing.candidates import Candidates
from routing.balancing.load_tracker import LoadTracker
from routing.balancing.strategies.baselines import LeastLoad
from routing.types import Reason
from tests.routing.building import FixedKeys, names

KEYS = FixedKeys()
A, B, C = names(3)


def test_the_request_goes_where_the_least_work_is() -> None:
    book = LoadTracker()
    book.dispatch(A, 500)
    book.dispatch(C, 100)
    book.dispatch(B, 200)

    choice = LeastLoad().choose(KEYS, Candidates(dict.fromkeys(names(3), 1.0), book))
    assert (choice.target, choice.reason) == (C, Reason.LEAST_LOAD)


def test_equal_requests_are_spread_evenly() -> None:
    book = LoadTracker()
    candidates = Candidates(dict.fromkeys(names(3), 1.0), book)
    met = Counter()
    for _ in range(300):
        chosen = LeastLoad().choose(KEYS, candidates).target
        book.dispatch(chosen, 100)
        met[chosen] += 1

    assert set(met.values()) == {100}


def test_a_replica_that_refuses_everything_at_once_does_not_draw_every_request() -> None:
    book = LoadTracker()
    candidates = Candidates(dict.fromkeys(names(3), 1.0), book)
    met = Counter()
    for _ in range(300):
        chosen = LeastLoad().choose(KEYS, candidates).target
        ticket = book.dispatch(chosen, 100)
        met[chosen] += 1
        ticket.end()  # whether refused by A or answered quickly by the others

    assert met[A] == 100
