from __future__ import annotations

from collections import Counter

from routing.balancing.load_tracker import LoadTracker
from routing.balancing.placement import Placement
from routing.balancing.replicas import GroupReplicas, HealthRegistry, targets_of
from routing.schema import LowestCostSettings, ReplicaConfig
from routing.types import ReplicaId
from tests.routing.building import chat, config, pool, request

WIDE = ReplicaConfig(name="wide", url="http://wide", data_parallel_size=3)
PLAIN = ReplicaConfig(name="plain", url="http://plain")


def test_a_replica_has_one_target_for_each_rank() -> None:
    assert [(it.id, it.rank) for it in targets_of(WIDE)] == [("wide#0", 0), ("wide#1", 1), ("wide#2", 2)]
    assert [(it.id, it.rank) for it in targets_of(PLAIN)] == [("plain", None)]


def test_each_rank_owns_as_many_keys_as_a_replica() -> None:
    replicas = GroupReplicas([WIDE, PLAIN], LoadTracker())
    preferred_replicas = Counter(next(replicas.ring.walk(key << 40)) for key in range(1 << 24)[:: 1 << 12])

    assert set(preferred_replicas) == {"wide#0", "wide#1", "wide#2", "plain"}
    assert all(0.15 < count / preferred_replicas.total() < 0.35 for count in preferred_replicas.values())


def test_health_and_slow_start_apply_to_the_whole_replica() -> None:
    replicas, health = GroupReplicas([WIDE, PLAIN], LoadTracker()), HealthRegistry()
    health.set_share(ReplicaId("wide"), 0.25)
    assert replicas.candidates(health).weights == {"wide#0": 0.25, "wide#1": 0.25, "wide#2": 0.25, "plain": 1.0}

    health.mark(ReplicaId("wide"), up=False)
    assert list(replicas.candidates(health)) == ["plain"]


def test_each_rank_has_its_own_load_and_its_own_cache() -> None:
    tracker, health = LoadTracker(), HealthRegistry()
    placement = Placement(config(pool(LowestCostSettings(), (WIDE,))), tracker)
    prompts = [chat(("system", f"Handbook {number}. " * 100), ("user", "Hello")) for number in range(3)]
    first = [placement.decide(request(prompt=prompt), health) for prompt in prompts]
    tickets = []
    for prompt in prompts:
        decision = placement.decide(request(prompt=prompt), health)
        tickets.append(placement.dispatch(decision))
    assert sum(tracker.load(target.id).running for target in targets_of(WIDE)) == 3
    assert {tracker.load(target.id).running for target in targets_of(WIDE)} == {1}

    for ticket in tickets:
        ticket.record_response()
        ticket.end()
    again = [placement.decide(request(prompt=prompt), health) for prompt in prompts]
    assert all(decision.choice.hit_tokens for decision in again)
    assert len({decision.target.id for decision in again}) == 3
    assert all(decision.choice.hit_tokens == 0 for decision in first)
