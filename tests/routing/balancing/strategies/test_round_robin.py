from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from routing.balancing.candidates import Candidates
from routing.balancing.load_tracker import LoadTracker
from routing.balancing.strategies.baselines import RoundRobin
from routing.types import ReplicaId
from tests.routing.building import FixedKeys, names

KEYS = FixedKeys()
A, B, C, D = names(4)


def among(*replicas: ReplicaId, **weights: float) -> Candidates:
    return Candidates({name: weights.get(name[-1], 1.0) for name in replicas}, LoadTracker())


def turns(strategy: RoundRobin, candidates: Candidates, count: int) -> list[ReplicaId]:
    return [strategy.choose(KEYS, candidates).target for _ in range(count)]


def test_every_replica_gets_a_turn_before_any_gets_a_second():
    met = turns(RoundRobin(), among(A, B, C, D), 12)

    assert set(met[:4]) == {A, B, C, D}
    assert met[:4] == met[4:8] == met[8:]


def test_routers_with_different_seeds_start_at_different_replicas():
    assert len({turns(RoundRobin(seed), among(A, B, C, D), 1)[0] for seed in range(40)}) == 4


def test_the_turns_of_a_replica_that_leaves_are_shared_evenly():
    strategy = RoundRobin()
    turns(strategy, among(A, B, C, D), 6)

    assert set(Counter(turns(strategy, among(A, B, C), 300)).values()) == {100}


def test_a_replica_that_returns_does_not_catch_up():
    strategy = RoundRobin()
    turns(strategy, among(A, B), 4)
    turns(strategy, among(A), 1000)

    assert set(Counter(turns(strategy, among(A, B), 100)).values()) == {50}


def test_a_new_configuration_continues_with_the_turns_of_remaining_replicas():
    before = RoundRobin(0, (A, B, C))
    met = turns(before, among(A, B, C), 4)
    after = RoundRobin(0, (A, B, D))
    after.carry_over(before)
    met += turns(after, among(A, B, D), 300)

    assert met[3] not in met[4:6]  # it had its turn just before, so the others are next
    assert set(after._last_turns) == {A, B, D}
    assert max(Counter(met[4:]).values()) - min(Counter(met[4:]).values()) <= 1


def test_turns_stay_fair_if_retries_change_the_candidates_of_every_request():
    strategy = RoundRobin()
    everybody = among(A, B, C)
    met = Counter()
    for _ in range(300):
        first = strategy.choose(KEYS, everybody).target
        met[strategy.choose(KEYS, everybody.without({first})).target] += 1

    assert max(met.values()) - min(met.values()) <= 2


def test_turns_follow_the_weights_and_are_evenly_spread():
    weighted = Candidates({A: 3.0, B: 1.0}, LoadTracker())
    met = turns(RoundRobin(), weighted, 400)

    assert Counter(met) == {A: 300, B: 100}
    assert all(B in met[start : start + 5] for start in range(396))


@given(sets=st.lists(st.sets(st.sampled_from(names(4)), min_size=1), min_size=1, max_size=8))
def test_a_replica_that_is_always_available_gets_no_less_than_others(sets):
    strategy = RoundRobin()
    met = Counter()
    for present in sets:
        met.update(turns(strategy, among(*present), 12))

    always = set.intersection(*sets)
    assert all(met[steady] >= met[name] - len(sets) for steady in always for name in names(4))
