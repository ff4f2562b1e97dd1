from __future__ import annotations

from typing import get_args

import pytest

from routing.balancing.load_tracker import LoadTracker
from routing.balancing.placement import Placement
from routing.balancing.replicas import HealthRegistry
from routing.schema import (
    Boundary,
    LeastLoadSettings,
    PolicyConfig,
    PrefixHashSettings,
    ReplicaConfig,
    ReplicaState,
    Settings,
    TaskGroupConfig,
)
from routing.types import NoReplicaError, Reason, ReplicaId
from tests.routing.building import SECRET, chat, config, names, pool, replicas, request

A, B, C, D = names(4)
EVERY_SETTINGS: list[Settings] = [kind() for kind in get_args(Settings)]


def place(
    placement: Placement, health: HealthRegistry | None = None, excluded: frozenset[str] = frozenset(), **fields
) -> str:
    used = frozenset(ReplicaId(name) for name in excluded)
    return placement.decide(request(**fields), health or HealthRegistry(), used).replica.name


def in_state(state: ReplicaState, *others: str) -> tuple[ReplicaConfig, ...]:
    """Replica 0 in a state, and active others."""
    first = ReplicaConfig(name=A, url="http://a", state=state)
    return (first, *(ReplicaConfig(name=name, url="http://b") for name in others))


# --- decisions ---------------------------------------------------------------------------------------


def test_a_decision_has_its_replica_and_reason():
    decision = Placement(config(), LoadTracker()).decide(request(), HealthRegistry())

    assert (decision.pool, decision.group, decision.policy.name, decision.policy.revision) == (
        "chat",
        "",
        "everyday",
        3,
    )
    assert (decision.strategy, decision.reason) == ("prefix_hash", Reason.AFFINITY)
    assert decision.replica in replicas(4)


def test_candidate_loads_begin_with_the_choice_and_skipped_replicas():
    tracker = LoadTracker()
    placement = Placement(config(), tracker)
    preferred = ReplicaId(place(placement))
    for _ in range(4):
        tracker.dispatch(preferred, 1000)
    decision = placement.decide(request(), HealthRegistry())

    chosen = decision.choice.target
    assert decision.reason is Reason.SPILL
    shown = decision.candidate_loads(2)
    assert (shown.targets, shown.running, shown.waiting_tokens) == ([chosen, preferred], [0, 4], [0, 4000])
    assert decision.candidate_loads(1).targets == [chosen]
    assert set(decision.candidate_loads().targets) == set(names(4))


def test_the_prefix_ends_at_the_policys_boundary():
    settings = PrefixHashSettings(boundary=Boundary.SYSTEM)
    placement = Placement(config(pool(settings, replicas(50))), LoadTracker())
    brief = [chat(("system", "Be brief."), ("user", text)) for text in "abcdefgh"]

    assert len({place(placement, prompt=prompt) for prompt in brief}) == 1
    assert placement.decide(request("no system prompt"), HealthRegistry()).reason is Reason.NO_KEY


# --- eligible replicas -------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", EVERY_SETTINGS, ids=lambda settings: settings.name)
@pytest.mark.parametrize("state", [ReplicaState.DRAINING, ReplicaState.DISABLED])
def test_a_replica_that_is_not_active_is_never_chosen(settings, state):
    placement = Placement(config(pool(settings, in_state(state, B))), LoadTracker())

    assert {place(placement, text=str(number), session=str(number)) for number in range(40)} == {B}


@pytest.mark.parametrize("settings", EVERY_SETTINGS, ids=lambda settings: settings.name)
def test_a_replica_gets_no_requests_while_it_is_down(settings):
    tracker, health = LoadTracker(), HealthRegistry()
    placement = Placement(config(pool(settings)), tracker)

    def replicas_used() -> set[str]:
        """The replicas that get sixty requests which end at once."""
        chosen = set()
        for number in range(60):
            replica = place(placement, health, text=str(number), session=str(number))
            tracker.dispatch(ReplicaId(replica), 10).end()
            chosen.add(replica)
        return chosen

    assert replicas_used() == {A, B, C, D}

    health.mark(C, up=False)
    assert replicas_used() == {A, B, D}

    health.mark(C, up=True)
    assert replicas_used() == {A, B, C, D}


@pytest.mark.parametrize("settings", EVERY_SETTINGS, ids=lambda settings: settings.name)
def test_a_retry_goes_to_replicas_that_were_not_tried(settings):
    placement = Placement(config(pool(settings)), LoadTracker())
    used: list[str] = []
    for _ in range(4):
        used.append(place(placement, excluded=frozenset(used), session="s"))

    assert sorted(used) == names(4)
    with pytest.raises(NoReplicaError):
        place(placement, excluded=frozenset(used), session="s")


def test_keys_return_to_a_replica_that_recovers():
    placement, health = Placement(config(), LoadTracker()), HealthRegistry()
    preferred_replicas = {text: place(placement, health, text=text) for text in map(str, range(50))}

    health.mark(B, up=False)
    away = {text: place(placement, health, text=text) for text in preferred_replicas}
    assert {text for text in preferred_replicas if preferred_replicas[text] != away[text]} == {
        text for text in preferred_replicas if preferred_replicas[text] == B
    }

    health.mark(B, up=True)
    assert {text: place(placement, health, text=text) for text in preferred_replicas} == preferred_replicas


@pytest.mark.parametrize(
    ("members", "groups", "group", "text_in_error"),
    [
        (replicas(0), [], None, "pool 'chat'"),
        (in_state(ReplicaState.DRAINING), [], None, "pool 'chat'"),
        (in_state(ReplicaState.DISABLED, B), [TaskGroupConfig(name="support", replicas=(A,))], "support", "'support'"),
    ],
)
def test_the_error_without_eligible_replicas_names_pool_and_group(members, groups, group, text_in_error):
    placement = Placement(config(pool(members=members, groups=groups)), LoadTracker())

    with pytest.raises(NoReplicaError, match=text_in_error):
        place(placement, group=group)


# --- task groups -------------------------------------------------------------------------------------


def test_a_task_group_has_its_own_policy_and_replicas():
    own = PolicyConfig(name="batch", revision=1, settings=LeastLoadSettings())
    groups = [TaskGroupConfig(name="batch", policy=own, replicas=(B, C))]
    placement = Placement(config(pool(groups=groups)), LoadTracker())

    decision = placement.decide(request(group="batch"), HealthRegistry())
    assert (decision.group, decision.policy, decision.strategy) == ("batch", own, "least_load")
    assert set(decision.candidate_loads().targets) == {B, C}


def test_groups_over_the_same_replicas_share_their_loads():
    tracker = LoadTracker()
    groups = [TaskGroupConfig(name="support"), TaskGroupConfig(name="batch", replicas=(D, C, B, A))]
    placement = Placement(config(pool(groups=groups)), tracker)
    tracker.dispatch(A, 10)
    decisions = [placement.decide(request(group=group), HealthRegistry()) for group in (None, "support", "batch")]

    assert {id(decision.candidates) for decision in decisions} == {id(decisions[0].candidates)}
    assert decisions[2].candidates.loads[A].running == 1


# --- agreement and changes of configuration ----------------------------------------------------------


def test_another_secret_changes_placements():
    one, other = (Placement(config(secret=secret), LoadTracker()) for secret in (SECRET, "0" * 32))

    assert any(place(one, text=text) != place(other, text=text) for text in map(str, range(50)))


def test_loads_survive_a_new_configuration():
    tracker = LoadTracker()
    before = Placement(config(), tracker)
    preferred = ReplicaId(place(before))
    for _ in range(4):
        tracker.dispatch(preferred, 1000)
    after = Placement(config(pool(PrefixHashSettings(slack_s=0.01), replicas(5))), tracker)

    assert after.decide(request(), HealthRegistry()).candidates.loads[preferred].running == 4
    assert place(after) != preferred


def test_addresses_and_the_order_of_replicas_change_nothing():
    moved = tuple(
        ReplicaConfig(name=name, url=f"http://10.0.0.{number}") for number, name in enumerate(reversed(names(4)))
    )
    one, other = Placement(config(), LoadTracker()), Placement(config(pool(members=moved)), LoadTracker())

    assert all(place(one, text=text) == place(other, text=text) for text in map(str, range(50)))
