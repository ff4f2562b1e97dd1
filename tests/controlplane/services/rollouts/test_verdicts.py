"""What the guard's verdicts do."""

import pytest

from controlplane.services.policies.rollouts import (
    GUARD_TIMEOUT_S,
    abort_rollout,
    advance_rollouts,
    apply_verdict,
    promote_rollout,
)
from tests.controlplane.rollouts import (
    ABORTED,
    BREACH,
    DOUBT,
    HOLDING,
    PENDING,
    PROGRESSING,
    ROLLED_BACK,
    ack,
    announce_all,
    publish_stages,
    state,
    verdict,
)

pytestmark = pytest.mark.django_db


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
    apply_verdict(10**6, stage=0, verdict="breached", readings=[])


def test_a_guard_that_says_nothing_holds_what_is_due(policy, routers, time_machine_at):
    rollout = publish_stages(policy, guard={})
    ack()
    time_machine_at(60 + GUARD_TIMEOUT_S - 5)
    announce_all(routers)
    advance_rollouts()
    assert state(rollout)[0] == PROGRESSING
    time_machine_at(60 + GUARD_TIMEOUT_S + 1)
    advance_rollouts()
    rollout.refresh_from_db()
    assert (rollout.state, rollout.held_by) == (HOLDING, "guard")
    assert "says nothing" in rollout.why
    verdict(rollout, "passed")
    assert state(rollout) == (PROGRESSING, 1)
