"""A replica is warmed with the prefixes that it will get once it takes traffic."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from routing.balancing.load_tracker import LoadTracker
from routing.balancing.placement import Decision, Placement
from routing.balancing.replicas import HealthRegistry, rank_of
from routing.schema import (
    Adapter,
    AffinityGroupsSettings,
    LeastLoadSettings,
    LowestCostSettings,
    PoolConfig,
    PrefixHashSettings,
    ReplicaConfig,
    ReplicaState,
    Settings,
    TaskGroupConfig,
    TieredSettings,
)
from routing.types import NoReplicaError, TargetId
from tests.routing.building import config, names, pool, replicas, request

JOINING = names(4)[3]
PROMPTS = [f"prompt {number}" for number in range(60)]


def placement(settings: Settings, **fields: Any) -> Placement:
    return Placement(config(pool(settings, **fields)), LoadTracker())


def joining() -> HealthRegistry:
    """All replicas are healthy, and one is warming up."""
    health = HealthRegistry()
    health.set_warming(JOINING, is_warming=True)
    return health


def decided(router: Placement, text: str, health: HealthRegistry, **what: Any) -> Decision:
    return router.decide(request(text, **what), health)


def is_preferred(router: Placement, text: str, health: HealthRegistry, group: str = "", replica: str = JOINING) -> bool:
    prefix = decided(router, text, health, group=group or None).prefix
    assert prefix is not None
    return bool(router.preferred_replicas("chat", (group, prefix), replica, "", health))


def test_preferred_replicas_are_those_that_will_get_the_prefix():
    router, before, after = placement(PrefixHashSettings()), joining(), HealthRegistry()
    expected = {text for text in PROMPTS if decided(router, text, after).replica.name == JOINING}

    assert expected
    assert {text for text in PROMPTS if is_preferred(router, text, before)} == expected
    assert not any(decided(router, text, before).replica.name == JOINING for text in PROMPTS)


def test_a_tiered_prefix_has_several_preferred_replicas():
    router, before, after = placement(TieredSettings(replicas=2)), joining(), HealthRegistry()
    preferred = {text for text in PROMPTS if is_preferred(router, text, before)}
    used = {
        text
        for text in PROMPTS
        for session in map(str, range(12))
        if decided(router, text, after, session=session).replica.name == JOINING
    }

    assert used == preferred
    assert len(preferred) > len(
        {text for text in PROMPTS if is_preferred(placement(PrefixHashSettings()), text, before)}
    )


def test_residency_strategies_use_the_ring_order_for_warm_ups():
    before = joining()
    by_hash, by_cost = placement(PrefixHashSettings()), placement(LowestCostSettings())

    assert [is_preferred(by_cost, text, before) for text in PROMPTS] == [
        is_preferred(by_hash, text, before) for text in PROMPTS
    ]


def test_without_affinity_every_replica_is_preferred():
    assert all(is_preferred(placement(LeastLoadSettings()), text, joining()) for text in PROMPTS)


def test_a_hot_prefix_is_preferred_by_all_its_replicas():
    router, before = placement(AffinityGroupsSettings(half_life=100), members=replicas(8)), HealthRegistry()
    prefix = decided(router, "hot", before).prefix
    assert prefix is not None

    def preferred_replicas() -> int:
        return sum(bool(router.preferred_replicas("chat", ("", prefix), name, "", before)) for name in names(8))

    for _ in range(400):
        decided(router, "hot", before)  # without a dispatch, as by /admin/explain
    assert preferred_replicas() == 1
    for number in range(400):
        router.dispatch(decided(router, f"cold {number}", before)).end()
        for _ in range(9):
            router.dispatch(decided(router, "hot", before), is_retry=True).end()
    assert preferred_replicas() == 1
    for _ in range(400):
        router.dispatch(decided(router, "hot", before)).end()
    decided(router, "hot", before)
    assert preferred_replicas() >= 7


def test_replicas_that_are_down_or_draining_are_not_preferred():
    router, before = placement(PrefixHashSettings()), joining()
    others = [name for name in names(4) if name != JOINING]
    for name in others[:2]:
        before.mark(name, up=False)
    count = sum(is_preferred(router, text, before) for text in PROMPTS)
    draining = (
        *replicas(4)[:2],
        *(replace(it, state=ReplicaState.DRAINING) for it in replicas(4)[2:3]),
        replicas(4)[3],
    )

    assert count > sum(is_preferred(router, text, joining()) for text in PROMPTS)
    assert sum(is_preferred(placement(PrefixHashSettings(), members=draining), text, joining()) for text in PROMPTS) > 0


def test_a_group_prefers_only_its_own_replicas():
    groups = (TaskGroupConfig(name="apart", replicas=tuple(names(3))),)
    router = placement(PrefixHashSettings(), groups=groups)

    assert not any(is_preferred(router, text, joining(), group="apart") for text in PROMPTS)
    assert any(is_preferred(router, text, joining(), group="apart", replica=names(1)[0]) for text in PROMPTS)
    assert (
        router.preferred_replicas("chat", ("gone", decided(router, "a", joining()).prefix or 0), JOINING, "", joining())
        == []
    )


@pytest.mark.parametrize(("held", "is_warmed"), [(("sql",), True), ((), False)])
def test_an_adapters_prefix_is_preferred_only_by_replicas_with_the_adapter(held, is_warmed):
    members = (replace(replicas(1)[0], adapters=("sql",)), replace(replicas(4)[3], adapters=held))
    serving = PoolConfig(
        name="chat",
        policy=pool(PrefixHashSettings()).policy,
        models=("llama",),
        adapters=(Adapter(name="sql", model="llama"),),
        replicas=members,
    )
    router, health = Placement(config(serving), LoadTracker()), HealthRegistry()
    prefixes = [router.decide(request(text, model="sql"), health).prefix or 0 for text in PROMPTS]

    assert (
        any(router.preferred_replicas("chat", ("", prefix), JOINING, "sql", health) for prefix in prefixes) is is_warmed
    )
    assert router.could_serve(NoReplicaError("chat", adapter="sql"), JOINING, health) is is_warmed
    assert router.could_serve(NoReplicaError("chat"), JOINING, health)
    health.mark(JOINING, up=False)
    assert not router.could_serve(NoReplicaError("chat"), JOINING, health)


def test_each_rank_is_a_preferred_target_of_its_own():
    wide = ReplicaConfig(name="wide", url="http://wide", data_parallel_size=4)
    router, health = Placement(config(pool(PrefixHashSettings(), (wide,))), LoadTracker()), HealthRegistry()
    ranks = {}
    for text in PROMPTS:
        decision = decided(router, text, health)
        [target] = router.preferred_replicas("chat", ("", decision.prefix or 0), "wide", "", health)
        assert target == decision.target.id
        ranks[target] = rank_of(target)

    assert sorted(ranks.values()) == [0, 1, 2, 3]
    assert rank_of(TargetId("replica-0")) is None
