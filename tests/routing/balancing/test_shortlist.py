from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.balancing.candidates import Candidates
from routing.balancing.cost import HOLDERS, bits_of, lightest, some_bits
from routing.balancing.load_tracker import LoadTracker
from routing.balancing.residency import Residency
from tests.routing.building import names

FLEET = names(100)
SPREAD = 0x9E3779B97F4A7C15  # makes keys of numbers


def fleet() -> tuple[Candidates, LoadTracker]:
    book, residency = LoadTracker(lambda: 0.0), Residency()
    bits = {name: residency.add_replica(name).bit for name in FLEET}
    return Candidates(dict.fromkeys(FLEET, 1.0), book, bits=bits), book


@given(st.sets(st.integers(0, 300), max_size=60), st.integers(0, 8), st.integers(0, 2**64 - 1))
def test_as_many_bits_are_shown_as_a_mask_has_and_the_same_ones_each_time(numbers, count: int, key: int) -> None:
    mask = sum(1 << number for number in numbers)
    shown = some_bits(mask, count, key)

    assert len(shown) == len(set(shown)) == min(count, len(numbers))
    assert set(shown) <= set(bits_of(mask))
    assert shown == some_bits(mask, count, key)


@pytest.mark.parametrize("numbers", [range(100), [*range(50), 990], [3, 4, 5, 500, 501, 998, 999]])
def test_every_bit_has_the_same_chance_however_they_lie(numbers) -> None:
    mask = sum(1 << number for number in numbers)
    shown = Counter(bit for key in range(20 * len(numbers)) for bit in some_bits(mask, HOLDERS, key))

    assert set(shown) == set(bits_of(mask))
    assert set(shown.values()) == {20 * HOLDERS}


def test_of_many_holders_the_one_with_nothing_to_do_is_found_whoever_it_is() -> None:
    for idle in (0, 7, 50, 99):
        candidates, book = fleet()
        for number, name in enumerate(FLEET):
            if number != idle:
                book.dispatch(name, 1000 + 50 * number)
        found = lightest(candidates.mask, 5, candidates)
        assert found[0].target == FLEET[idle]
        assert len(found) == HOLDERS


def test_the_lightest_follow_the_loads() -> None:
    candidates, book = fleet()
    holders = candidates.by_name[FLEET[3]].bit | sum(candidates.by_name[name].bit for name in FLEET[60:])
    tickets = [book.dispatch(name, 5000) for name in FLEET]
    tickets[3].end()
    assert lightest(holders, 1, candidates)[0].target == FLEET[3]

    book.dispatch(FLEET[3], 50_000)
    for ticket in tickets[70:74]:
        ticket.end()
    assert {member.target for member in lightest(holders, 1, candidates)} == set(FLEET[70:74])


def test_requests_about_what_many_hold_are_shared_out_among_all_of_them() -> None:
    candidates, book = fleet()
    holders = sum(candidates.by_name[name].bit for name in (*FLEET[:30], FLEET[99]))
    taken = Counter()
    for number in range(31 * 100):
        found = lightest(holders, number * SPREAD % 2**64, candidates)[0].target
        book.dispatch(found, 100).end()
        taken[found] += 1

    assert len(taken) == 31
    assert max(taken.values()) < 150
