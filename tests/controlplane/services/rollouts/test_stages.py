"""Stage by stage into force."""

import pytest

from controlplane.errors import InvalidError
from controlplane.models import ConfigSnapshot, Event, RolloutStep
from controlplane.services.fleet.task_groups import create_task_group, remove_task_group
from controlplane.services.policies.lifecycle import create_policy, publish_revision, remove_policy, save_draft
from controlplane.services.policies.rollouts import (
    advance_rollouts,
    pause_rollout,
    promote_rollout,
    resume_rollout,
)
from controlplane.services.routers import LOST_AFTER_S, mark_lost_routers
from tests.controlplane.rollouts import (
    COMPLETE,
    FORMER,
    PENDING,
    PROGRESSING,
    ack,
    announce_all,
    moves,
    newest,
    publish_stages,
    said_of_pool,
    start_routers,
    state,
)

pytestmark = pytest.mark.django_db


def test_a_stage_tries_the_revision_beside_the_one_in_force(policy, routers):
    rollout = publish_stages(policy)

    said = said_of_pool()
    assert (said["revision"], said["settings"]) == (1, FORMER)
    assert (said["trial"]["revision"], said["trial"]["share"]) == (2, 0.05)
    assert said["trial"]["settings"]["strategy"] == "prefix_hash"
    assert [stage["share"] for stage in rollout.stages] == [0.05, 0.25, 1.0]
    assert (policy.live().number, policy.canary().number) == (1, 2)


def test_stages_follow_one_another_once_every_router_ran_them_for_their_time(policy, routers, time_machine_at):
    rollout = publish_stages(policy)
    assert state(rollout) == (PENDING, 0)
    ack(routers[0])
    assert state(rollout) == (PROGRESSING, 0)
    time_machine_at(70)
    announce_all(routers)
    advance_rollouts()
    assert state(rollout) == (PROGRESSING, 0), "a router does not run it yet"
    ack(routers[1])
    time_machine_at(100)
    advance_rollouts()
    assert state(rollout) == (PROGRESSING, 0), "it was observed for 30 s of 60"

    time_machine_at(131)
    announce_all(routers)
    advance_rollouts()
    assert state(rollout) == (PROGRESSING, 1)
    assert said_of_pool()["trial"]["share"] == 0.25
    ack()
    time_machine_at(200)
    announce_all(routers)
    advance_rollouts()
    assert state(rollout) == (PROGRESSING, 2)
    assert "trial" not in said_of_pool()
    assert said_of_pool()["revision"] == 2
    assert dict(policy.revisions.values_list("number", "state")) == {1: "retired", 2: "live"}
    ack()
    assert state(rollout)[0] == COMPLETE
    assert moves(rollout) == ["publish", "begin", "widen", "widen", "complete"]


def test_ticks_change_nothing_that_is_where_it_should_be(policy, routers):
    rollout = publish_stages(policy)
    ack()
    before = (state(rollout), RolloutStep.objects.count(), Event.objects.count(), ConfigSnapshot.objects.count())
    for _ in range(3):
        advance_rollouts()
    after = (state(rollout), RolloutStep.objects.count(), Event.objects.count(), ConfigSnapshot.objects.count())
    assert after == before


def test_without_a_router_a_stage_waits(policy, time_machine_at):
    rollout = publish_stages(policy)
    time_machine_at(3600)
    mark_lost_routers()
    assert state(rollout) == (PENDING, 0)
    ack(*start_routers("router-1"))
    assert state(rollout) == (PROGRESSING, 0)


def test_a_router_that_is_lost_in_the_middle_is_not_waited_for(policy, routers, time_machine_at):
    rollout = publish_stages(policy)
    ack(routers[0])
    time_machine_at(LOST_AFTER_S + 1)
    announce_all(routers[:1])
    mark_lost_routers()
    rollout.refresh_from_db()
    assert rollout.stage_converged_at is not None


def test_a_router_that_joins_in_the_middle_is_waited_for_by_the_next_stage(policy, routers, time_machine_at):
    rollout = publish_stages(policy)
    ack()
    start_routers("late")
    promote_rollout(rollout.pk, by=None)
    ack(*routers)
    rollout.refresh_from_db()
    assert rollout.stage_converged_at is None
    ack()
    rollout.refresh_from_db()
    assert rollout.stage_converged_at is not None


def test_a_stage_on_named_routers_is_not_run_by_others_alone(policy, routers, time_machine_at):
    rollout = publish_stages(policy, [{"routers": ["router-2"]}])
    assert said_of_pool()["trial"]["routers"] == ["router-2"]
    time_machine_at(LOST_AFTER_S + 1)
    announce_all(routers[:1])
    mark_lost_routers()
    ack(routers[0])
    rollout.refresh_from_db()
    assert (rollout.state, rollout.stage_converged_at) == (PROGRESSING, None)


def test_a_stage_for_task_groups_forgets_those_that_go(policy, routers):
    for name in ("chat", "batch"):
        create_task_group(policy.pool, name)
    rollout = publish_stages(policy, [{"groups": ["batch", "chat"]}])
    assert said_of_pool()["trial"]["groups"] == ["batch", "chat"]
    remove_task_group(policy.pool.groups.get(name="batch"))
    assert said_of_pool()["trial"]["groups"] == ["chat"]

    own = create_policy(policy.pool, policy.pool.groups.get(name="chat"))
    publish_revision(save_draft(own, FORMER).pk)
    assert "trial" not in said_of_pool(), "the pool's policy places none of them any more"
    assert state(rollout)[0] == PROGRESSING or state(rollout)[0] == PENDING


def test_a_groups_policy_is_tried_by_share_too(policy, routers):
    own = create_policy(policy.pool, create_task_group(policy.pool, "chat"))
    publish_revision(save_draft(own, FORMER).pk)
    publish_stages(own)
    said = newest().document["pools"][0]["groups"][0]["policy"]
    assert (said["revision"], said["trial"]["revision"]) == (1, 2)


def test_the_first_revision_of_a_groups_policy_has_nothing_to_be_compared_with(policy, routers):
    own = create_policy(policy.pool, create_task_group(policy.pool, "chat"))
    with pytest.raises(InvalidError, match="nothing of this policy is in force yet"):
        publish_stages(own)
    assert own.draft() is not None


def test_removing_a_groups_policy_takes_its_rollout_with_it(policy, routers):
    own = create_policy(policy.pool, create_task_group(policy.pool, "chat"))
    publish_revision(save_draft(own, FORMER).pk)
    publish_stages(own)
    remove_policy(own)
    assert newest().document["pools"][0]["groups"][0]["policy"] is None
    advance_rollouts()


def test_a_pause_stops_the_stages_clock(policy, routers, time_machine_at, operator):
    rollout = publish_stages(policy)
    ack()
    time_machine_at(30)
    pause_rollout(rollout.pk, by=operator)
    time_machine_at(1030)
    advance_rollouts()
    rollout.refresh_from_db()
    assert (rollout.stage, rollout.stage_ends_at) == (0, None)
    resume_rollout(rollout.pk, by=operator)
    time_machine_at(1050)
    advance_rollouts()
    assert state(rollout) == (PROGRESSING, 0), "30 and 20 of 60 seconds were observed"
    pause_rollout(rollout.pk, by=operator)
    time_machine_at(2050)
    resume_rollout(rollout.pk, by=operator)
    time_machine_at(2065)
    advance_rollouts()
    assert state(rollout) == (PROGRESSING, 1)
    assert (rollout.stage_paused_s, rollout.paused_at) == (0.0, None), "the next stage has a clock of its own"
