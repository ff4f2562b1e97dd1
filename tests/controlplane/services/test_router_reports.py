"""What routers tell is in the timeline once, whatever is repeated, reordered, cut off or nonsense."""

import time
from datetime import timedelta

import pytest
from django.db import IntegrityError, connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from rest_framework.test import APIClient

from controlplane.models import Event, Router, RouterReport
from controlplane.services.routers import announce
from tests.controlplane.threads import at_once

TOLD = {"name": "router-1", "boot": "b1", "admin_url": "http://127.0.0.1:8081"}


def happened(seq, *, boot="b1", kind="replica_ejected", ago_s=0.0, **facts):
    given = {"pool": "default", "replica": "r1", "reason": "503", **facts}
    return {"boot": boot, "seq": seq, "at": time.time() - ago_s, "kind": kind, "facts": given}


def told_of():
    return list(Event.objects.filter(kind="replica_ejected").order_by("pk").values_list("detail__seq", flat=True))


@pytest.mark.django_db
def test_an_event_is_shown_with_its_replica_at_the_time_it_happened(replica):
    announce(**TOLD, events=[happened(1, ago_s=600)], sent_at=time.time())
    event = Event.objects.get(kind="replica_ejected")
    assert event.summary == "Router router-1 sends replica r1 nothing for now: 503."
    assert (event.replica, event.pool, event.router.name) == (replica, replica.pool, "router-1")
    assert timezone.now() - event.at == pytest.approx(timedelta(seconds=600), abs=timedelta(seconds=5))


@pytest.mark.django_db
@pytest.mark.parametrize("skew_s", [-3600.0, 0.0, 3600.0])
def test_a_routers_clock_that_is_wrong_is_put_right(pool, skew_s):
    event = happened(1, ago_s=60)
    announce(**TOLD, events=[{**event, "at": event["at"] + skew_s}], sent_at=time.time() + skew_s)
    at = Event.objects.get(kind="replica_ejected").at
    assert timezone.now() - at == pytest.approx(timedelta(seconds=60), abs=timedelta(seconds=5))


@pytest.mark.django_db
def test_what_is_told_again_is_kept_once(pool):
    events = [happened(seq) for seq in range(1, 6)]
    for some in (events[:3], events, events[2:4], events):
        announce(**TOLD, events=some, sent_at=time.time())
    assert told_of() == [1, 2, 3, 4, 5]


@pytest.mark.django_db
def test_numbers_belong_to_a_life_of_a_router(pool):
    announce(**TOLD, events=[happened(1), happened(1, boot="b0")])
    announce(**{**TOLD, "name": "router-2"}, events=[happened(1)])
    assert told_of() == [1, 1, 1]


@pytest.mark.django_db
@pytest.mark.parametrize(
    "nonsense",
    [None, 7, {}, {"boot": "b1"}, happened(0), happened(1 << 80), {**happened(1), "facts": {"a": {}}},
     {**happened(1), "boot": "x" * 65}],
)  # fmt: skip
def test_what_cannot_be_read_stands_in_nobodys_way(pool, nonsense):
    announce(**TOLD, events=[nonsense, happened(2)])
    assert told_of() == [2]


@pytest.mark.django_db
@pytest.mark.parametrize("at", [float("nan"), float("inf"), -1e300, 1e300, 0])
def test_a_moment_that_cannot_be_is_now_or_a_month_ago(pool, at):
    announce(**TOLD, events=[{**happened(1), "at": at}], sent_at=time.time())
    assert timezone.now() - Event.objects.get(kind="replica_ejected").at < timedelta(days=31)


@pytest.mark.django_db
def test_a_kind_that_a_newer_router_tells_is_shown_in_its_own_words(pool):
    announce(**TOLD, events=[happened(1, kind="warm_up_begun", tokens="7")])
    event = Event.objects.get(kind="router_reported")
    assert "warm_up_begun: pool default, reason 503, replica r1, tokens 7" in event.summary


@pytest.mark.django_db
def test_the_database_itself_holds_that_each_is_kept_once(pool):
    router = announce(**TOLD, events=[happened(1)])
    with pytest.raises(IntegrityError), transaction.atomic():
        RouterReport.objects.create(router=router, boot="b1", seq=1)


@pytest.mark.django_db(transaction=True)
def test_told_by_many_at_once_each_is_kept_once(pool):
    announce(**TOLD)
    events = [happened(seq) for seq in range(1, 21)]
    at_once(*[lambda: announce(**TOLD, events=events)] * 8)
    assert sorted(told_of()) == list(range(1, 21))
    assert RouterReport.objects.count() == 20


@pytest.mark.django_db
def test_a_router_is_told_how_many_were_taken(pool, settings):
    api = APIClient()
    api.credentials(HTTP_AUTHORIZATION=f"Bearer {settings.ROUTER_ADMIN_TOKEN}")
    answer = api.post("/api/v1/routers/announce", {**TOLD, "events": [happened(1), "x"], "sent_at": time.time()})
    assert (answer.status_code, answer.json()["events_taken"]) == (200, 2)
    assert Router.objects.get().reports.count() == 1


@pytest.mark.django_db
def test_what_is_told_costs_a_heartbeat_the_same_number_of_queries_however_much_it_is(replica):
    def asked(count):
        with CaptureQueriesContext(connection) as queries:
            announce(**TOLD, events=[happened(seq, boot=f"b{count}") for seq in range(count)])
        return sum("controlplane_routerreport" in it["sql"] or "controlplane_replica" in it["sql"] for it in queries)

    announce(**TOLD)
    assert (asked(0), asked(2), asked(200)) == (0, 3, 3)
