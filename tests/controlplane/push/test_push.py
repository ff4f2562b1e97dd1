"""From a change to the routers that run it, through the tasks and a router on a socket."""

import json
import random

import msgspec
import pytest
from django.db import connection
from django.utils import timezone

from controlplane.models import ConfigSnapshot, Event, RolloutState, Router
from controlplane.services.fleet.replicas import add_replica
from controlplane.services.routers import announce
from controlplane.tasks import push_config, reconcile_routers
from routing.schema import dump_snapshot
from tests.controlplane.push.pushing import later, newest, publish, row

pytestmark = pytest.mark.django_db


def test_a_new_router_is_pushed_to_and_its_acknowledgement_is_known(start_router, pool):
    router = start_router()
    push_config(row(router).pk)
    assert router.revision == newest()
    known = row(router)
    assert (known.running_number, known.running_sha256) == (router.revision, router.running.sha256)
    assert known.last_ack_at is not None
    assert Event.objects.filter(kind="config_applied", router=known).count() == 1


def test_what_runs_already_is_not_pushed_again(start_router, pool):
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
    later()
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


def test_a_refusal_is_recorded_once_with_its_reason_and_offered_again_later(start_router, policy):
    router = start_router()
    reconcile_routers()
    kept = router.revision
    router.fault = lambda: "nack"
    publish(policy)

    for _ in range(3):
        reconcile_routers()
        later()
    known = row(router)
    assert (known.last_nack["path"], known.last_nack["reason"]) == ("$.pools[0]", "no room")
    assert (known.running_number, router.revision) == (kept, kept)
    assert Event.objects.filter(kind="config_refused").count() == 1

    router.fault = lambda: None
    reconcile_routers()
    known = row(router)
    assert (known.last_nack, known.running_number) == (None, newest())


@pytest.mark.parametrize("fault", ["drop", "garbage", "error", "redirect"])
def test_no_answer_that_a_router_gives_is_a_try_that_failed(start_router, pool, fault):
    router = start_router()
    router.fault = lambda: fault
    reconcile_routers()
    known = row(router)
    assert (known.running_number, known.push_failures, bool(known.last_error)) == (None, 1, True)
    assert known.push_after > timezone.now()


def test_a_503_of_a_router_is_retried_and_is_no_rejection(start_router, policy):
    router = start_router()
    reconcile_routers()
    router.fault = lambda: "not_now"
    rollout = publish(policy)
    reconcile_routers()
    known = row(router)
    assert (known.last_nack, known.push_failures) == (None, 1)
    assert known.last_error == "the router could not process it: no worker is running"
    rollout.refresh_from_db()
    assert rollout.state == RolloutState.PENDING
    router.fault = lambda: None
    later()
    reconcile_routers()
    rollout.refresh_from_db()
    assert (rollout.state, row(router).last_error) == (RolloutState.COMPLETE, "")
    assert not Event.objects.filter(kind="config_refused").exists()


def test_a_router_with_another_token_is_named_as_such(start_router, pool, settings):
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


def test_a_lost_acknowledgement_is_made_good_by_the_next_try(start_router, pool):
    router = start_router()
    router.fault = lambda: "lose_ack"
    reconcile_routers()
    assert (router.revision, row(router).running_number) == (newest(), None)
    router.fault = lambda: None
    later()
    reconcile_routers()
    assert row(router).running_number == newest()
    assert Event.objects.filter(kind="config_applied").count() == 1


def test_a_heartbeat_makes_a_lost_acknowledgement_good_too(start_router, policy):
    rollout = publish(policy)
    router = start_router()
    router.fault = lambda: "lose_ack"
    reconcile_routers()
    announce(**router.announcement())
    assert row(router).running_number == newest()
    rollout.refresh_from_db()
    assert rollout.state == RolloutState.COMPLETE


def test_a_router_that_fell_silent_is_asked_first_and_not_pushed_to(start_router, pool):
    router = start_router()
    reconcile_routers()
    Router.objects.update(last_seen_at=timezone.now() - timezone.timedelta(seconds=20))
    reconcile_routers()
    assert (router.state_reads, len(router.pushes)) == (1, 1)
    assert row(router).silent_for_s(timezone.now()) < 5


def test_a_silent_router_that_lost_its_configuration_is_pushed_to(start_router, pool):
    router = start_router()
    reconcile_routers()
    router.running = None
    Router.objects.update(last_seen_at=timezone.now() - timezone.timedelta(seconds=20))
    reconcile_routers()
    assert router.revision == newest()


def test_a_silent_router_is_lost_once_and_back_once(start_router, pool):
    router = start_router()
    reconcile_routers()
    router.fault = lambda: "drop"
    Router.objects.update(last_seen_at=timezone.now() - timezone.timedelta(seconds=31))
    for _ in range(3):
        reconcile_routers()
        later()
    assert Event.objects.filter(kind="router_lost").count() == 1
    assert row(router).lost_at is not None

    router.fault = lambda: None
    for _ in range(2):
        announce(**router.announcement())
    assert row(router).lost_at is None
    assert Event.objects.filter(kind="router_joined").count() == 2


def test_a_router_whose_number_comes_from_a_lost_database_is_overtaken(start_router, pool, policy):
    router = start_router()
    reconcile_routers()
    ahead = router.revision + 40
    other = msgspec.structs.replace(router.running.config, hash_secret="ab" * 32)
    router.running = dump_snapshot(other, ahead)
    announce(**router.announcement())
    rollout = publish(policy)

    for _ in range(2):
        later()
        reconcile_routers()
    assert router.revision == newest() == ahead + 1
    assert row(router).running_number == ahead + 1
    rollout.refresh_from_db()
    assert rollout.state == RolloutState.COMPLETE


def test_a_number_that_two_configurations_have_is_overtaken_too(start_router, pool):
    router = start_router()
    reconcile_routers()
    other = msgspec.structs.replace(router.running.config, hash_secret="ab" * 32)
    router.running = dump_snapshot(other, router.revision)
    router.boot = "b2"
    announce(**router.announcement())
    for _ in range(2):
        later()
        reconcile_routers()
    assert (row(router).running_number, row(router).running_sha256) == (newest(), router.running.sha256)
    assert router.running.config.hash_secret != "ab" * 32


def test_acknowledgements_that_arrive_out_of_order_never_set_a_router_back(start_router, policy):
    from controlplane.services.routers import record_ack

    router = start_router()
    older = ConfigSnapshot.objects.first()
    publish(policy)
    reconcile_routers()
    record_ack(row(router).pk, number=older.number, sha256=older.sha256)
    assert row(router).running_number == newest()
    before_the_ack = {"revision": older.number, "sha256": older.sha256}
    announce(**{**router.announcement(), **before_the_ack})
    assert row(router).running_number == newest()


def test_no_secret_is_in_the_database_or_in_what_people_see(start_router, pool):
    router = start_router()
    reconcile_routers()
    secret = router.running.config.hash_secret
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names(cursor):
            cursor.execute(f"select count(*) from {table} where {table}::text like %s", [f"%{secret}%"])
            assert cursor.fetchone() == (0,), table
    assert ConfigSnapshot.objects.first().document["hash_secret"] == "***"


def test_the_document_that_a_router_gets_says_what_the_rows_say(start_router, replica):
    router = start_router()
    reconcile_routers()
    pool = router.running.config.pools[0]
    assert (pool.name, pool.replicas[0].name, pool.replicas[0].url) == ("default", "r1", replica.url)
    assert json.loads(router.running.document)["sha256"] == router.running.sha256


def test_two_routers_of_a_fleet_hash_with_the_same_secret(start_router, pool):
    first, second = start_router("router-1"), start_router("router-2")
    reconcile_routers()
    add_replica(pool, name="r1", url="http://10.0.0.1:8000")
    reconcile_routers()
    assert first.running.config.hash_secret == second.running.config.hash_secret


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_lost_repeated_or_delayed_every_router_converges(start_router, pool, policy, seed):
    chance = random.Random(seed)
    faults = [None, None, "drop", "lose_ack", "nack", "error", "garbage"]
    routers = [start_router(f"router-{number}") for number in range(4)]
    for router in routers:
        router.fault = lambda: chance.choice(faults)
    seen = {router.name: 0 for router in routers}

    for step in range(30):
        match chance.randrange(5):
            case 0:
                publish(policy, load_factor=1.0 + step)
            case 1:
                announce(**chance.choice(routers).announcement())
            case 2:
                push_config(row(chance.choice(routers)).pk)
            case 3:  # a restart that keeps the last-known-good
                restarted = chance.choice(routers)
                restarted.boot = f"b{step}"
                announce(**restarted.announcement())
            case _:
                later()
        reconcile_routers()
        for router in routers:
            assert (router.revision or 0) >= seen[router.name]
            seen[router.name] = router.revision or 0

    for router in routers:
        router.fault = lambda: None
    later()
    reconcile_routers()
    assert {router.revision for router in routers} == {newest()}
    assert {row(router).running_number for router in routers} == {newest()}
