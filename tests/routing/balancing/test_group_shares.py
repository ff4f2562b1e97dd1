from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from routing.balancing.allocation import NO_GROUP, REVIEW_REQUESTS, GroupShares
from routing.balancing.load_tracker import LoadTracker
from routing.balancing.replicas import GroupReplicas, HealthRegistry
from routing.prompt.hashing import PrefixHasher
from routing.schema import AutoReplicas, ConfigError, ReplicaState, TaskGroupConfig, check_config
from routing.types import ReplicaId
from tests.routing.building import SECRET, config, names, pool, replicas

HASHER = PrefixHasher(SECRET)


def auto_group(name: str) -> TaskGroupConfig:
    return TaskGroupConfig(name=name, auto_replicas=AutoReplicas())


class Rig:
    """The groups of a pool, and traffic with a share for each; the rest is the pool's own."""

    def __init__(self, count: int = 8, groups: Any = ("a", "b"), seed: int = 7, **fields: Any) -> None:
        configured = [auto_group(it) if isinstance(it, str) else it for it in groups]
        self.pool = replace(pool(members=replicas(count), groups=configured), **fields)
        self.shares = GroupShares(self.pool, HASHER)
        self.replicas = GroupReplicas(self.pool.replicas, LoadTracker())
        self.health = HealthRegistry()
        self.rng = random.Random(seed)

    def traffic(self, requests: int, **parts: float) -> None:
        kinds = [*parts, NO_GROUP]
        weights = [*parts.values(), max(0.0, 1 - sum(parts.values()))]
        for kind in self.rng.choices(kinds, weights, k=requests):
            self.shares.count(kind, 1000)

    def sizes(self) -> dict[str, int]:
        return {name: len(self.shares.replicas(name)) for name in (*(it.name for it in self.pool.groups), NO_GROUP)}

    def eligible(self, group: str) -> list[ReplicaId]:
        return list(self.shares.candidates(group, self.replicas, self.replicas.candidates(self.health)))

    def overlap(self) -> int:
        """Number of replicas in more than one set."""
        owners = Counter(replica for name in self.sizes() for replica in self.shares.replicas(name))
        return sum(1 for count in owners.values() if count > 1)


@pytest.mark.parametrize(
    ("parts", "sizes"),
    [
        ({"a": 0.5, "b": 0.25}, {"a": 8, "b": 4, NO_GROUP: 4}),
        ({"a": 0.9, "b": 0.05}, {"a": 14, "b": 1, NO_GROUP: 1}),
        ({"a": 1 / 3, "b": 1 / 3}, {"a": 5, "b": 5, NO_GROUP: 5}),
    ],
)
def test_a_groups_size_follows_its_share(parts: dict[str, float], sizes: dict[str, int]) -> None:
    rig = Rig(16)
    rig.traffic(6000, **parts)

    assert all(abs(rig.sizes()[name] - size) <= 1 for name, size in sizes.items())
    assert rig.overlap() == 0


def test_a_groups_size_follows_the_tokens_that_it_leaves_to_prefill() -> None:
    rig = Rig(16)
    for _ in range(300):
        rig.shares.count("a", 15_000)
        for _ in range(15):
            rig.shares.count("b", 500)
            rig.shares.count(NO_GROUP, 500)

    assert all(abs(rig.sizes()[name] - size) <= 1 for name, size in {"a": 8, "b": 4, NO_GROUP: 4}.items())


def test_all_groups_have_equal_sizes_before_any_traffic() -> None:
    assert Rig(9).sizes() == {"a": 3, "b": 3, NO_GROUP: 3}


def test_a_fluctuating_share_moves_nothing() -> None:
    rig = Rig(8, share_half_life=2000)
    rig.traffic(8000, a=0.5, b=0.25)
    before = {name: list(rig.shares.replicas(name)) for name in rig.sizes()}
    for number in range(40):
        rig.traffic(REVIEW_REQUESTS, a=0.46 if number % 2 else 0.54, b=0.25)

        assert {name: list(rig.shares.replicas(name)) for name in rig.sizes()} == before


def test_growth_adds_one_replica_at_a_time_and_shrinking_removes_the_last() -> None:
    rig = Rig(12, share_half_life=1000)
    rig.traffic(5000, a=0.1, b=0.1)
    sets_over_time = [list(rig.shares.replicas("a"))]
    for parts in ({"a": 0.8, "b": 0.1}, {"a": 0.1, "b": 0.1}):
        for _ in range(100):
            rig.traffic(REVIEW_REQUESTS, **parts)
            sets_over_time.append(list(rig.shares.replicas("a")))

    assert max(map(len, sets_over_time)) >= 8
    assert len(sets_over_time[-1]) <= 2
    overlaps = [len(set(one) & set(next_)) >= min(len(one), len(next_)) - 1 for one, next_ in pairwise(sets_over_time)]
    assert all(overlaps)  # at most one was claimed by a smaller group


def test_routers_that_see_the_same_traffic_agree() -> None:
    one, other = Rig(10), Rig(10)
    for rig in (one, other):
        rig.traffic(3000, a=0.6, b=0.2)

    assert all(one.shares.replicas(name) == other.shares.replicas(name) for name in one.sizes())


def test_routers_that_see_samples_of_the_traffic_nearly_agree() -> None:
    one, other = Rig(10, seed=1, share_half_life=2000), Rig(10, seed=2, share_half_life=2000)
    for rig in (one, other):
        rig.traffic(10_000, a=0.6, b=0.2)

    for name in one.sizes():
        own_set, other_set = set(one.shares.replicas(name)), set(other.shares.replicas(name))
        assert len(own_set ^ other_set) <= 3


def test_a_flood_in_one_group_leaves_others_their_replicas() -> None:
    rig = Rig(8, groups=("a", "b", "c"))
    rig.traffic(3000, a=0.3, b=0.3, c=0.3)
    rig.traffic(1500, a=0.94, b=0.02, c=0.02)

    flooded = set(rig.shares.replicas("a"))
    assert len(flooded) == 5
    for name in ("b", "c", NO_GROUP):
        assert rig.shares.replicas(name)
        assert flooded.isdisjoint(rig.shares.replicas(name))


def test_a_group_with_hardly_any_traffic_is_a_guest() -> None:
    rig = Rig(4, groups=[f"idle-{number}" for number in range(10)] + [auto_group("a")])
    rig.traffic(8000, a=1.0)

    assert len(rig.shares.replicas("a")) == 4
    assert all(len(rig.eligible(f"idle-{number}")) == 1 for number in range(10))


def test_reserved_and_max_bound_the_size() -> None:
    groups = [
        TaskGroupConfig(name="quiet", auto_replicas=AutoReplicas(reserved=2)),
        TaskGroupConfig(name="loud", auto_replicas=AutoReplicas(max=3)),
    ]
    rig = Rig(8, groups=groups)
    rig.traffic(8000, loud=1.0)

    assert (rig.sizes()["quiet"], rig.sizes()["loud"]) == (2, 3)
    assert set(rig.shares.replicas("quiet")).isdisjoint(rig.shares.replicas("loud"))


def test_replicas_named_by_a_group_are_used_last_by_others() -> None:
    groups = [TaskGroupConfig(name="fixed", replicas=tuple(names(3))), auto_group("a")]
    rig = Rig(8, groups=groups)
    for _ in range(4000):
        rig.shares.count("fixed" if rig.rng.random() < 0.4 else "a" if rig.rng.random() < 0.6 else NO_GROUP, 1000)

    assert set(rig.shares.replicas("a")).isdisjoint(names(3))
    assert rig.shares.share("fixed") == pytest.approx(0.4, abs=0.08)


@given(st.integers(1, 6), st.integers(0, 8), st.sets(st.integers(0, 5)), st.integers(0, 3000))
def test_every_group_has_a_replica_while_any_is_up(count: int, many: int, down: set[int], requests: int) -> None:
    rig = Rig(count, groups=[f"g{number}" for number in range(many)] or ["a"])
    rig.traffic(requests % 300, g0=0.8)
    for number in down:
        rig.health.mark(ReplicaId(f"replica-{number}"), up=False)
    up = set(rig.replicas.candidates(rig.health))

    for name in rig.sizes():
        eligible = rig.eligible(name)
        assert set(eligible) <= up
        assert len(eligible) == min(len(rig.shares.replicas(name)), len(up))


def test_a_replica_that_is_down_is_replaced_and_no_other_set_changes() -> None:
    rig = Rig(8)
    rig.traffic(3000, a=0.4, b=0.3)
    before = {name: rig.eligible(name) for name in rig.sizes()}
    removed = before["a"][0]
    rig.health.mark(removed, up=False)
    meanwhile = {name: rig.eligible(name) for name in rig.sizes()}
    rig.health.mark(removed, up=True)

    assert len(meanwhile["a"]) == len(before["a"])
    assert set(before["a"]) - set(meanwhile["a"]) == {removed}
    assert all(meanwhile[name] == before[name] for name in ("b", NO_GROUP))
    assert {name: rig.eligible(name) for name in rig.sizes()} == before


def test_a_draining_replica_is_in_no_set() -> None:
    members = (replace(replicas(1)[0], state=ReplicaState.DRAINING), *replicas(8)[1:])
    rig = Rig(8, replicas=members)
    rig.traffic(3000, a=0.5, b=0.2)

    assert all(names(1)[0] not in rig.shares.replicas(name) for name in rig.sizes())


def test_a_new_configuration_keeps_the_sets_of_unchanged_shares() -> None:
    rig, after = Rig(8), Rig(8)
    rig.traffic(5000, a=0.7, b=0.1)
    after.shares.carry_over(rig.shares)
    with_more = Rig(8, groups=("a", "b", "newcomer"))
    with_more.shares.carry_over(rig.shares)

    assert all(after.shares.replicas(name) == rig.shares.replicas(name) for name in rig.sizes())
    assert all(with_more.shares.replicas(name) == rig.shares.replicas(name) for name in rig.sizes())
    assert len(with_more.eligible("newcomer")) == 1


@pytest.mark.parametrize("seed", range(4))
def test_sets_stay_disjoint_and_change_only_with_their_sizes(seed: int) -> None:
    rng = random.Random(seed)
    weighted = [replace(it, weight=rng.choice([1.0, 1.0, 2.0, 4.0])) for it in replicas(rng.randrange(6, 24))]
    groups = [f"g{number}" for number in range(rng.randrange(2, 20))]
    rig, moves, changes = Rig(groups=groups, replicas=tuple(weighted), share_half_life=300), 0, 0
    numbers = dict(rig.shares._trimmed_sizes)
    sets = {name: rig.shares.replicas(name) for name in numbers}
    for _ in range(40):
        mixture = [rng.random() ** rng.choice([1, 4, 12]) for _ in numbers]
        for _ in range(8):
            for name in rng.choices(list(numbers), mixture, k=REVIEW_REQUESTS):
                rig.shares.count(name, 1000)
            trimmed, own = dict(rig.shares._trimmed_sizes), {name: rig.shares.replicas(name) for name in numbers}
            changes += sum(abs(trimmed[name] - numbers[name]) for name in numbers)
            moves += sum(len(set(own[name]) - set(sets[name])) for name in numbers)
            owners = Counter(replica for name in numbers if trimmed[name] for replica in own[name])
            assert all(own.values())
            assert trimmed != numbers or own == sets
            assert sum(trimmed.values()) > len(weighted) or set(owners.values()) == {1}
            sets, numbers = own, trimmed

    assert changes > 50
    assert moves < 3 * changes


@pytest.mark.parametrize("half_life", [200, 5000])
def test_another_half_life_keeps_the_counts(half_life: int) -> None:
    rig, after = Rig(8), Rig(8, share_half_life=half_life)
    rig.traffic(5000, a=0.7, b=0.1)
    after.shares.carry_over(rig.shares)
    assert after.sizes() == rig.sizes()

    after.traffic(20 * half_life, a=0.1, b=0.7)
    assert after.shares.share("b") == pytest.approx(0.7, abs=0.1)


def test_a_pool_without_replicas_has_empty_sets() -> None:
    rig = Rig(0)
    rig.traffic(200, a=0.5)

    assert rig.eligible("a") == []


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (TaskGroupConfig(name="a", auto_replicas=AutoReplicas(), replicas=("replica-0",)), "set only one"),
        (TaskGroupConfig(name="a", auto_replicas=AutoReplicas(reserved=9)), "9 replicas are reserved"),
    ],
)
def test_impossible_auto_replicas_are_rejected(group: TaskGroupConfig, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_config(config(pool(members=replicas(8), groups=[group])))


def test_max_must_not_be_less_than_reserved() -> None:
    with pytest.raises(ValueError, match="less than reserved"):
        AutoReplicas(reserved=3, max=2)
