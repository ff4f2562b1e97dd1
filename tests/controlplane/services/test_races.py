"""Concurrent changes, with real commits on separate connections."""

import pytest

from controlplane.errors import ConflictError, InUseError
from controlplane.models import ConfigSnapshot, Event, Rollout, Router
from controlplane.services.fleet.pools import update_pool
from controlplane.services.fleet.replicas import add_replica, record_engine_facts, remove_replica
from controlplane.services.fleet.task_groups import create_task_group
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from controlplane.services.policies.rollouts import (
    Verdict,
    abort_rollout,
    advance_rollouts,
    apply_verdict,
    promote_rollout,
)
from controlplane.services.routers import announce
from tests.controlplane.rollouts import ack, publish_stages, start_routers
from tests.controlplane.threads import at_once, contend_for_numbering_lock

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_draft_is_published_once_by_concurrent_publishers(policy):
    draft = save_draft(policy, {"strategy": "prefix_hash"})
    outcomes = at_once(*[lambda: publish_revision(draft.pk)] * 8)
    assert sum(isinstance(outcome, Rollout) for outcome in outcomes) == 1
    assert sum(isinstance(outcome, ConflictError) for outcome in outcomes) == 7
    assert Rollout.objects.count() == 1
    assert Event.objects.filter(kind="policy_published").count() == 1


def test_snapshot_numbers_have_no_gaps_and_the_newest_contains_every_change(pool):
    def add(number):
        return add_replica(pool, name=f"r{number}", url=f"http://10.0.0.{number}:8000")

    changes = [lambda number=number: add(number) for number in range(8)]
    at_once(*changes, lambda: update_pool(pool, models=["m"]), lambda: update_pool(pool, description="x"))

    numbers = sorted(ConfigSnapshot.objects.values_list("number", flat=True))
    assert numbers == list(range(1, len(numbers) + 1))
    newest = ConfigSnapshot.objects.first().document["pools"][0]
    assert (len(newest["replicas"]), newest["models"]) == (8, ["m"])


def test_concurrent_reports_of_a_cache_size_are_one_change(replica):
    before = ConfigSnapshot.objects.count()
    at_once(*[lambda: record_engine_facts(replica, block_tokens=16, capacity_blocks=2048)] * 6)
    assert ConfigSnapshot.objects.count() == before + 1
    assert Event.objects.filter(kind="replica_changed").count() == 1


def test_concurrent_first_heartbeats_create_one_router(pool):
    heartbeat = {"name": "router-1", "boot": "b", "admin_url": "http://127.0.0.1:1"}
    outcomes = at_once(*[lambda: announce(**heartbeat)] * 6)
    assert all(isinstance(outcome, Router) for outcome in outcomes)
    assert Router.objects.count() == 1
    assert Event.objects.filter(kind="router_joined").count() == 1


def test_a_replica_removed_during_other_changes_is_in_no_later_snapshot(pool, replica):
    additions = [lambda n=n: add_replica(pool, name=f"x{n}", url=f"http://10.0.1.{n}:8000") for n in range(4)]
    at_once(lambda: remove_replica(replica), *additions)
    names = [row["name"] for row in ConfigSnapshot.objects.first().document["pools"][0]["replicas"]]
    assert names == ["x0", "x1", "x2", "x3"]


def test_one_of_two_concurrent_removals_that_would_empty_a_subset_is_rejected(pool, replica):
    other = add_replica(pool, name="r2", url="http://10.0.0.2:8000")
    add_replica(pool, name="r3", url="http://10.0.0.3:8000")
    group = create_task_group(pool, "chat", replicas=[replica, other])

    outcomes = contend_for_numbering_lock(lambda: remove_replica(replica), lambda: remove_replica(other))

    assert sorted(type(outcome) for outcome in outcomes if outcome) == [InUseError]
    assert group.replicas.count() == 1, "an empty subset would be the whole pool"


def test_a_stage_is_entered_once_by_concurrent_controllers(policy):
    start_routers("router-1")
    ack()
    rollout = publish_stages(policy, [{"share": share, "observe_s": 0} for share in (0.1, 0.2, 0.3)])
    Router.objects.update(running_number=rollout.snapshot.number, running_sha256=rollout.snapshot.sha256)

    at_once(*[advance_rollouts] * 8)

    rollout.refresh_from_db()
    assert rollout.stage == 1, "the next stage waits for the router"
    assert [step.transition for step in rollout.history.all()] == ["publish", "start", "promote"]
    assert Event.objects.filter(kind="rollout_promoted").count() == 1


def test_concurrent_verdicts_and_user_actions_leave_one_active_revision(policy, operator):
    start_routers("router-1")
    ack()
    rollout = publish_stages(policy, [{"share": 0.1, "observe_s": 0}], guard={})
    ack()
    draft = save_draft(policy, {"strategy": "least_load"})

    outcomes = at_once(
        lambda: apply_verdict(rollout.pk, stage=0, verdict=Verdict.FAILED, readings=[]),
        lambda: apply_verdict(rollout.pk, stage=0, verdict=Verdict.PASSED, readings=[]),
        lambda: abort_rollout(rollout.pk, by=operator),
        lambda: promote_rollout(rollout.pk, by=operator),
        lambda: publish_revision(draft.pk),
        advance_rollouts,
    )

    assert all(outcome is None or isinstance(outcome, Rollout | ConflictError) for outcome in outcomes)
    live, config = policy.live(), ConfigSnapshot.objects.first().document["pools"][0]["policy"]
    assert (live.number, config["revision"], "canary" in config) == (3, 3, False)
    rollout.refresh_from_db()
    rollout.revision.refresh_from_db()
    assert rollout.revision.state in {"rolled_back", "retired"}
    assert not rollout.is_open
