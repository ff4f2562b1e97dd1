from __future__ import annotations

from collections import Counter

import pytest

from routing.balancing.candidates import Candidates
from routing.balancing.load_tracker import JOURNAL_ENTRIES, LoadTracker
from routing.balancing.placement import Placement
from routing.balancing.replicas import GroupReplicas, HealthRegistry, targets_of
from routing.schema import LowestCostSettings, ReplicaConfig
from routing.types import ReplicaId
from tests.routing.building import chat, config, names, pool, request

A, B, C = names(3)
WEIGHTS = {A: 1.0, B: 2.0, C: 0.5}


@pytest.fixture
def tracker() -> LoadTracker:
    tracker = LoadTracker()
    for name in (A, A, B):
        tracker.dispatch(name, 1)
    return tracker


def test_sums_after_exclusion_cover_the_remaining_candidates(tracker):
    whole = Candidates(WEIGHTS, tracker)
    remaining = whole.without({A})

    assert (set(remaining), remaining.order.busy_ratio) == ({B, C}, 0.5)
    assert remaining.without({B}).unfiltered is whole


def test_a_subset_keeps_order_weights_and_bits(tracker):
    some = Candidates(WEIGHTS, tracker, bits={A: 1, B: 2, C: 4}, shares={C: 0.25}).subset([C, A])

    assert [(it.target, it.weight, it.bit, it.share) for it in some.members] == [(C, 0.5, 4, 0.25), (A, 1.0, 1, 1.0)]
    assert (some.mask, some.greatest_weight) == (5, 1.0)
    assert some.by_bit[4] is some.by_name[C]


A, B, C, D = names(4)


def all_of(tracker: LoadTracker, seed: int = 0) -> Candidates:
    return Candidates(dict.fromkeys(names(4), 1.0), tracker, seed)


def test_sums_are_correct_after_more_changes_than_the_journal_keeps():
    tracker = LoadTracker()
    candidates = all_of(tracker)
    for _ in range(3 * JOURNAL_ENTRIES):
        tracker.dispatch(A, 1).end()
    tracker.dispatch(B, 1)

    assert candidates.order.busy_ratio == 0.25


@pytest.mark.parametrize("weight", [1e-20, 5e-324])
def test_a_replica_of_tiny_weight_has_the_most_work(weight):
    tracker = LoadTracker()
    candidates = Candidates({A: weight, B: 1.0}, tracker, bits={A: 1, B: 2})
    for name in (A, B, B):
        tracker.dispatch(name, 100)

    assert candidates.order.least_loaded() == B
    assert candidates.order.work_classes()[-1] == 1


@pytest.mark.parametrize(("busy", "most"), [((), 100), (names(4) * 20, 160)], ids=["alone", "with others' requests"])
def test_equally_loaded_replicas_take_turns(busy, most):
    tracker = LoadTracker()
    candidates = all_of(tracker)
    turns = Counter()
    for _ in range(400):
        chosen = candidates.order.least_loaded()
        turns[chosen] += 1
        tracker.dispatch(chosen, 50).end()  # it ends before the next request
        for name in busy:  # these start and end in the order of the configuration
            tracker.dispatch(name, 10).end()

    assert max(turns.values()) <= most


def test_routers_with_different_seeds_start_at_different_replicas():
    assert len({all_of(LoadTracker(), seed).order.least_loaded() for seed in range(40)}) == 4


def test_the_heap_stays_small():
    tracker = LoadTracker()
    candidates = all_of(tracker)
    for _ in range(5000):
        tracker.dispatch(candidates.order.least_loaded(), 10)

    assert len(candidates.order._heap) < 100


# --- Replicas of several ranks ---


WIDE = ReplicaConfig(name="wide", url="http://wide", data_parallel_size=3)
PLAIN = ReplicaConfig(name="plain", url="http://plain")


def test_a_replica_has_one_target_for_each_rank():
    assert [(it.id, it.rank) for it in targets_of(WIDE)] == [("wide#0", 0), ("wide#1", 1), ("wide#2", 2)]
    assert [(it.id, it.rank) for it in targets_of(PLAIN)] == [("plain", None)]


def test_each_rank_owns_as_many_keys_as_a_replica():
    replicas = GroupReplicas([WIDE, PLAIN], LoadTracker())
    preferred_replicas = Counter(next(replicas.ring.walk(key << 40)) for key in range(1 << 24)[:: 1 << 12])

    assert set(preferred_replicas) == {"wide#0", "wide#1", "wide#2", "plain"}
    assert all(0.15 < count / preferred_replicas.total() < 0.35 for count in preferred_replicas.values())


def test_health_and_slow_start_apply_to_the_whole_replica():
    replicas, health = GroupReplicas([WIDE, PLAIN], LoadTracker()), HealthRegistry()
    health.set_share(ReplicaId("wide"), 0.25)
    assert replicas.candidates(health).weights == {"wide#0": 0.25, "wide#1": 0.25, "wide#2": 0.25, "plain": 1.0}

    health.mark(ReplicaId("wide"), up=False)
    assert list(replicas.candidates(health)) == ["plain"]


def test_each_rank_has_its_own_load_and_its_own_cache():
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
