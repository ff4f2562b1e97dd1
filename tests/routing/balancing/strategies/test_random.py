from __future__ import annotations

import random
from collections import Counter

import pytest
from msgspec import structs

from routing.balancing.candidates import Candidates
from routing.balancing.load_tracker import LoadTracker
from routing.balancing.placement import Placement
from routing.balancing.replicas import HealthRegistry
from routing.balancing.strategies.baselines import PowerOfTwo, Random
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
from routing.types import Reason
from tests.routing.building import FixedKeys, config, names, pool, replicas, request

A, B, C = names(3)
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


def test_routers_with_different_seeds_choose_differently():
    candidates = Candidates(dict.fromkeys(names(20), 1.0), LoadTracker())
    sequences = {tuple(one.choose(KEYS, candidates).target for _ in range(5)) for one in map(
        Random, map(random.Random, range(10)))}  # fmt: skip

    assert len(sequences) == 10


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
