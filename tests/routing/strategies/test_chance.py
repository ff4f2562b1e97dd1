from __future__ import annotations

import random
from collections import Counter

import pytest

from routing.core.candidates import Candidates
from routing.core.load import LoadBook
from routing.core.types import Reason
from routing.strategies.power_of_two import PowerOfTwo
from routing.strategies.random import Random
from tests.routing.building import FixedKeys, names

A, B, C = names(3)
KEYS = FixedKeys()


@pytest.mark.parametrize("strategy", [Random, PowerOfTwo])
def test_an_idle_fleet_is_drawn_from_by_weight(strategy) -> None:
    candidates = Candidates({A: 1.0, B: 2.0, C: 1.0}, LoadBook())
    drawn = strategy(random.Random(1))
    counts = Counter(drawn.choose(KEYS, candidates).replica for _ in range(4000))

    assert counts[B] == pytest.approx(2000, rel=0.1)
    assert counts[A] == pytest.approx(1000, rel=0.15)


def test_of_two_the_less_loaded_is_taken() -> None:
    book = LoadBook()
    candidates = Candidates(dict.fromkeys((A, B), 1.0), book)
    book.dispatch(A, 1000)
    choices = [PowerOfTwo(random.Random(seed)).choose(KEYS, candidates) for seed in range(400)]

    assert {choice.reason for choice in choices} == {Reason.LESS_OF_TWO}
    assert Counter(choice.replica for choice in choices)[B] == pytest.approx(300, rel=0.1)


def test_two_choices_keep_loads_closer_than_chance() -> None:
    def spread(strategy) -> int:
        book = LoadBook()
        candidates = Candidates(dict.fromkeys(names(50), 1.0), book)
        for _ in range(5000):
            book.dispatch(strategy.choose(KEYS, candidates).replica, 10)
        running = [load.running for load in candidates.loads.values()]
        return max(running) - min(running)

    assert spread(PowerOfTwo(random.Random(2))) < 0.3 * spread(Random(random.Random(2)))


def test_seeds_set_routers_apart() -> None:
    candidates = Candidates(dict.fromkeys(names(20), 1.0), LoadBook())
    sequences = {tuple(one.choose(KEYS, candidates).replica for _ in range(5)) for one in map(
        Random, map(random.Random, range(10)))}  # fmt: skip

    assert len(sequences) == 10
