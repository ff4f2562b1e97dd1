"""What people do about a rollout, and what a router that refuses does."""

import pytest

from controlplane.errors import RolloutMoveError
from controlplane.models import Event
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from controlplane.services.policies.rollouts import (
    advance_rollouts,
    pause_rollout,
    promote_rollout,
    resume_rollout,
)
from tests.controlplane.rollouts import (
    BREACH,
    COMPLETE,
    HOLDING,
    NEXT,
    PAUSED,
    PROGRESSING,
    ROLLED_BACK,
    ack,
    moves,
    nack,
    publish_stages,
    said_of_pool,
    start_routers,
    state,
    verdict,
)

pytestmark = pytest.mark.django_db


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
    assert state(rollout) == (PROGRESSING, 0), "nothing of the pause was observed"
    time_machine_at(61 + 61)
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
