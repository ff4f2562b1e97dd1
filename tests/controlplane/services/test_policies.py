"""Drafts, publication and reverting of policies."""

import pytest
from django.db import DatabaseError, IntegrityError, transaction

from controlplane.errors import ConflictError, GoneError, ImmutableError, InvalidError, NotADraftError, StaleDraftError
from controlplane.models import AuditEntry, ConfigSnapshot, Event, PolicyRevision, RevisionState, Rollout, RolloutState
from controlplane.services.fleet.pools import create_pool
from controlplane.services.fleet.task_groups import create_task_group
from controlplane.services.policies.lifecycle import (
    create_policy,
    discard_draft,
    publish_revision,
    remove_policy,
    revert_policy,
    save_draft,
)

pytestmark = pytest.mark.django_db
PREFIX_HASH = {"strategy": "prefix_hash", "slack_s": 1.5}
LEAST_LOAD = {"strategy": "least_load"}


# --- drafts ---------------------------------------------------------------------------------------------


def test_a_new_pool_has_an_active_policy(policy):
    live = policy.live()
    assert (live.number, live.strategy, live.published_at is not None) == (1, "round_robin", True)
    assert policy.draft() is None
    assert create_pool("another", models=["other"]).policies.get().live().settings == {
        "strategy": "lowest_cost",
        "alpha": 2.0,
    }


def test_saving_again_replaces_the_draft(policy, operator):
    first = save_draft(policy, PREFIX_HASH, by=operator)
    second = save_draft(policy, LEAST_LOAD, by=operator)
    assert (first.pk, second.strategy) == (second.pk, "least_load")
    assert policy.revisions.filter(state="draft").count() == 1


def test_a_draft_contains_every_default_so_that_later_releases_do_not_change_it(policy):
    draft = save_draft(policy, PREFIX_HASH)
    assert draft.settings == {
        "strategy": "prefix_hash",
        "slack_s": 1.5,
        "boundary": "auto",
        "boundary_bytes": 1024,
        "boundary_messages": 1,
        "boundary_marker": "",
    }


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({}, "$.settings"),
        ({"strategy": "magic"}, "$.settings.strategy"),
        ({"strategy": "prefix_hash", "slack_s": -0.5}, "$.settings.slack_s"),
        ({"strategy": "prefix_hash", "slack_s": "2"}, "$.settings.slack_s"),
        ({"strategy": "prefix_hash", "boundary": "page"}, "$.settings.boundary"),
        ({"strategy": "round_robin", "slack_s": 2}, "$.settings"),
        ({"strategy": "prefix_hash", "slack_s": float("nan")}, "$.settings"),
        ({"strategy": "prefix_hash", "slack_s": object()}, "$.settings"),
    ],
)
def test_settings_that_routers_would_reject_are_rejected_with_their_path(policy, settings, path):
    with pytest.raises(InvalidError) as error:
        save_draft(policy, settings)
    assert error.value.faults[0].path == path
    assert policy.draft() is None


def test_a_draft_based_on_a_former_revision_is_rejected(policy):
    publish_revision(save_draft(policy, PREFIX_HASH, based_on=1).pk)
    with pytest.raises(StaleDraftError):
        save_draft(policy, LEAST_LOAD, based_on=1)
    assert save_draft(policy, LEAST_LOAD, based_on=2).number == 3


def test_drafts_and_policies_of_task_groups_record_who_made_and_discarded_them(policy, django_user_model):
    ada, bob = (django_user_model.objects.create_user(name) for name in ("ada", "bob"))
    save_draft(policy, PREFIX_HASH, by=ada)
    save_draft(policy, PREFIX_HASH, by=bob)  # changes nothing
    discard_draft(policy, by=bob)
    create_policy(policy.pool, create_task_group(policy.pool, "chat"), by=ada)

    entries = AuditEntry.objects.filter(kind__in=("draft_saved", "draft_discarded", "policy_created"))
    assert list(entries.order_by("number").values_list("kind", "actor")) == [
        ("draft_saved", "ada"),
        ("draft_discarded", "bob"),
        ("policy_created", "ada"),
    ]
    assert [entry.after["strategy"] for entry in entries.filter(kind="draft_saved")] == ["prefix_hash"]


def test_a_discarded_draft_can_be_neither_discarded_again_nor_published(policy):
    draft = save_draft(policy, PREFIX_HASH)
    discard_draft(policy)
    assert policy.draft() is None
    with pytest.raises(NotADraftError):
        discard_draft(policy)
    with pytest.raises(GoneError, match="This draft was removed meanwhile"):
        publish_revision(draft.pk)


# --- publication ----------------------------------------------------------------------------------------


def test_a_revision_of_an_earlier_release_is_read_without_settings_that_were_removed(policy):
    stored = {"strategy": "prefix_hash", "load_factor": 1.25, "min_bound": 8, "boundary": "system"}
    policy.revisions.filter(pk=save_draft(policy, PREFIX_HASH).pk).update(settings=stored)

    draft = policy.draft()
    assert draft.settings == {"strategy": "prefix_hash", "boundary": "system"}
    config = publish_revision(draft.pk).snapshot.document["pools"][0]["policy"]
    assert (config["revision"], config["settings"]["boundary"]) == (2, "system")


def test_publishing_retires_the_active_revision_and_freezes_a_snapshot(policy, operator):
    draft = save_draft(policy, PREFIX_HASH, by=operator)
    before = ConfigSnapshot.objects.count()

    rollout = publish_revision(draft.pk, by=operator, reason="the hit rate is poor")

    assert dict(policy.revisions.values_list("number", "state")) == {1: RevisionState.RETIRED, 2: RevisionState.LIVE}
    assert rollout.state == RolloutState.PENDING
    assert rollout.snapshot == ConfigSnapshot.objects.first()
    assert ConfigSnapshot.objects.count() == before + 1
    config = rollout.snapshot.document["pools"][0]["policy"]
    assert (config["revision"], config["settings"]["slack_s"]) == (2, 1.5)
    event = Event.objects.get(kind="policy_published")
    assert (event.actor, event.pool, event.detail["reason"]) == (operator, policy.pool, "the hit rate is poor")
    assert event.detail["before"] == {"strategy": "round_robin"}
    assert event.detail["after"]["slack_s"] == 1.5
    assert {change["field"] for change in event.detail["changes"]} >= {"strategy", "slack_s"}


def test_a_draft_is_published_only_once_and_only_in_the_expected_version(policy, operator):
    stale = save_draft(policy, PREFIX_HASH)
    draft = save_draft(policy, LEAST_LOAD)
    with pytest.raises(StaleDraftError):
        publish_revision(stale.pk, expected_digest=stale.digest)
    assert policy.live().number == 1
    publish_revision(draft.pk, by=operator, expected_digest=draft.digest)
    with pytest.raises(NotADraftError):
        publish_revision(draft.pk, by=operator)
    assert Rollout.objects.count() == 1


def test_a_task_group_has_its_own_policy_from_publication_to_removal(pool, policy):
    def policy_of_group():
        return ConfigSnapshot.objects.first().document["pools"][0]["groups"][0]["policy"]

    own = create_policy(pool, create_task_group(pool, "chat"))
    assert policy_of_group() is None
    publish_revision(save_draft(own, PREFIX_HASH).pk)
    assert (policy_of_group()["name"], policy_of_group()["revision"]) == ("default.chat", 1)
    remove_policy(own)
    assert policy_of_group() is None
    with pytest.raises(ConflictError):
        remove_policy(policy)


# --- immutable rows -------------------------------------------------------------------------------------


def test_a_published_revision_never_changes(policy):
    live = policy.live()
    live.settings = PREFIX_HASH
    with pytest.raises(ImmutableError):
        live.save()
    with pytest.raises(DatabaseError, match="never changes"), transaction.atomic():
        PolicyRevision.objects.filter(pk=live.pk).update(settings=PREFIX_HASH)
    with pytest.raises(IntegrityError), transaction.atomic():  # a second active one
        PolicyRevision.objects.create(
            policy=policy, number=9, state="live", settings=live.settings, published_at=live.published_at
        )


def test_a_snapshot_never_changes(pool):
    newest = ConfigSnapshot.objects.first()
    with pytest.raises(ImmutableError):
        newest.save()
    with pytest.raises(DatabaseError, match="never changes"), transaction.atomic():
        ConfigSnapshot.objects.update(number=9)


# --- reverting ------------------------------------------------------------------------------------------


@pytest.fixture
def twice_published(policy, operator):
    """The policy after its second revision."""
    publish_revision(save_draft(policy, PREFIX_HASH, by=operator).pk, by=operator)
    return policy


def test_reverting_publishes_a_new_revision_and_keeps_the_draft(twice_published, operator, django_user_model):
    editor = django_user_model.objects.create_user("ed")
    save_draft(twice_published, LEAST_LOAD, by=editor, reason="an experiment")

    rollout = revert_policy(twice_published, 1, by=operator, reason="TTFT doubled")

    live, draft = twice_published.live(), twice_published.draft()
    assert (live.number, live.strategy, live.author) == (3, "round_robin", operator)
    assert live.reason == "Back to revision 1: TTFT doubled"
    assert (rollout.revision, rollout.snapshot) == (live, ConfigSnapshot.objects.first())
    assert twice_published.revisions.get(number=1).state == RevisionState.RETIRED
    assert (draft.number, draft.strategy, draft.author, draft.reason) == (4, "least_load", editor, "an experiment")


def test_reverting_needs_another_published_revision_and_the_expected_active_revision(twice_published):
    with pytest.raises(ConflictError, match="already runs the settings of revision 2"):
        revert_policy(twice_published, 2)
    with pytest.raises(StaleDraftError, match="no longer active"):
        revert_policy(twice_published, 1, expected_live=1)
    draft = save_draft(twice_published, {"strategy": "random"})
    with pytest.raises(PolicyRevision.DoesNotExist):
        revert_policy(twice_published, draft.number)
