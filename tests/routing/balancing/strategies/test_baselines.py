from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from routing.balancing.candidates import Candidates
from routing.balancing.load_tracker import LoadTracker
from routing.balancing.placement import Placement
from routing.balancing.replicas import HealthRegistry
from routing.balancing.strategies.baselines import PowerOfTwo, Random, RoundRobin
from routing.schema import (
    Canary,
    LeastLoadSettings,
    PolicyConfig,
    PowerOfTwoSettings,
    RandomSettings,
    RoundRobinSettings,
    Settings,
    TaskGroupConfig,
)
from routing.types import Reason, ReplicaId
from tests.routing.building import FixedKeys, config, names, pool, replicas, request

A, B, C, D = names(4)
KEYS = FixedKeys()


@pytest.mark.parametrize("strategy", [Random, PowerOfTwo])
def test_random_choices_follow_the_weights(strategy):
    candidates = Candidates({A: 1.0, B: 2.0, C: 1.0}, LoadTracker())
    drawn = strategy(random.Random(1))
    counts = Counter(drawn.choose(KEYS, candidates).target for _ in range(4000))

    assert counts[B] == pytest.approx(2000, rel=0.1)
    assert counts[A] == pytest.approx(1000, rel=0.15)


def test_the_less_loaded_of_two_is_chosen():
    tracker = LoadTracker()
    candidates = Candidates(dict.fromkeys((A, B), 1.0), tracker)
    tracker.dispatch(A, 1000)
    choices = [PowerOfTwo(random.Random(seed)).choose(KEYS, candidates) for seed in range(400)]

    assert {choice.reason for choice in choices} == {Reason.LESS_OF_TWO}
    assert Counter(choice.target for choice in choices)[B] > 370  # the second draw nearly always differs from the first


def test_the_second_draw_ends_even_if_one_replica_has_nearly_all_weight():
    for weights in ({A: 1000.0, B: 0.001}, {A: 1.0}):
        candidates = Candidates(weights, LoadTracker())

        assert PowerOfTwo(random.Random(1)).choose(KEYS, candidates).target == A


def test_two_choices_balance_better_than_random():
    def spread(strategy) -> int:
        tracker = LoadTracker()
        candidates = Candidates(dict.fromkeys(names(50), 1.0), tracker)
        for _ in range(5000):
            tracker.dispatch(strategy.choose(KEYS, candidates).target, 10)
        running = [load.running for load in candidates.loads.values()]
        return max(running) - min(running)

    assert spread(PowerOfTwo(random.Random(2))) < 0.3 * spread(Random(random.Random(2)))


GROUPS = tuple(TaskGroupConfig(name=name) for name in ("chat", "batch", "coding"))


def of_groups(settings: Settings, seed: int = 7, count: int = 30) -> list[list[str]]:
    """The replicas that the groups of a pool, and its own requests, choose; no request is dispatched."""
    placement = Placement(config(pool(settings, replicas(12), GROUPS)), LoadTracker(), seed)
    asking = [request(group=it) for it in (None, "chat", "batch", "coding")]
    rounds = [[placement.decide(it, HealthRegistry()).choice.target for it in asking] for _ in range(count)]
    return [list(chosen) for chosen in zip(*rounds, strict=True)]


@pytest.mark.parametrize("settings", [RandomSettings(), PowerOfTwoSettings(), RoundRobinSettings()])
def test_groups_use_different_reproducible_random_sequences(settings):
    chosen = of_groups(settings)
    together = max(max(Counter(at_once).values()) for at_once in zip(*chosen, strict=True))

    assert len({tuple(one) for one in chosen}) == 4
    assert together < 4  # never all at one replica
    assert chosen == of_groups(settings)
    assert chosen != of_groups(settings, seed=8)


def test_a_canary_uses_another_random_sequence_than_the_active_revision():
    canary = Canary(revision=4, settings=RandomSettings(), share=0.5)
    policy = PolicyConfig(name="drawn", revision=3, settings=RandomSettings(), canary=canary)
    members = pool(members=replicas(12))
    placement = Placement(config(structs.replace(members, policy=policy)), LoadTracker(), seed=7)
    chosen: dict[int, list[str]] = {3: [], 4: []}
    for number in range(200):
        decision = placement.decide(request(f"{number} " * 40), HealthRegistry())
        chosen[decision.policy.revision].append(decision.choice.target)

    assert chosen[3][:20] != chosen[4][:20]


def test_groups_with_different_replicas_order_idle_replicas_differently():
    shared = [it.name for it in replicas(12)]
    groups = [TaskGroupConfig(name=f"g{n}", replicas=(*shared[:n], *shared[n + 1 :])) for n in range(8)]
    placement = Placement(config(pool(LeastLoadSettings(), replicas(12), groups)), LoadTracker(), seed=7)
    first = [placement.decide(request(group=it.name), HealthRegistry()).choice.target for it in groups]

    assert max(Counter(first).values()) < 5


# --- Turns ---


def among(*replicas: ReplicaId, **weights: float) -> Candidates:
    return Candidates({name: weights.get(name[-1], 1.0) for name in replicas}, LoadTracker())


def turns(strategy: RoundRobin, candidates: Candidates, count: int) -> list[ReplicaId]:
    return [strategy.choose(KEYS, candidates).target for _ in range(count)]


def test_every_replica_gets_a_turn_before_any_gets_a_second():
    met = turns(RoundRobin(), among(A, B, C, D), 12)

    assert set(met[:4]) == {A, B, C, D}
    assert met[:4] == met[4:8] == met[8:]


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
