"""Heartbeats, pushes and events of routers."""

import time
from datetime import timedelta

import pytest
from django.db import IntegrityError, connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from rest_framework.test import APIClient

from controlplane.models import ConfigSnapshot, Event, Router, RouterReport
from controlplane.services import routers
from controlplane.services.routers import announce, claim_pushes, mark_lost_routers, record_ack, record_unreachable
from controlplane.services.snapshots import newest_snapshot
from tests.controlplane.threads import at_once

pytestmark = pytest.mark.django_db
HEARTBEAT = {"name": "router-1", "boot": "b1", "admin_url": "http://127.0.0.1:8081"}


# --- heartbeats -----------------------------------------------------------------------------------------


def test_the_first_heartbeat_creates_a_router(pool):
    announce(**HEARTBEAT)
    announce(**HEARTBEAT)
    assert Router.objects.get().running_number is None
    assert list(Event.objects.filter(router__name="router-1").values_list("kind", flat=True)) == ["router_joined"]


def test_a_heartbeat_replaces_address_and_warm_up_progress(pool):
    progress = {"gpu-7": {"prefixes_done": 1, "prefixes": 9, "tokens_done": 800, "tokens": 9000}}
    announce(**HEARTBEAT, warming=progress)
    assert Router.objects.get().warming == progress
    announce(**{**HEARTBEAT, "admin_url": "http://127.0.0.1:9999", "boot": "b2"})
    router = Router.objects.get()
    assert (router.admin_url, router.warming) == ("http://127.0.0.1:9999", {})


def test_a_router_is_lost_after_thirty_seconds_without_a_heartbeat(pool, time_machine_at):
    announce(**HEARTBEAT)
    time_machine_at(29)
    assert mark_lost_routers() == 0
    time_machine_at(31)
    assert (mark_lost_routers(), mark_lost_routers()) == (1, 0)


# --- pushes ---------------------------------------------------------------------------------------------


def test_a_push_is_claimed_by_one_worker_until_its_response_or_expiry(pool, time_machine_at):
    announce(**HEARTBEAT)
    desired = newest_snapshot()
    assert len(claim_pushes(desired)) == 1
    assert claim_pushes(desired) == []
    time_machine_at(routers.LEASE_S + 1)
    assert len(claim_pushes(desired)) == 1


def test_pauses_between_attempts_grow_to_twenty_seconds_and_end_with_a_heartbeat(pool):
    router = announce(**HEARTBEAT)
    desired = newest_snapshot()
    pauses = []
    for _ in range(5):
        Router.objects.update(push_after=None)
        claim_pushes(desired)
        record_unreachable(router.pk, number=desired.number, reason="refused")
        router.refresh_from_db()
        pauses.append(round((router.push_after - timezone.now()).total_seconds()))
    assert pauses == [5, 10, 20, 20, 20]
    assert claim_pushes(desired) == []
    announce(**HEARTBEAT)
    assert len(claim_pushes(desired)) == 1


def test_an_older_number_in_a_heartbeat_counts_after_a_restart_or_some_seconds(pool, time_machine_at):
    router = announce(**HEARTBEAT)
    desired = newest_snapshot()
    for heartbeat, running in (({**HEARTBEAT, "boot": "b2"}, None), ({**HEARTBEAT, "boot": "b2"}, desired.number)):
        record_ack(router.pk, number=desired.number, sha256=desired.sha256)
        announce(**heartbeat)
        router.refresh_from_db()
        assert router.running_number == running
    time_machine_at(11)
    announce(**heartbeat)
    router.refresh_from_db()
    assert router.running_number is None
    assert len(claim_pushes(desired)) == 1


def test_a_late_response_of_a_removed_router_is_ignored(pool):
    router = announce(**HEARTBEAT)
    Router.objects.all().delete()
    record_ack(router.pk, number=1, sha256="0" * 64)
    record_unreachable(router.pk, number=1, reason="gone")


def test_nothing_is_pushed_before_the_first_pool(db):
    from controlplane.tasks import push_config, reconcile_routers

    router = announce(**HEARTBEAT)
    push_config(router.pk)
    reconcile_routers()
    assert not ConfigSnapshot.objects.exists()


# --- events ---------------------------------------------------------------------------------------------


def event(seq, *, boot="b1", kind="replica_ejected", age_s=0.0, **facts):
    facts = {"pool": "default", "replica": "r1", "reason": "503", **facts}
    return {"boot": boot, "seq": seq, "at": time.time() - age_s, "kind": kind, "facts": facts}


def recorded_sequence_numbers():
    return list(Event.objects.filter(kind="replica_ejected").order_by("pk").values_list("detail__seq", flat=True))


@pytest.mark.parametrize("skew_s", [-3600.0, 0.0, 3600.0])
def test_an_event_has_its_replica_and_its_time_by_our_clock(replica, skew_s):
    old = event(1, age_s=600)
    announce(**HEARTBEAT, events=[{**old, "at": old["at"] + skew_s}], sent_at=time.time() + skew_s)
    row = Event.objects.get(kind="replica_ejected")
    assert row.summary == "Router router-1 ejected replica r1: 503."
    assert (row.replica, row.pool, row.router.name) == (replica, replica.pool, "router-1")
    assert timezone.now() - row.at == pytest.approx(timedelta(seconds=600), abs=timedelta(seconds=5))


def test_a_resent_event_is_recorded_once(pool):
    events = [event(seq) for seq in range(1, 6)]
    for sent in (events[:3], events, events[2:4], events):
        announce(**HEARTBEAT, events=sent, sent_at=time.time())
    assert recorded_sequence_numbers() == [1, 2, 3, 4, 5]
    with pytest.raises(IntegrityError), transaction.atomic():
        RouterReport.objects.create(router=Router.objects.get(), boot="b1", seq=1)


def test_sequence_numbers_belong_to_one_boot_of_one_router(pool):
    announce(**HEARTBEAT, events=[event(1), event(1, boot="b0")])
    announce(**{**HEARTBEAT, "name": "router-2"}, events=[event(1)])
    assert recorded_sequence_numbers() == [1, 1, 1]


@pytest.mark.parametrize(
    "invalid",
    [None, 7, {}, {"boot": "b1"}, event(0), event(1 << 80), {**event(1), "facts": {"a": {}}},
     {**event(1), "boot": "x" * 65}],
)  # fmt: skip
def test_an_invalid_event_is_dropped(pool, invalid):
    announce(**HEARTBEAT, events=[invalid, event(2)])
    assert recorded_sequence_numbers() == [2]


@pytest.mark.parametrize("at", [float("nan"), float("inf"), -1e300, 1e300, 0])
def test_an_impossible_time_is_at_most_a_month_ago(pool, at):
    announce(**HEARTBEAT, events=[{**event(1), "at": at}], sent_at=time.time())
    assert timezone.now() - Event.objects.get(kind="replica_ejected").at < timedelta(days=31)


def test_an_event_kind_of_a_newer_router_is_recorded_with_its_facts(pool):
    announce(**HEARTBEAT, events=[event(1, kind="warm_up_begun", tokens="7")])
    row = Event.objects.get(kind="router_reported")
    assert "warm_up_begun: pool default, reason 503, replica r1, tokens 7" in row.summary


@pytest.mark.django_db(transaction=True)
def test_concurrent_heartbeats_record_each_event_once(pool):
    announce(**HEARTBEAT)
    events = [event(seq) for seq in range(1, 21)]
    at_once(*[lambda: announce(**HEARTBEAT, events=events)] * 8)
    assert sorted(recorded_sequence_numbers()) == list(range(1, 21))
    assert RouterReport.objects.count() == 20


def test_the_response_acknowledges_all_events(pool, settings):
    api = APIClient()
    api.credentials(HTTP_AUTHORIZATION=f"Bearer {settings.ROUTER_ADMIN_TOKEN}")
    response = api.post("/api/v1/routers/announce", {**HEARTBEAT, "events": [event(1), "x"], "sent_at": time.time()})
    assert (response.status_code, response.json()["acknowledged_events"]) == (200, 2)
    assert Router.objects.get().reports.count() == 1


def test_the_number_of_queries_does_not_depend_on_the_number_of_events(replica):
    def queries(count):
        with CaptureQueriesContext(connection) as captured:
            announce(**HEARTBEAT, events=[event(seq, boot=f"b{count}") for seq in range(count)])
        tables = ("controlplane_routerreport", "controlplane_replica")
        return sum(any(table in query["sql"] for table in tables) for query in captured)

    announce(**HEARTBEAT)
    assert (queries(0), queries(2), queries(200)) == (0, 3, 3)
