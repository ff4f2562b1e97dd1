from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.balancing.load_tracker import LoadTracker
from routing.balancing.replicas import GroupReplicas, HealthRegistry
from routing.balancing.strategies.affinity_groups import (
    GAIN_MARGIN,
    LOSS_MARGIN,
    MAX_KEYS,
    MAX_PLANS,
    AffinityGroups,
    Shares,
    next_size,
)
from routing.schema import AffinityGroupsSettings
from routing.types import Reason
from tests.routing.building import FixedKeys, names
from tests.routing.building import replicas as configured

HOT = 4711


class Rig:
    """A strategy over some replicas, and traffic with a hot prefix and otherwise new ones."""

    def __init__(self, replicas: int = 8, **settings) -> None:
        self.names = names(replicas)
        self.tracker = LoadTracker(lambda: 0.0)
        group = GroupReplicas(configured(replicas), self.tracker)
        self.ring, self.candidates = group.ring, group.candidates(HealthRegistry())
        self.strategy = AffinityGroups(group, AffinityGroupsSettings(half_life=500, **settings))
        self.rng = random.Random(11)

    def send(self, prefix: int, conversation: int | None = None, tokens: int = 1000):
        keys = FixedKeys(tier1=prefix, tier2=self.rng.getrandbits(64) if conversation is None else conversation)
        choice = self.strategy.choose(keys, self.candidates)
        self.strategy.count_request(keys, tokens)
        return choice

    def traffic(self, requests: int, shares: dict[int, float]) -> Counter:
        """The targets of requests of each kind; None stands for the others."""
        turns: Counter = Counter()
        for _ in range(requests):
            kinds, weights = list(shares), list(shares.values())
            kind = self.rng.choices([*kinds, None], [*weights, 1 - sum(weights)])[0]
            prefix = self.rng.getrandbits(64) if kind is None else kind
            turns[kind, self.send(prefix).target] += 1
        return turns


@pytest.mark.parametrize(("share", "replicas", "size"), [(0.8, 8, 6), (0.5, 8, 4), (0.96, 8, 7), (0.2, 20, 4)])
def test_a_hot_prefix_gets_its_share_of_the_replicas(share, replicas, size):
    rig = Rig(replicas)
    rig.traffic(3000, {HOT: share})

    assert rig.strategy.plan()[HOT] == list(rig.ring.walk(HOT))[: len(rig.strategy.plan()[HOT])]
    assert abs(len(rig.strategy.plan()[HOT]) - size) <= 1
    turns = rig.traffic(1000, {HOT: share})
    hot = {replica for kind, replica in turns if kind == HOT}
    assert hot == set(rig.strategy.plan()[HOT])
    assert not hot & {replica for kind, replica in turns if kind is None}


def test_the_only_prefix_gets_all_replicas():
    rig = Rig(8)
    rig.traffic(2000, {HOT: 1.0})

    assert sorted(rig.strategy.plan()[HOT]) == rig.names


def test_several_hot_prefixes_get_different_replicas():
    rig = Rig(10)
    rig.traffic(3000, {1: 0.4, 2: 0.3})
    plan = rig.strategy.plan()

    assert set(plan) == {1, 2}
    assert not set(plan[1]) & set(plan[2])


def test_a_prefix_that_cools_down_loses_its_replicas():
    rig = Rig(8)
    rig.traffic(3000, {HOT: 0.5})
    assert HOT in rig.strategy.plan()

    rig.traffic(5000, {})
    assert rig.strategy.plan() == {}
    assert len({rig.send(rig.rng.getrandbits(64)).target for _ in range(400)}) == 8


def test_a_fluctuating_share_changes_nothing():
    rig = Rig(8)
    rig.traffic(4000, {HOT: 0.5})
    plans = set()
    for number in range(20):
        rig.traffic(100, {HOT: 0.46 if number % 2 else 0.54})
        plans.add(len(rig.strategy.plan()[HOT]))

    assert len(plans) == 1


def test_a_few_long_prompts_weigh_as_much_as_many_short_ones():
    rig = Rig(8)
    for number in range(3000):
        rig.send(HOT, tokens=19_000) if number % 20 == 0 else rig.send(rig.rng.getrandbits(64))

    assert abs(len(rig.strategy.plan()[HOT]) - 4) <= 1


def test_a_conversation_stays_on_one_replica_until_moving_costs_less():
    rig = Rig(8)
    rig.traffic(3000, {HOT: 0.8})
    first = rig.send(HOT, conversation=5)
    rig.tracker.dispatch(first.target, 10)
    assert (rig.send(HOT, 5).target, rig.send(HOT, 5).reason) == (first.target, Reason.AFFINITY)

    rig.tracker.dispatch(first.target, 10_000)
    moved = rig.send(HOT, 5)
    assert (moved.reason, moved.skipped) == (Reason.SPILL, (first.target,))
    assert moved.target in rig.strategy.plan()[HOT]


def test_requests_limited_to_some_replicas_do_not_change_the_plan_of_others():
    rig = Rig(8)
    holders = rig.candidates.subset(rig.names[:3])  # of an adapter
    rig.traffic(4000, {HOT: 0.52})
    plan = rig.strategy.plan()
    for _ in range(300):
        rig.traffic(9, {HOT: 0.5})  # 3.6 replicas' worth with the adapter's: too few for 4, too many to lose one
        adapters = FixedKeys(tier1=5)
        assert rig.strategy.choose(adapters, holders).target in holders
        rig.strategy.count_request(adapters, 1000)
    rig.traffic(1, {HOT: 1.0})

    assert len(plan[HOT]) == 4
    assert rig.strategy.plan() == plan


def test_the_number_of_cached_plans_is_bounded():
    rig = Rig(8)
    for number in range(5 * MAX_PLANS):
        rig.strategy.choose(FixedKeys(tier1=HOT), rig.candidates.subset(rig.names[number % 8 :]))

    assert len(rig.strategy._plans) <= MAX_PLANS


def test_a_retry_uses_another_replica_of_the_prefix_and_keeps_the_plan():
    rig = Rig(8)
    rig.traffic(3000, {HOT: 0.5})
    plan = rig.strategy.plan()
    tried = set()
    for _ in range(8):
        keys = FixedKeys(tier1=HOT, tier2=3)
        tried.add(rig.strategy.choose(keys, rig.candidates.without(tried)).target)
        assert (len(tried) > len(plan[HOT])) or tried <= set(plan[HOT])

    assert len(tried) == 8
    assert rig.strategy.plan() == plan


@given(st.integers(0, 20), st.floats(-2, 2))
def test_a_size_is_kept_while_the_share_is_near(before, difference):
    share = max(0.0, before + difference)
    size = next_size(before, share)

    assert size >= 1
    if before and before - LOSS_MARGIN <= share < before + GAIN_MARGIN:
        assert size == before
    assert next_size(size, share) == size  # stable for the same share
    assert size == 1 or share - GAIN_MARGIN <= size <= share + LOSS_MARGIN


def shares_of(keys, half_life: float = 1e6) -> Shares:
    shares = Shares(half_life)
    for key in keys:
        shares.count(key, 1000)
    return shares


def test_shares_are_sorted_the_largest_first():
    frequent = shares_of([1] * 20 + [2] * 70 + [3] * 10).frequent_keys(0.15)

    assert [key for key, _ in frequent] == [2, 1]
    assert [share for _, share in frequent] == pytest.approx([0.7, 0.2], rel=0.01)


def test_old_traffic_fades():
    shares = shares_of([1] * 10_000 + [2] * 100, half_life=100)

    assert dict(shares.frequent_keys(0.1)) == pytest.approx({1: 0.5, 2: 0.5}, rel=0.02)


def test_shares_stay_correct_in_the_long_run():
    shares = shares_of((number % 4 for number in range(50_000)), half_life=20)

    assert [share for _, share in shares.frequent_keys(0.1)] == pytest.approx([0.25] * 4, rel=0.1)


def test_few_keys_are_counted_and_heavy_ones_among_them():
    rng, shares, max_counted = random.Random(5), Shares(10_000), 0
    for _ in range(50_000):
        shares.count(7 if rng.random() < 0.05 else rng.getrandbits(64), 1000)
        max_counted = max(max_counted, len(shares))

    assert max_counted <= 2 * MAX_KEYS + 1
    assert [key for key, _ in shares.frequent_keys(0.03)] == [7]
