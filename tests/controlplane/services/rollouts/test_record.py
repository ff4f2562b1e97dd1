"""What is kept of a rollout, and what the database holds."""

import pytest
from django.db import DatabaseError, IntegrityError, transaction

from controlplane.models import AuditEntry, Event
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from controlplane.services.policies.rollouts import (
    abort_rollout,
    pause_rollout,
)
from tests.controlplane.rollouts import (
    ABORTED,
    FORMER,
    NEXT,
    PAUSED,
    PENDING,
    PROGRESSING,
    ack,
    publish_stages,
)

pytestmark = pytest.mark.django_db


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
