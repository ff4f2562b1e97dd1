import pytest
from django.db import DatabaseError, IntegrityError, transaction

from controlplane.errors import ConflictError, FrozenError, GoneError, InvalidError, NotADraftError, StaleDraftError
from controlplane.models import ConfigSnapshot, Event, PolicyRevision, RevisionState, Rollout, RolloutState
from controlplane.services.fleet.pools import create_pool
from controlplane.services.fleet.task_groups import create_task_group
from controlplane.services.policies.lifecycle import (
    create_policy,
    discard_draft,
    publish_revision,
    remove_policy,
    save_draft,
)

pytestmark = pytest.mark.django_db
PREFIX_HASH = {"strategy": "prefix_hash", "load_factor": 1.5}


def test_a_pool_is_born_with_a_live_policy(policy):
    live = policy.live()
    assert (live.number, live.strategy, live.published_at is not None) == (1, "round_robin", True)
    assert policy.draft() is None


def test_a_new_pool_begins_with_lowest_cost(db):
    assert create_pool("another").policies.get().live().settings == {"strategy": "lowest_cost", "alpha": 2.0}


def test_publishing_retires_the_live_revision_and_numbers_the_configuration(policy, operator):
    draft = save_draft(policy, PREFIX_HASH, by=operator, reason="warmer")
    before = ConfigSnapshot.objects.count()

    rollout = publish_revision(draft.pk, by=operator)

    states = dict(policy.revisions.values_list("number", "state"))
    assert states == {1: RevisionState.RETIRED, 2: RevisionState.LIVE}
    assert rollout.state == RolloutState.PENDING
    assert rollout.snapshot == ConfigSnapshot.objects.first()
    assert ConfigSnapshot.objects.count() == before + 1
    shown = rollout.snapshot.document["pools"][0]["policy"]
    assert (shown["revision"], shown["settings"]["load_factor"]) == (2, 1.5)


def test_publishing_records_who_why_and_what_differs(policy, operator):
    draft = save_draft(policy, PREFIX_HASH, by=operator)
    publish_revision(draft.pk, by=operator, reason="the hit rate is poor")

    event = Event.objects.get(kind="policy_published")
    assert (event.actor, event.pool, event.detail["reason"]) == (operator, policy.pool, "the hit rate is poor")
    assert event.detail["before"] == {"strategy": "round_robin"}
    assert event.detail["after"]["load_factor"] == 1.5
    assert {change["field"] for change in event.detail["changes"]} >= {"strategy", "load_factor"}


def test_saving_again_edits_the_one_draft(policy, operator):
    first = save_draft(policy, PREFIX_HASH, by=operator)
    second = save_draft(policy, {"strategy": "least_load"}, by=operator)
    assert (first.pk, second.strategy) == (second.pk, "least_load")
    assert policy.revisions.filter(state="draft").count() == 1


def test_a_draft_holds_every_default_so_that_later_releases_do_not_change_it(policy):
    draft = save_draft(policy, PREFIX_HASH)
    assert draft.settings == {
        "strategy": "prefix_hash",
        "load_factor": 1.5,
        "min_bound": 4,
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
        ({"strategy": "prefix_hash", "load_factor": 0.5}, "$.settings.load_factor"),
        ({"strategy": "prefix_hash", "load_factor": "2"}, "$.settings.load_factor"),
        ({"strategy": "prefix_hash", "boundary": "page"}, "$.settings.boundary"),
        ({"strategy": "round_robin", "load_factor": 2}, "$.settings"),
        ({"strategy": "prefix_hash", "load_factor": float("nan")}, "$.settings"),
        ({"strategy": "prefix_hash", "load_factor": object()}, "$.settings"),
    ],
)
def test_settings_that_a_router_would_refuse_are_refused_with_their_path(policy, settings, path):
    with pytest.raises(InvalidError) as refusal:
        save_draft(policy, settings)
    assert refusal.value.faults[0].path == path
    assert policy.draft() is None


def test_only_a_draft_can_be_published_and_only_once(policy, operator):
    draft = save_draft(policy, PREFIX_HASH)
    publish_revision(draft.pk, by=operator)
    with pytest.raises(NotADraftError):
        publish_revision(draft.pk, by=operator)
    assert Rollout.objects.count() == 1


def test_a_draft_edited_since_it_was_looked_at_is_not_published(policy):
    seen = save_draft(policy, PREFIX_HASH)
    save_draft(policy, {"strategy": "least_load"})
    with pytest.raises(StaleDraftError):
        publish_revision(seen.pk, expected_digest=seen.digest)
    assert policy.live().number == 1


def test_an_editor_who_looked_at_a_former_live_revision_is_told(policy):
    publish_revision(save_draft(policy, PREFIX_HASH, based_on=1).pk)
    with pytest.raises(StaleDraftError):
        save_draft(policy, {"strategy": "least_load"}, based_on=1)
    assert save_draft(policy, {"strategy": "least_load"}, based_on=2).number == 3


def test_a_discarded_draft_is_gone_and_there_is_no_second_to_discard_or_publish(policy):
    draft = save_draft(policy, PREFIX_HASH)
    discard_draft(policy)
    assert policy.draft() is None
    with pytest.raises(NotADraftError):
        discard_draft(policy)
    with pytest.raises(GoneError, match="This draft was removed meanwhile"):
        publish_revision(draft.pk)


def test_the_next_publication_supersedes_a_rollout_that_is_still_open(policy):
    first = publish_revision(save_draft(policy, PREFIX_HASH).pk)
    publish_revision(save_draft(policy, {"strategy": "least_load"}).pk)
    first.refresh_from_db()
    assert (first.state, first.finished_at is not None) == (RolloutState.SUPERSEDED, True)


def test_a_published_revision_never_changes(policy):
    live = policy.live()
    live.settings = PREFIX_HASH
    with pytest.raises(FrozenError):
        live.save()
    with pytest.raises(DatabaseError, match="never changes"), transaction.atomic():
        PolicyRevision.objects.filter(pk=live.pk).update(settings=PREFIX_HASH)


def test_a_snapshot_never_changes(pool):
    newest = ConfigSnapshot.objects.first()
    with pytest.raises(FrozenError):
        newest.save()
    for change in (lambda: ConfigSnapshot.objects.update(number=9), lambda: ConfigSnapshot.objects.all().delete()):
        with pytest.raises(DatabaseError, match="never changes"), transaction.atomic():
            change()


def test_a_second_live_revision_is_refused_by_the_database(policy):
    live = policy.live()
    with pytest.raises(IntegrityError), transaction.atomic():
        PolicyRevision.objects.create(
            policy=policy, number=9, state="live", settings=live.settings, published_at=live.published_at
        )


def test_a_group_is_placed_by_its_own_policy_once_that_is_published_and_by_the_pools_when_removed(pool):
    group = create_task_group(pool, "chat")
    policy = create_policy(pool, group)
    assert ConfigSnapshot.objects.first().document["pools"][0]["groups"][0]["policy"] is None

    publish_revision(save_draft(policy, PREFIX_HASH).pk)
    shown = ConfigSnapshot.objects.first().document["pools"][0]["groups"][0]["policy"]
    assert (shown["name"], shown["revision"]) == ("default.chat", 1)

    remove_policy(policy)
    assert ConfigSnapshot.objects.first().document["pools"][0]["groups"][0]["policy"] is None


def test_a_pools_own_policy_cannot_be_removed(policy):
    with pytest.raises(ConflictError):
        remove_policy(policy)
