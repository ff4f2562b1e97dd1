"""A revision's way into force, stage by stage, and back."""

import pytest
from django.db import DatabaseError, IntegrityError, transaction

from controlplane.errors import InvalidError, OwnPublicationError, RolloutMoveError
from controlplane.models import AuditEntry, ConfigSnapshot, Event, RolloutState, RolloutStep
from controlplane.services.access.projects import update_project
from controlplane.services.fleet.task_groups import create_task_group, remove_task_group
from controlplane.services.policies.lifecycle import create_policy, publish_revision, remove_policy, save_draft
from controlplane.services.rollouts.moves import MOVES
from controlplane.services.rollouts.steering import (
    SILENT_S,
    abort_rollout,
    advance_rollouts,
    approve_rollout,
    judge_stage,
    pause_rollout,
    promote_rollout,
    resume_rollout,
)
from controlplane.services.routers import LOST_AFTER_S, announce, mark_lost_routers
from tests.controlplane.rollouts import (
    BREACH,
    DOUBT,
    FORMER,
    NEXT,
    ack,
    nack,
    newest,
    publish_stages,
    said_of_pool,
    start_routers,
    state,
    verdict,
)

pytestmark = pytest.mark.django_db
AWAITING, PENDING, PROGRESSING, PAUSED, HOLDING, COMPLETE, ABORTED, ROLLED_BACK, SUPERSEDED = RolloutState


@pytest.fixture
def second(django_user_model):
    """Somebody else who may approve."""
    return django_user_model.objects.create_user("ada", password="a long enough password", is_superuser=True)


@pytest.fixture
def routers(pool):
    """Two that run what there is."""
    both = start_routers("router-1", "router-2")
    ack()
    return both


def moves(rollout):
    return [step.move for step in rollout.steps.all()]


# --- stages ------------------------------------------------------------------------------------------


def test_a_stage_tries_the_revision_beside_the_one_in_force(policy, routers):
    rollout = publish_stages(policy)

    said = said_of_pool()
    assert (said["revision"], said["settings"]) == (1, FORMER)
    assert (said["trial"]["revision"], said["trial"]["share"]) == (2, 0.05)
    assert said["trial"]["settings"]["strategy"] == "prefix_hash"
    assert [stage["share"] for stage in rollout.stages] == [0.05, 0.25, 1.0]
    assert (policy.live().number, policy.on_trial().number) == (1, 2)


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


def announce_all(routers):
    """They are not lost, and run what they ran."""
    for router in routers:
        router.refresh_from_db()
        told = {"name": router.name, "boot": router.boot, "admin_url": router.admin_url}
        announce(**told, revision=router.running_number, sha256=router.running_sha256)


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


# --- back --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["abort", "roll_back", "supersede"])
def test_whichever_way_a_trial_ends_the_former_settings_are_what_they_were_to_the_byte(policy, routers, way):
    before = newest().sha256
    rollout = publish_stages(policy, guard={})
    ack()
    assert newest().sha256 != before
    if way == "abort":
        abort_rollout(rollout.pk, by=None, reason="looks bad")
    elif way == "roll_back":
        verdict(rollout, "breached", BREACH)
    else:
        update_project(policy.pool.project, needs_approval=True)
        publish_revision(save_draft(policy, {"strategy": "least_load"}).pk)

    assert newest().sha256 == before
    rollout.refresh_from_db()
    assert (rollout.state, rollout.finished_at is not None) == (MOVES[way].after, True)
    rollout.revision.refresh_from_db()
    assert rollout.revision.state == "withdrawn"
    assert policy.live().number == 1


def test_a_breach_keeps_its_evidence(policy, routers):
    rollout = publish_stages(policy, guard={})
    ack()
    verdict(rollout, "breached", BREACH)

    step = rollout.steps.last()
    assert (step.move, step.evidence, step.by) == ("roll_back", BREACH, None)
    assert rollout.why == "A hit rate of 41.0 % beside 60.0 %."
    event = Event.objects.get(kind="rollout_rolled_back")
    assert "A hit rate of 41.0 %" in event.summary
    assert event.detail["evidence"] == BREACH
    assert AuditEntry.objects.get(kind="rollout_rolled_back").actor == ""


def test_what_is_in_force_is_not_aborted_but_taken_back_by_another_publication(policy, routers, operator):
    rollout = publish_revision(save_draft(policy, NEXT).pk)
    with pytest.raises(RolloutMoveError, match="in force already"):
        abort_rollout(rollout.pk, by=operator)
    ack()
    with pytest.raises(RolloutMoveError, match="is complete"):
        abort_rollout(rollout.pk, by=operator)


def test_the_next_publication_takes_the_place_of_a_trial(policy, routers):
    first = publish_stages(policy)
    second = publish_stages(policy, settings={"strategy": "least_load"})
    assert state(first)[0] == SUPERSEDED
    assert state(second)[0] == PENDING
    assert said_of_pool()["trial"]["revision"] == 3
    assert dict(policy.revisions.values_list("number", "state")) == {1: "live", 2: "withdrawn", 3: "trial"}


# --- the guard ---------------------------------------------------------------------------------------


def test_passing_goes_on_when_the_stage_was_observed_for_its_time(policy, routers, time_machine_at):
    rollout = publish_stages(policy, guard={})
    ack()
    verdict(rollout, "passed")
    assert state(rollout) == (PROGRESSING, 0)
    time_machine_at(61)
    advance_rollouts()
    assert state(rollout) == (PROGRESSING, 0), "it is the guard's to say"
    verdict(rollout, "passed")
    assert state(rollout) == (PROGRESSING, 1)
    assert (rollout.readings, rollout.readings_at) == ([], None), "what was read of another stage"


def test_doubt_beyond_the_time_holds_until_a_later_verdict(policy, routers, time_machine_at):
    rollout = publish_stages(policy, guard={})
    ack()
    verdict(rollout, "inconclusive", DOUBT)
    assert state(rollout)[0] == PROGRESSING
    time_machine_at(61)
    verdict(rollout, "inconclusive", DOUBT)
    assert (rollout.state, rollout.held_by, rollout.why) == (HOLDING, "guard", "12 of 200 requests so far.")
    advance_rollouts()
    assert state(rollout)[0] == HOLDING
    verdict(rollout, "passed")
    assert state(rollout) == (PROGRESSING, 1)
    assert rollout.held_by == ""


def test_what_is_held_can_be_rolled_back_and_promoted(policy, routers, time_machine_at, operator):
    rollout = publish_stages(policy, guard={})
    ack()
    time_machine_at(61)
    verdict(rollout, "inconclusive", DOUBT)
    promote_rollout(rollout.pk, by=operator, reason="enough for me")
    assert state(rollout) == (PROGRESSING, 1)
    assert rollout.steps.last().by == operator
    time_machine_at(130)
    ack()
    time_machine_at(200)
    verdict(rollout, "inconclusive", DOUBT)
    verdict(rollout, "breached", BREACH)
    assert state(rollout)[0] == ROLLED_BACK


def test_a_verdict_on_another_stage_changes_nothing(policy, routers):
    rollout = publish_stages(policy, guard={})
    ack()
    promote_rollout(rollout.pk, by=None)
    verdict(rollout, "breached", BREACH, stage=0)
    assert state(rollout) == (PROGRESSING, 1)
    assert rollout.readings == []


def test_a_verdict_on_what_has_ended_or_has_no_guard_changes_nothing(policy, routers):
    unguarded = publish_stages(policy)
    verdict(unguarded, "breached", BREACH)
    assert state(unguarded)[0] == PENDING
    guarded = publish_stages(policy, guard={})
    abort_rollout(guarded.pk, by=None)
    verdict(guarded, "breached", BREACH)
    assert state(guarded)[0] == ABORTED
    judge_stage(10**6, stage=0, verdict="breached", readings=[])


def test_a_guard_that_says_nothing_holds_what_is_due(policy, routers, time_machine_at):
    rollout = publish_stages(policy, guard={})
    ack()
    time_machine_at(60 + SILENT_S - 5)
    announce_all(routers)
    advance_rollouts()
    assert state(rollout)[0] == PROGRESSING
    time_machine_at(60 + SILENT_S + 1)
    advance_rollouts()
    rollout.refresh_from_db()
    assert (rollout.state, rollout.held_by) == (HOLDING, "guard")
    assert "says nothing" in rollout.why
    verdict(rollout, "passed")
    assert state(rollout) == (PROGRESSING, 1)


# --- people ------------------------------------------------------------------------------------------


def test_a_pause_widens_nothing_and_the_guard_still_watches(policy, routers, time_machine_at, operator):
    rollout = publish_stages(policy, guard={})
    ack()
    pause_rollout(rollout.pk, by=operator, reason="a demo at noon")
    time_machine_at(61)
    verdict(rollout, "passed")
    advance_rollouts()
    assert state(rollout) == (PAUSED, 0)
    assert said_of_pool()["trial"]["share"] == 0.05
    verdict(rollout, "breached", BREACH)
    assert state(rollout)[0] == ROLLED_BACK


def test_what_was_paused_goes_on_where_it_was(policy, routers, time_machine_at, operator):
    rollout = publish_stages(policy)
    ack()
    pause_rollout(rollout.pk, by=operator)
    with pytest.raises(RolloutMoveError, match="is paused"):
        pause_rollout(rollout.pk, by=operator)
    time_machine_at(61)
    resume_rollout(rollout.pk, by=operator)
    advance_rollouts()
    assert state(rollout) == (PROGRESSING, 1)
    assert [(step.move, step.by) for step in rollout.steps.all()][2:4] == [("pause", operator), ("resume", operator)]


def test_promoting_the_last_stage_but_one_puts_the_revision_in_force(policy, routers, operator):
    rollout = publish_stages(policy, [{"share": 0.5}])
    ack()
    promote_rollout(rollout.pk, by=operator)
    assert policy.live().number == 2
    with pytest.raises(RolloutMoveError, match="in force already"):
        promote_rollout(rollout.pk, by=operator)
    assert Event.objects.get(kind="policy_published").actor == operator


def test_a_refusal_holds_and_says_which_router_and_why_until_none_refuses(policy, routers):
    rollout = publish_stages(policy)
    ack(routers[0])
    nack(routers[1])
    rollout.refresh_from_db()
    assert (rollout.state, rollout.held_by) == (HOLDING, "refusal")
    assert rollout.why == "Router router-2 refuses it: $.pools[0]: no room"
    assert rollout.steps.last().evidence[0]["router"] == "router-2"
    advance_rollouts()
    ack(routers[1])
    assert state(rollout)[0] == PROGRESSING
    assert moves(rollout)[-2:] == ["hold", "release"]


def test_a_refusal_is_no_reason_to_go_on_when_the_guard_is_content(policy, routers, time_machine_at):
    rollout = publish_stages(policy, guard={})
    ack()
    nack_later = start_routers("router-3")[0]
    nack(nack_later)
    time_machine_at(61)
    verdict(rollout, "passed")
    assert state(rollout) == (HOLDING, 0)


def test_an_all_at_once_rollout_is_held_by_a_refusal_too(policy, routers):
    rollout = publish_revision(save_draft(policy, NEXT).pk)
    nack(routers[0])
    ack(routers[1])
    assert state(rollout)[0] == HOLDING
    ack(routers[0])
    assert state(rollout)[0] == COMPLETE


# --- approval ----------------------------------------------------------------------------------------


def test_what_needs_approval_is_tried_by_nobody_until_somebody_else_says_so(policy, routers, operator, second):
    update_project(policy.pool.project, needs_approval=True)
    before = newest().sha256
    rollout = publish_stages(policy, by=operator)
    advance_rollouts()
    assert state(rollout) == (AWAITING, 0)
    assert newest().sha256 == before
    with pytest.raises(OwnPublicationError):
        approve_rollout(rollout.pk, by=operator)
    for refused in (pause_rollout, resume_rollout, promote_rollout):
        with pytest.raises(RolloutMoveError):
            refused(rollout.pk, by=second)

    approve_rollout(rollout.pk, by=second, reason="looks right")
    assert state(rollout) == (PENDING, 0)
    assert (rollout.approved_by, said_of_pool()["trial"]["share"]) == (second, 0.05)
    with pytest.raises(RolloutMoveError):
        approve_rollout(rollout.pk, by=second)


def test_what_needs_approval_can_be_declined_or_superseded(policy, routers, operator, second):
    update_project(policy.pool.project, needs_approval=True)
    declined = publish_revision(save_draft(policy, NEXT).pk, by=operator)
    abort_rollout(declined.pk, by=second, reason="not on a Friday")
    assert state(declined)[0] == ABORTED
    superseded = publish_revision(save_draft(policy, NEXT).pk, by=operator)
    latest = publish_revision(save_draft(policy, NEXT).pk, by=operator)
    assert (state(superseded)[0], state(latest)[0]) == (SUPERSEDED, AWAITING)
    assert policy.live().number == 1


def test_all_at_once_and_a_groups_first_revision_are_approved_too(policy, routers, operator, second):
    update_project(policy.pool.project, needs_approval=True)
    own = create_policy(policy.pool, create_task_group(policy.pool, "chat"))
    rollout = publish_revision(save_draft(own, NEXT).pk, by=operator)
    assert own.live() is None
    approve_rollout(rollout.pk, by=second)
    assert own.live().number == 1
    assert newest().document["pools"][0]["groups"][0]["policy"]["revision"] == 1


def test_the_database_itself_refuses_an_approval_of_ones_own(policy, operator):
    rollout = publish_stages(policy, by=operator)
    with pytest.raises(IntegrityError), transaction.atomic():
        type(rollout).objects.filter(pk=rollout.pk).update(approved_by=operator)


# --- the record --------------------------------------------------------------------------------------


def test_each_move_is_a_step_and_an_event_with_who_and_why(policy, routers, operator):
    rollout = publish_stages(policy, by=operator, reason="warmer")
    ack()
    pause_rollout(rollout.pk, by=operator, reason="lunch")
    abort_rollout(rollout.pk, by=operator, reason="no")

    told = [(step.move, step.before, step.after, step.reason) for step in rollout.steps.all()]
    assert told == [
        ("publish", "", PENDING, "warmer"),
        ("begin", PENDING, PROGRESSING, ""),
        ("pause", PROGRESSING, PAUSED, "lunch"),
        ("abort", PAUSED, ABORTED, "no"),
    ]
    kinds = list(Event.objects.filter(kind__startswith="rollout").order_by("pk").values_list("kind", flat=True))
    assert kinds == ["rollout_started", "rollout_begun", "rollout_paused", "rollout_aborted"]
    started = Event.objects.get(kind="rollout_started")
    assert "is tried on 5 % of the prefix space" in started.summary
    assert (started.detail["before"], started.detail["revision"]) == (FORMER, 2)
    audited = list(AuditEntry.objects.filter(kind__startswith="rollout").values_list("kind", "reason"))
    assert set(audited) == {("rollout_started", "warmer"), ("rollout_paused", "lunch"), ("rollout_aborted", "no")}


def test_steps_never_change(policy):
    rollout = publish_stages(policy)
    with pytest.raises(DatabaseError, match="never changes"), transaction.atomic():
        rollout.steps.update(reason="it was somebody else")


@pytest.mark.parametrize(
    ("number", "before", "after"),
    [
        (1, "retired", "live"),
        (2, "live", "trial"),
        (2, "live", "withdrawn"),
        (3, "withdrawn", "trial"),
        (4, "trial", "retired"),
    ],
)
def test_the_database_refuses_every_other_way_of_a_revision(policy, number, before, after):
    publish_revision(save_draft(policy, NEXT).pk)
    publish_stages(policy)
    publish_stages(policy)
    revision = policy.revisions.filter(number=number, state=before)
    with pytest.raises(DatabaseError, match="never changes"), transaction.atomic():
        assert revision.update(state=after) == 1


def test_a_policy_has_one_trial_at_most_whoever_writes(policy):
    rollout = publish_stages(policy)
    with pytest.raises(IntegrityError), transaction.atomic():
        policy.revisions.create(
            number=9, state="trial", settings=FORMER, digest="", published_at=rollout.revision.published_at
        )
