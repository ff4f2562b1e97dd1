import pytest

from controlplane.errors import ConflictError, StaleDraftError
from controlplane.models import ConfigSnapshot, PolicyRevision, RevisionState
from controlplane.services.policies.lifecycle import publish_revision, revert_policy, save_draft

pytestmark = pytest.mark.django_db
PREFIX = {"strategy": "prefix_hash", "load_factor": 1.5}


@pytest.fixture
def changed(policy, operator):
    """The policy after its second revision."""
    publish_revision(save_draft(policy, PREFIX, by=operator).pk, by=operator)
    return policy


def test_going_back_publishes_a_new_revision_with_the_old_settings(changed, operator):
    rollout = revert_policy(changed, 1, by=operator, reason="TTFT doubled")

    live = changed.live()
    assert (live.number, live.strategy, live.author) == (3, "round_robin", operator)
    assert live.reason == "Back to revision 1: TTFT doubled"
    assert (rollout.revision, rollout.snapshot) == (live, ConfigSnapshot.objects.first())
    assert changed.revisions.get(number=1).state == RevisionState.RETIRED


def test_a_draft_that_somebody_is_at_stays_as_the_next_revision(changed, operator, django_user_model):
    editor = django_user_model.objects.create_user("ed")
    save_draft(changed, {"strategy": "least_load"}, by=editor, reason="a trial")

    revert_policy(changed, 1, by=operator)

    draft = changed.draft()
    assert (draft.number, draft.strategy, draft.author, draft.reason) == (4, "least_load", editor, "a trial")
    assert changed.live().author == operator


def test_what_runs_already_is_refused(changed):
    with pytest.raises(ConflictError, match="runs what revision 2 says already"):
        revert_policy(changed, 2)
    assert changed.revisions.count() == 2


def test_whoever_looked_at_another_live_revision_is_told(changed):
    with pytest.raises(StaleDraftError, match="no longer live"):
        revert_policy(changed, 1, expected_live=1)


def test_a_draft_is_nothing_to_go_back_to(changed):
    draft = save_draft(changed, {"strategy": "random"})

    with pytest.raises(PolicyRevision.DoesNotExist):
        revert_policy(changed, draft.number)
