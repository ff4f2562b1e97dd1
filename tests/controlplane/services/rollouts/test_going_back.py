"""What a trial leaves when it is taken back."""

import pytest

from controlplane.errors import RolloutMoveError
from controlplane.models import AuditEntry, Event
from controlplane.services.fleet.pools import update_project
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from controlplane.services.policies.rollout_transitions import TRANSITIONS
from controlplane.services.policies.rollouts import (
    abort_rollout,
)
from tests.controlplane.rollouts import (
    BREACH,
    NEXT,
    PENDING,
    SUPERSEDED,
    ack,
    newest,
    publish_stages,
    said_of_pool,
    state,
    verdict,
)

pytestmark = pytest.mark.django_db


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
    assert (rollout.state, rollout.finished_at is not None) == (TRANSITIONS[way].after, True)
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
