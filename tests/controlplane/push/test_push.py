"""Pushes of changes to routers, by the tasks and over a socket."""

from datetime import timedelta

import msgspec
import pytest
from django.db import connection
from django.utils import timezone

from controlplane.models import ConfigSnapshot, Event, RolloutState, Router, WorkerLiveness
from controlplane.services.fleet.replicas import add_replica
from controlplane.services.routers import announce
from controlplane.tasks import push_config, reconcile_routers
from routing.schema import dump_snapshot
from tests.controlplane.push.pushing import end_pauses, newest, publish, row

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("stored_pool")]


def test_a_new_router_gets_the_configuration_and_its_acknowledgement_is_recorded(start_router, pool):
    router = start_router()
    push_config(row(router).pk)
    assert router.revision == newest()
    stored = row(router)
    assert (stored.running_number, stored.running_sha256) == (router.revision, router.running.sha256)
    assert stored.last_ack_at is not None
    assert Event.objects.filter(kind="config_applied", router=stored).count() == 1


def test_a_configuration_that_the_router_runs_is_not_pushed_again(start_router, pool):
    router = start_router()
    for _ in range(3):
        reconcile_routers()
    push_config(row(router).pk)
    assert router.pushes == [newest()]


def test_a_published_policy_is_complete_once_every_router_acknowledged(start_router, policy):
    routers = [start_router(f"router-{number}") for number in range(3)]
    rollout = publish(policy)
    routers[2].fault = lambda: "drop"

    reconcile_routers()
    rollout.refresh_from_db()
    assert (rollout.state, rollout.finished_at) == (RolloutState.PROGRESSING, None)

    routers[2].fault = lambda: None
    end_pauses()
    reconcile_routers()
    rollout.refresh_from_db()
    assert (rollout.state, rollout.finished_at is not None) == (RolloutState.COMPLETE, True)
    assert {router.running.config.pools[0].policy.settings.name for router in routers} == {"prefix_hash"}


def test_a_rollout_without_routers_waits_for_one(start_router, policy):
    rollout = publish(policy)
    reconcile_routers()
    rollout.refresh_from_db()
    assert rollout.state == RolloutState.PENDING
    start_router()
    reconcile_routers()
    rollout.refresh_from_db()
    assert rollout.state == RolloutState.COMPLETE


def test_a_rejection_is_recorded_once_with_its_reason_and_the_push_is_retried(start_router, policy):
    router = start_router()
    reconcile_routers()
    previous = router.revision
    router.fault = lambda: "nack"
    publish(policy)

    for _ in range(3):
        reconcile_routers()
        end_pauses()
    stored = row(router)
    assert (stored.last_nack["path"], stored.last_nack["reason"]) == ("$.pools[0]", "no room")
    assert (stored.running_number, router.revision) == (previous, previous)
    assert Event.objects.filter(kind="config_rejected").count() == 1

    router.fault = lambda: None
    reconcile_routers()
    stored = row(router)
    assert (stored.last_nack, stored.running_number) == (None, newest())


@pytest.mark.parametrize("fault", ["drop", "garbage", "error", "redirect"])
def test_a_missing_or_unexpected_response_is_a_failed_push(start_router, pool, fault):
    router = start_router()
    router.fault = lambda: fault
    reconcile_routers()
    stored = row(router)
    assert (stored.running_number, stored.push_failures, bool(stored.last_error)) == (None, 1, True)
    assert stored.push_after > timezone.now()


def test_a_503_of_a_router_is_retried_and_is_no_rejection(start_router, policy):
    router = start_router()
    reconcile_routers()
    router.fault = lambda: "not_now"
    rollout = publish(policy)
    reconcile_routers()
    stored = row(router)
    assert (stored.last_nack, stored.push_failures) == (None, 1)
    assert stored.last_error == "the router could not process it: no worker is running"
    rollout.refresh_from_db()
    assert rollout.state == RolloutState.PENDING
    router.fault = lambda: None
    end_pauses()
    reconcile_routers()
    rollout.refresh_from_db()
    assert (rollout.state, row(router).last_error) == (RolloutState.COMPLETE, "")
    assert not Event.objects.filter(kind="config_rejected").exists()


def test_a_router_with_another_token_is_reported(start_router, pool, settings):
    router = start_router()
    settings.ROUTER_ADMIN_TOKEN = "another"
    reconcile_routers()
    assert "WARMPATH_ROUTER_ADMIN_TOKEN" in row(router).last_error
    assert router.revision is None


def test_a_router_at_an_address_outside_the_fleets_networks_is_never_connected_to(pool):
    router = announce(name="router-1", boot="b", admin_url="http://169.254.169.254")
    reconcile_routers()
    router.refresh_from_db()
    assert "not an allowed destination" in router.last_error


def test_the_next_push_replaces_a_lost_acknowledgement(start_router, pool):
    router = start_router()
    router.fault = lambda: "lose_ack"
    reconcile_routers()
    assert (router.revision, row(router).running_number) == (newest(), None)
    router.fault = lambda: None
    end_pauses()
    reconcile_routers()
    assert row(router).running_number == newest()
    assert Event.objects.filter(kind="config_applied").count() == 1


def test_a_router_without_heartbeats_is_probed_before_anything_is_pushed(start_router, pool):
    router = start_router()
    reconcile_routers()
    Router.objects.update(last_seen_at=timezone.now() - timezone.timedelta(seconds=20))
    reconcile_routers()
    assert (router.state_reads, len(router.pushes)) == (1, 1)
    assert row(router).silent_for_s(timezone.now()) < 5


def test_a_router_without_heartbeats_is_recorded_once_as_lost_and_once_as_connected(start_router, pool):
    router = start_router()
    reconcile_routers()
    router.fault = lambda: "drop"
    Router.objects.update(last_seen_at=timezone.now() - timezone.timedelta(seconds=31))
    for _ in range(3):
        reconcile_routers()
        end_pauses()
    assert Event.objects.filter(kind="router_lost").count() == 1
    assert row(router).lost_at is not None

    router.fault = lambda: None
    for _ in range(2):
        announce(**router.announcement())
    assert row(router).lost_at is None
    assert Event.objects.filter(kind="router_joined").count() == 2


def test_after_an_outage_routers_are_probed_before_they_count_as_lost(start_router, policy):
    for number in range(3):
        start_router(f"router-{number}")
    reconcile_routers()
    rollout = publish(policy)
    silent_since = timezone.now() - timedelta(seconds=60)
    Router.objects.update(last_seen_at=silent_since)
    WorkerLiveness.objects.update(seen_at=silent_since)

    reconcile_routers()

    assert not Event.objects.filter(kind="router_lost").exists()
    rollout.refresh_from_db()
    assert rollout.state == RolloutState.COMPLETE


def test_a_router_with_a_higher_number_from_a_lost_database_gets_a_still_higher_one(start_router, pool, policy):
    router = start_router()
    reconcile_routers()
    higher = router.revision + 40
    other_config = msgspec.structs.replace(router.running.config, hash_secret="ab" * 32)
    router.running = dump_snapshot(other_config, higher)
    announce(**router.announcement())
    rollout = publish(policy)

    for _ in range(2):
        end_pauses()
        reconcile_routers()
    assert router.revision == newest() == higher + 1
    assert row(router).running_number == higher + 1
    rollout.refresh_from_db()
    assert rollout.state == RolloutState.COMPLETE


def test_a_router_with_another_configuration_of_the_same_number_gets_a_higher_one(start_router, pool):
    router = start_router()
    reconcile_routers()
    other_config = msgspec.structs.replace(router.running.config, hash_secret="ab" * 32)
    router.running = dump_snapshot(other_config, router.revision)
    router.boot = "b2"
    announce(**router.announcement())
    for _ in range(2):
        end_pauses()
        reconcile_routers()
    assert (row(router).running_number, row(router).running_sha256) == (newest(), router.running.sha256)
    assert router.running.config.hash_secret != "ab" * 32


def test_the_hash_secret_is_neither_in_the_database_nor_in_the_displayed_document(start_router, pool):
    router = start_router()
    reconcile_routers()
    secret = router.running.config.hash_secret
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names(cursor):
            cursor.execute(f"select count(*) from {table} where {table}::text like %s", [f"%{secret}%"])
            assert cursor.fetchone() == (0,), table
    assert ConfigSnapshot.objects.first().document["hash_secret"] == "***"


def test_routers_of_a_fleet_get_the_same_hash_secret(start_router, pool):
    first, second = start_router("router-1"), start_router("router-2")
    reconcile_routers()
    add_replica(pool, name="r1", url="http://10.0.0.1:8000")
    reconcile_routers()
    assert first.running.config.hash_secret == second.running.config.hash_secret
