"""Rollouts stage by stage: promotion, analysis, pauses, rejections, approval, and how each ends."""

import pytest
from django.db import DatabaseError, IntegrityError, transaction

from controlplane.errors import FaultedRevisionError, InvalidError, RolloutTransitionError, SelfApprovalError
from controlplane.models import AuditEntry, Event
from controlplane.services.fleet.pools import update_project
from controlplane.services.fleet.task_groups import create_task_group, remove_task_group
from controlplane.services.policies.lifecycle import create_policy, publish_revision, remove_policy, save_draft
from controlplane.services.policies.rollout_transitions import AUTOMATIC, BY_USER
from controlplane.services.policies.rollouts import (
    GUARD_TIMEOUT_S,
    abort_rollout,
    advance_rollouts,
    apply_verdict,
    approve_rollout,
    pause_rollout,
    promote_rollout,
    resume_rollout,
)
from controlplane.services.routers import LOST_AFTER_S, mark_lost_routers
from tests.controlplane.rollouts import (
    ABORTED,
    AWAITING,
    COMPLETE,
    FAILED,
    FORMER,
    HOLDING,
    INCONCLUSIVE,
    NEXT,
    PAUSED,
    PENDING,
    PROGRESSING,
    ROLLED_BACK,
    SUPERSEDED,
    ack,
    announce_all,
    nack,
    newest,
    newest_pool_policy,
    publish_stages,
    start_routers,
    state,
    transitions,
    verdict,
)

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("stored_pool")]


# --- stages ---------------------------------------------------------------------------------------------


def test_a_stage_sends_a_share_to_the_canary_beside_the_active_revision(policy, routers):
    rollout = publish_stages(policy)

    config = newest_pool_policy()
    assert (config["revision"], config["settings"]) == (1, FORMER)
    assert (config["canary"]["revision"], config["canary"]["share"]) == (2, 0.05)
    assert config["canary"]["settings"]["strategy"] == "prefix_hash"
    assert [stage["share"] for stage in rollout.stages] == [0.05, 0.25, 1.0]
    assert (policy.live().number, policy.canary().number) == (1, 2)


def test_the_next_stage_follows_once_every_router_ran_the_stage_for_its_time(policy, routers, time_machine_at):
    rollout = publish_stages(policy)
    assert state(rollout) == (PENDING, 0)
    ack(routers[0])
    assert state(rollout) == (PROGRESSING, 0)
    time_machine_at(70)
    announce_all(routers)
    advance_rollouts()
    assert state(rollout) == (PROGRESSING, 0), "one router does not run it yet"
    ack(routers[1])
    time_machine_at(100)
    advance_rollouts()
    assert state(rollout) == (PROGRESSING, 0), "it was observed for 30 of 60 s"

    time_machine_at(131)
    announce_all(routers)
    advance_rollouts()
    assert state(rollout) == (PROGRESSING, 1)
    assert newest_pool_policy()["canary"]["share"] == 0.25
    ack()
    time_machine_at(200)
    announce_all(routers)
    advance_rollouts()
    assert state(rollout) == (PROGRESSING, 2)
    assert "canary" not in newest_pool_policy()
    assert newest_pool_policy()["revision"] == 2
    assert dict(policy.revisions.values_list("number", "state")) == {1: "retired", 2: "live"}
    ack()
    assert state(rollout)[0] == COMPLETE
    assert transitions(rollout) == ["publish", "start", "promote", "promote", "complete"]


def test_a_stage_waits_for_a_router(policy, time_machine_at):
    rollout = publish_stages(policy)
    time_machine_at(3600)
    mark_lost_routers()
    assert state(rollout) == (PENDING, 0)
    ack(*start_routers("router-1"))
    assert state(rollout) == (PROGRESSING, 0)


def test_a_stage_does_not_wait_for_a_lost_router(policy, routers, time_machine_at):
    rollout = publish_stages(policy)
    ack(routers[0])
    time_machine_at(LOST_AFTER_S + 1)
    announce_all(routers[:1])
    mark_lost_routers()
    rollout.refresh_from_db()
    assert rollout.stage_converged_at is not None


def test_the_next_stage_waits_for_a_router_that_joined(policy, routers):
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


def test_a_stage_on_named_routers_needs_one_of_them(policy, routers, time_machine_at):
    rollout = publish_stages(policy, [{"routers": ["router-2"]}])
    assert newest_pool_policy()["canary"]["routers"] == ["router-2"]
    time_machine_at(LOST_AFTER_S + 1)
    announce_all(routers[:1])
    mark_lost_routers()
    ack(routers[0])
    rollout.refresh_from_db()
    assert (rollout.state, rollout.stage_converged_at) == (PROGRESSING, None)


def test_a_stage_for_task_groups_drops_those_that_the_policy_no_longer_places(policy, routers):
    for name in ("chat", "batch"):
        create_task_group(policy.pool, name)
    rollout = publish_stages(policy, [{"groups": ["batch", "chat"]}])
    assert newest_pool_policy()["canary"]["groups"] == ["batch", "chat"]
    remove_task_group(policy.pool.groups.get(name="batch"))
    assert newest_pool_policy()["canary"]["groups"] == ["chat"]

    own = create_policy(policy.pool, policy.pool.groups.get(name="chat"))
    publish_revision(save_draft(own, FORMER).pk)
    assert "canary" not in newest_pool_policy()
    assert state(rollout)[0] in {PENDING, PROGRESSING}


def test_a_groups_policy_has_canaries_from_its_second_revision_on(policy, routers):
    own = create_policy(policy.pool, create_task_group(policy.pool, "chat"))
    with pytest.raises(InvalidError, match="no active revision"):
        publish_stages(own)
    publish_revision(own.draft().pk)
    publish_stages(own)
    config = newest().document["pools"][0]["groups"][0]["policy"]
    assert (config["revision"], config["canary"]["revision"]) == (1, 2)

    remove_policy(own)
    assert newest().document["pools"][0]["groups"][0]["policy"] is None
    advance_rollouts()


# --- pauses and promotion by users ----------------------------------------------------------------------


def test_a_pause_stops_the_stages_clock(policy, routers, time_machine_at, operator):
    rollout = publish_stages(policy)
    ack()
    time_machine_at(30)
    pause_rollout(rollout.pk, by=operator)
    with pytest.raises(RolloutTransitionError, match="is paused"):
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
    assert (rollout.stage_paused_s, rollout.paused_at) == (0.0, None), "the next stage has its own clock"


def test_a_paused_canary_is_not_promoted_and_can_be_rolled_back(policy, routers, time_machine_at, operator):
    rollout = publish_stages(policy, guard={})
    ack()
    pause_rollout(rollout.pk, by=operator, reason="a demo at noon")
    time_machine_at(61)
    verdict(rollout, "passed")
    advance_rollouts()
    assert state(rollout) == (PAUSED, 0)
    assert newest_pool_policy()["canary"]["share"] == 0.05
    verdict(rollout, "failed", FAILED)
    assert state(rollout)[0] == ROLLED_BACK
    rollout.revision.refresh_from_db()
    assert rollout.revision.fault == "analysis"
    with pytest.raises(FaultedRevisionError, match="was rolled back by its analysis"):
        publish_revision(save_draft(policy, rollout.revision.settings).pk)


def test_an_active_revision_cannot_be_promoted_or_aborted(policy, routers, operator):
    rollout = publish_stages(policy, [{"share": 0.5}])
    ack()
    promote_rollout(rollout.pk, by=operator)
    assert policy.live().number == 2
    for action in (promote_rollout, abort_rollout):
        with pytest.raises(RolloutTransitionError, match="already active"):
            action(rollout.pk, by=operator)
    assert Event.objects.get(kind="policy_published").actor == operator
    ack()
    with pytest.raises(RolloutTransitionError, match="is complete"):
        abort_rollout(rollout.pk, by=operator)


# --- rejections by routers ------------------------------------------------------------------------------


def test_a_rejection_holds_the_rollout_until_no_router_rejects_it(policy, routers, operator):
    rollout = publish_stages(policy)
    ack(routers[0])
    nack(routers[1])
    rollout.refresh_from_db()
    assert (rollout.state, rollout.held_by) == (HOLDING, "rejection")
    assert rollout.why == "Router router-2 rejects it: $.pools[0]: no room"
    assert rollout.history.last().evidence[0]["router"] == "router-2"
    advance_rollouts()
    with pytest.raises(RolloutTransitionError, match="is on hold and cannot be changed by resume"):
        resume_rollout(rollout.pk, by=operator)
    ack(routers[1])
    assert state(rollout)[0] == PROGRESSING
    assert transitions(rollout)[-2:] == ["hold", "resume"]
    assert Event.objects.filter(kind="rollout_hold_ended").count() == 1
    assert not AuditEntry.objects.filter(kind="rollout_hold_ended").exists()  # no user did it


def test_a_passed_analysis_does_not_override_a_rejection(policy, routers, time_machine_at):
    rollout = publish_stages(policy, guard={})
    ack()
    nack(start_routers("router-3")[0])
    time_machine_at(61)
    verdict(rollout, "passed")
    assert state(rollout) == (HOLDING, 0)


def test_a_rejection_holds_an_all_at_once_rollout_too(policy, routers):
    rollout = publish_revision(save_draft(policy, NEXT).pk)
    nack(routers[0])
    ack(routers[1])
    assert state(rollout)[0] == HOLDING
    ack(routers[0])
    assert state(rollout)[0] == COMPLETE


# --- analysis -------------------------------------------------------------------------------------------


def test_a_passed_analysis_enters_the_next_stage_after_the_observation_time(policy, routers, time_machine_at):
    rollout = publish_stages(policy, guard={})
    ack()
    verdict(rollout, "passed")
    assert state(rollout) == (PROGRESSING, 0)
    time_machine_at(61)
    advance_rollouts()
    assert state(rollout) == (PROGRESSING, 0), "only the analysis may promote"
    verdict(rollout, "passed")
    assert state(rollout) == (PROGRESSING, 1)
    assert (rollout.readings, rollout.readings_at) == ([], None), "results of the former stage"


def test_an_inconclusive_analysis_holds_after_the_observation_time(policy, routers, time_machine_at):
    rollout = publish_stages(policy, guard={})
    ack()
    verdict(rollout, "inconclusive", INCONCLUSIVE)
    assert state(rollout)[0] == PROGRESSING
    time_machine_at(61)
    verdict(rollout, "inconclusive", INCONCLUSIVE)
    assert (rollout.state, rollout.held_by, rollout.why) == (HOLDING, "analysis", "12 of 200 requests so far.")
    advance_rollouts()
    assert state(rollout)[0] == HOLDING
    verdict(rollout, "passed")
    assert state(rollout) == (PROGRESSING, 1)
    assert rollout.held_by == ""


def test_a_rollout_on_hold_can_be_promoted_and_rolled_back(policy, routers, time_machine_at, operator):
    rollout = publish_stages(policy, guard={})
    ack()
    time_machine_at(61)
    verdict(rollout, "inconclusive", INCONCLUSIVE)
    promote_rollout(rollout.pk, by=operator, reason="enough for me")
    assert state(rollout) == (PROGRESSING, 1)
    assert rollout.history.last().by == operator
    time_machine_at(130)
    ack()
    time_machine_at(200)
    verdict(rollout, "inconclusive", INCONCLUSIVE)
    verdict(rollout, "failed", FAILED)
    assert state(rollout)[0] == ROLLED_BACK


def test_results_for_another_stage_or_an_ended_rollout_are_ignored(policy, routers):
    without_analysis = publish_stages(policy)
    verdict(without_analysis, "failed", FAILED)
    assert state(without_analysis)[0] == PENDING
    rollout = publish_stages(policy, guard={})
    ack()
    promote_rollout(rollout.pk, by=None)
    verdict(rollout, "failed", FAILED, stage=0)
    assert (state(rollout), rollout.readings) == ((PROGRESSING, 1), [])
    abort_rollout(rollout.pk, by=None)
    verdict(rollout, "failed", FAILED)
    assert state(rollout)[0] == ABORTED
    apply_verdict(10**6, stage=0, verdict="failed", readings=[])


def test_a_missing_analysis_holds_a_finished_stage(policy, routers, time_machine_at):
    rollout = publish_stages(policy, guard={})
    ack()
    time_machine_at(60 + GUARD_TIMEOUT_S - 5)
    announce_all(routers)
    advance_rollouts()
    assert state(rollout)[0] == PROGRESSING
    time_machine_at(60 + GUARD_TIMEOUT_S + 1)
    advance_rollouts()
    rollout.refresh_from_db()
    assert (rollout.state, rollout.held_by) == (HOLDING, "analysis")
    assert "no analysis result" in rollout.why
    verdict(rollout, "passed")
    assert state(rollout) == (PROGRESSING, 1)


# --- ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["abort", "roll_back", "supersede"])
def test_the_configuration_is_the_same_after_a_canary_ends_byte_for_byte(policy, routers, end):
    before = newest().sha256
    rollout = publish_stages(policy, guard={})
    ack()
    assert newest().sha256 != before
    if end == "abort":
        abort_rollout(rollout.pk, by=None, reason="looks bad")
    elif end == "roll_back":
        verdict(rollout, "failed", FAILED)
    else:
        update_project(policy.pool.project, needs_approval=True)
        publish_revision(save_draft(policy, {"strategy": "least_load"}).pk)

    assert newest().sha256 == before
    rollout.refresh_from_db()
    assert (rollout.state, rollout.finished_at is not None) == ({**BY_USER, **AUTOMATIC}[end].after, True)
    rollout.revision.refresh_from_db()
    assert rollout.revision.state == "rolled_back"
    assert policy.live().number == 1


def test_a_failed_analysis_keeps_its_evidence(policy, routers):
    rollout = publish_stages(policy, guard={})
    ack()
    verdict(rollout, "failed", FAILED)

    step = rollout.history.last()
    assert (step.transition, step.evidence, step.by) == ("roll_back", FAILED, None)
    assert rollout.why == "A hit rate of 41.0 % compared with 60.0 %."
    event = Event.objects.get(kind="rollout_rolled_back")
    assert "A hit rate of 41.0 %" in event.summary
    assert event.detail["evidence"] == FAILED
    assert AuditEntry.objects.get(kind="rollout_rolled_back").actor == ""


def test_each_transition_is_a_step_and_an_event_with_user_and_reason(policy, routers, operator):
    rollout = publish_stages(policy, by=operator, reason="warmer")
    ack()
    pause_rollout(rollout.pk, by=operator, reason="lunch")
    abort_rollout(rollout.pk, by=operator, reason="no")

    steps = [(step.transition, step.before, step.after, step.reason) for step in rollout.history.all()]
    assert steps == [
        ("publish", "", PENDING, "warmer"),
        ("start", PENDING, PROGRESSING, ""),
        ("pause", PROGRESSING, PAUSED, "lunch"),
        ("abort", PAUSED, ABORTED, "no"),
    ]
    kinds = list(Event.objects.filter(kind__startswith="rollout").order_by("pk").values_list("kind", flat=True))
    assert kinds == ["rollout_started", "rollout_acknowledged", "rollout_paused", "rollout_aborted"]
    started = Event.objects.get(kind="rollout_started")
    assert "is a canary for 5 % of prefixes" in started.summary
    assert (started.detail["before"], started.detail["revision"]) == (FORMER, 2)
    audited = list(AuditEntry.objects.filter(kind__startswith="rollout").values_list("kind", "reason"))
    assert set(audited) == {("rollout_started", "warmer"), ("rollout_paused", "lunch"), ("rollout_aborted", "no")}


# --- approval -------------------------------------------------------------------------------------------


@pytest.fixture
def guarded_project(policy):
    update_project(policy.pool.project, needs_approval=True)


def test_a_rollout_that_needs_approval_starts_when_somebody_else_approves(
    policy, routers, operator, second, guarded_project
):
    before = newest().sha256
    rollout = publish_stages(policy, by=operator)
    advance_rollouts()
    assert (state(rollout), newest().sha256) == ((AWAITING, 0), before)
    with pytest.raises(SelfApprovalError):
        approve_rollout(rollout.pk, by=operator)
    for action in (pause_rollout, resume_rollout, promote_rollout):
        with pytest.raises(RolloutTransitionError):
            action(rollout.pk, by=second)

    approve_rollout(rollout.pk, by=second, reason="looks right")
    assert state(rollout) == (PENDING, 0)
    assert (rollout.approved_by, newest_pool_policy()["canary"]["share"]) == (second, 0.05)
    with pytest.raises(RolloutTransitionError):
        approve_rollout(rollout.pk, by=second)


def test_a_rollout_that_needs_approval_can_be_aborted_or_superseded(policy, operator, second, guarded_project):
    aborted = publish_revision(save_draft(policy, NEXT).pk, by=operator)
    abort_rollout(aborted.pk, by=second, reason="not on a Friday")
    assert state(aborted)[0] == ABORTED
    superseded = publish_revision(save_draft(policy, NEXT).pk, by=operator)
    latest = publish_revision(save_draft(policy, NEXT).pk, by=operator)
    assert (state(superseded)[0], state(latest)[0]) == (SUPERSEDED, AWAITING)
    assert policy.live().number == 1


def test_a_groups_first_revision_needs_approval_too(policy, operator, second, guarded_project):
    own = create_policy(policy.pool, create_task_group(policy.pool, "chat"))
    rollout = publish_revision(save_draft(own, NEXT).pk, by=operator)
    assert own.live() is None
    approve_rollout(rollout.pk, by=second)
    assert own.live().number == 1
    assert newest().document["pools"][0]["groups"][0]["policy"]["revision"] == 1


# --- database constraints -------------------------------------------------------------------------------


def test_the_database_rejects_an_approval_by_the_publisher_and_a_second_canary(policy, operator):
    rollout = publish_stages(policy, by=operator)
    with pytest.raises(IntegrityError), transaction.atomic():
        type(rollout).objects.filter(pk=rollout.pk).update(approved_by=operator)
    with pytest.raises(IntegrityError), transaction.atomic():
        policy.revisions.create(
            number=9, state="canary", settings=FORMER, digest="", published_at=rollout.revision.published_at
        )


@pytest.mark.parametrize(
    ("number", "before", "after"),
    [
        (1, "retired", "live"),
        (2, "live", "canary"),
        (2, "live", "rolled_back"),
        (3, "rolled_back", "canary"),
        (4, "canary", "retired"),
    ],
)
def test_the_database_rejects_other_transitions_of_a_revision(policy, number, before, after):
    publish_revision(save_draft(policy, NEXT).pk)
    publish_stages(policy)
    publish_stages(policy)
    revision = policy.revisions.filter(number=number, state=before)
    with pytest.raises(DatabaseError, match="never changes"), transaction.atomic():
        assert revision.update(state=after) == 1


def test_the_database_rejects_changes_of_steps(policy):
    rollout = publish_stages(policy)
    with pytest.raises(DatabaseError, match="never changes"), transaction.atomic():
        rollout.history.update(reason="it was somebody else")
