"""A second person."""

import pytest
from django.db import IntegrityError, transaction

from controlplane.errors import OwnPublicationError, RolloutMoveError
from controlplane.services.fleet.pools import update_project
from controlplane.services.fleet.task_groups import create_task_group
from controlplane.services.policies.lifecycle import create_policy, publish_revision, save_draft
from controlplane.services.policies.rollouts import (
    abort_rollout,
    advance_rollouts,
    approve_rollout,
    pause_rollout,
    promote_rollout,
    resume_rollout,
)
from tests.controlplane.rollouts import (
    ABORTED,
    AWAITING,
    NEXT,
    PENDING,
    SUPERSEDED,
    newest,
    publish_stages,
    said_of_pool,
    state,
)

pytestmark = pytest.mark.django_db


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
