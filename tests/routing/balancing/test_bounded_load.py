from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.balancing.candidates import Candidates
from routing.balancing.hash_ring import bounded_choice
from routing.balancing.load_tracker import LoadTracker
from routing.types import Reason, ReplicaId
from tests.routing.building import names


def holding(*running: int, weights: list[float] | None = None) -> Candidates:
    """Candidates replica-0, replica-1 ... that hold so many requests."""
    book = LoadTracker()
    fleet = names(len(running))
    for name, count in zip(fleet, running, strict=True):
        for _ in range(count):
            book.dispatch(name, 10)
    return Candidates(dict(zip(fleet, weights or [1.0] * len(fleet), strict=True)), book)


def order(*numbers: int) -> list[ReplicaId]:
    return [ReplicaId(f"replica-{number}") for number in numbers]


def test_an_idle_home_takes_its_own() -> None:
    choice = bounded_choice(order(2, 0, 1), holding(0, 0, 0), 1.25, 4)

    assert (choice.target, choice.reason, choice.skipped, choice.bound) == ("replica-2", Reason.AFFINITY, (), 4)


def test_a_full_home_spills_to_the_next_in_order() -> None:
    # 1.25 * (20 + 1) / 3 = 8.75: a replica may hold 9
    choice = bounded_choice(order(2, 0, 1), holding(9, 2, 9), 1.25, 4)

    assert (choice.target, choice.reason) == ("replica-1", Reason.SPILL)
    assert choice.skipped == ("replica-2", "replica-0")
    assert choice.bound == 9


def test_the_new_request_counts_itself() -> None:
    # 1.0 * (7 + 1) / 2 = 4, so the home may hold 4 and holds 4 already
    assert bounded_choice(order(0, 1), holding(4, 3), 1.0, 1).target == "replica-1"
    assert bounded_choice(order(0, 1), holding(3, 4), 1.0, 1).target == "replica-0"


def test_a_few_requests_stay_together_whatever_the_mean() -> None:
    assert bounded_choice(order(0, 1, 2, 3), holding(3, 0, 0, 0), 1.25, 4).target == "replica-0"
    assert bounded_choice(order(0, 1, 2, 3), holding(4, 0, 0, 0), 1.25, 4).target == "replica-1"


def test_a_heavier_replica_may_hold_more() -> None:
    # 1.0 * (8 + 1) * 3 / 4 = 6.75 against 1.0 * (8 + 1) * 1 / 4 = 2.25
    assert bounded_choice(order(0, 1), holding(6, 2, weights=[3.0, 1.0]), 1.0, 1).bound == 7
    assert bounded_choice(order(1, 0), holding(5, 3, weights=[3.0, 1.0]), 1.0, 1).target == "replica-0"


def test_homes_that_are_no_candidates_are_passed_without_being_full() -> None:
    choice = bounded_choice(order(7, 1, 0), holding(0, 0), 1.25, 4)

    assert (choice.target, choice.reason, choice.skipped) == ("replica-1", Reason.AFFINITY, ())


def test_only_candidates_count_towards_the_mean() -> None:
    book = LoadTracker()
    for _ in range(100):
        book.dispatch(ReplicaId("replica-9"), 1)
    for _ in range(4):
        book.dispatch(ReplicaId("replica-0"), 1)
    candidates = Candidates(dict.fromkeys(names(2), 1.0), book)

    assert bounded_choice(order(0, 1), candidates, 1.25, 4).target == "replica-1"


def test_where_every_home_refuses_the_least_loaded_takes_it_and_not_the_first() -> None:
    choice = bounded_choice(order(0, 1), holding(9, 9, 1), 1.0, 1)  # an order that leaves the last one out

    assert (choice.target, choice.reason, choice.bound) == ("replica-2", Reason.SPILL, None)


@given(
    running=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    load_factor=st.sampled_from([1.0, 1.25, 2.0, 3.0]),
    min_bound=st.integers(1, 6),
    data=st.data(),
)
def test_no_replica_is_pushed_past_its_share(
    running: list[int], load_factor: float, min_bound: int, data: st.DataObject
) -> None:
    weights = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=len(running), max_size=len(running)))
    home_order = data.draw(st.permutations(names(len(running))))
    candidates = holding(*running, weights=weights)

    choice = bounded_choice(home_order, candidates, load_factor, min_bound)

    def bound(number: int) -> int:
        mean_weight = Fraction(sum(map(Fraction, weights)), len(weights))
        share = Fraction(load_factor) * (sum(running) + 1) / len(running) * Fraction(weights[number]) / mean_weight
        return max(min_bound, math.ceil(share))

    has_room = [name for name in home_order if running[int(name[-1])] + 1 <= bound(int(name[-1]))]
    assert choice.target == has_room[0]
    assert choice.reason is (Reason.AFFINITY if choice.target == home_order[0] else Reason.SPILL)
    assert choice.bound == bound(int(choice.target[-1]))


@pytest.mark.parametrize("load_factor", [1.0, 1.25, 2.0])
def test_a_hot_key_spills_to_the_same_homes_in_the_same_order(load_factor: float) -> None:
    book = LoadTracker()
    candidates = Candidates(dict.fromkeys(names(6), 1.0), book)
    home_order = order(3, 5, 0, 1, 4, 2)
    met: list[ReplicaId] = []
    for _ in range(200):
        replica = bounded_choice(home_order, candidates, load_factor, 4).target
        book.dispatch(replica, 1)
        if replica not in met:
            met.append(replica)

    assert met == home_order[: len(met)]
    assert max(load.running for load in candidates.loads.values()) <= math.ceil(load_factor * 200 / 6)
