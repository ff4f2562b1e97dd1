"""Long polls for events: each visible event exactly once."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connection, transaction
from rest_framework.test import APIClient

from controlplane.api.viewsets import routers
from controlplane.models import Event, EventKind, Role, Scope
from controlplane.services import events
from controlplane.services.access.tokens import create_token
from controlplane.services.access.users import set_role
from controlplane.services.events import record_event
from controlplane.services.fleet.pools import create_pool, create_project, update_pool

pytestmark = pytest.mark.django_db(transaction=True)
EVENTS = "/api/v1/events"


def record(summary, **more):
    return record_event(EventKind.REPLICA_DOWN, summary, **more)


def newest():
    return Event.objects.order_by("-pk").values_list("pk", flat=True).first() or 0


@pytest.fixture
def token(operator):
    """A token and its text."""
    return create_token(operator, name="test", scopes=[Scope.READ])


@pytest.fixture
def script(token):
    """A client that may read."""
    client = APIClient()
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {token[1]}")
    return client


def in_a_thread(function):
    def closing():
        try:
            return function()
        finally:
            connection.close()

    return ThreadPoolExecutor(1).submit(closing)


def test_events_after_an_id_are_listed_oldest_first(script, pool):
    last = newest()
    event_ids = [record(f"number {number}").pk for number in range(5)]
    first = script.get(EVENTS, {"after": last, "limit": 3}).json()
    second = script.get(EVENTS, {"after": first["last"], "limit": 3}).json()
    assert [row["id"] for row in (*first["results"], *second["results"])] == event_ids
    assert script.get(EVENTS, {"after": second["last"]}).json() == {"results": [], "last": event_ids[-1]}


def test_a_long_poll_returns_as_soon_as_there_is_an_event(script, pool):
    last = newest()
    response = in_a_thread(lambda: script.get(EVENTS, {"after": last, "wait": 60, "kind": "replica_down"}).json())
    update_pool(pool, description="not what was asked for")
    expected = record("this is")
    assert [row["id"] for row in response.result(timeout=50)["results"]] == [expected.pk]


def test_a_long_poll_returns_nothing_after_its_wait(script, pool):
    started_s = time.monotonic()
    assert script.get(EVENTS, {"after": newest(), "wait": 0.6}).json()["results"] == []
    assert time.monotonic() - started_s > 0.5


@pytest.mark.parametrize("query", [{"wait": 5}, {"after": "7", "wait": -1}, {"after": "7", "wait": 61}])
def test_invalid_waits_are_rejected(script, query):
    assert script.get(EVENTS, query).status_code == 422


def test_an_event_that_is_committed_late_is_not_skipped(script, pool):
    """The event that is committed later has the lower id."""
    last, written, commit = newest(), threading.Event(), threading.Event()

    def slow():
        with transaction.atomic():
            late = record("late").pk
            written.set()
            assert commit.wait(timeout=20)
        return late

    working = in_a_thread(slow)
    assert written.wait(timeout=20)
    early = record("early")
    meanwhile = script.get(EVENTS, {"after": last}).json()
    assert meanwhile["results"] == []  # withheld until the earlier transaction commits
    commit.set()
    late = working.result(timeout=20)
    assert late < early.pk
    shown = script.get(EVENTS, {"after": meanwhile["last"]}).json()
    assert [row["id"] for row in shown["results"]] == [late, early.pk]
    assert script.get(EVENTS, {"after": shown["last"]}).json()["results"] == []


def test_with_concurrent_writers_every_event_is_returned_once(script, pool):
    last, done = newest(), threading.Event()

    def write(number):
        for count in range(10):
            with transaction.atomic():
                record(f"{number}-{count}")

    def follow():
        received, at = [], last
        while True:
            writers_done = done.is_set()  # before the request that returns no more events
            page = script.get(EVENTS, {"after": at, "limit": 7}).json()
            received += [row["id"] for row in page["results"]]
            at = page["last"]
            if writers_done and not page["results"]:
                return received

    following = in_a_thread(follow)
    for writer in [in_a_thread(lambda number=number: write(number)) for number in range(6)]:
        writer.result(timeout=60)
    done.set()
    received = following.result(timeout=60)
    assert len(received) == len(set(received)) == 60
    assert set(received) == set(Event.objects.filter(pk__gt=last).values_list("pk", flat=True))


def test_a_long_poll_returns_only_visible_events(django_user_model, pool):
    theirs = create_pool("theirs", project=create_project("theirs"), models=["m"])
    user = django_user_model.objects.create_user("vera")
    set_role(user, Role.VIEWER, pool.project)
    _, text = create_token(user, name="test", scopes=[Scope.READ])
    client, last = APIClient(), newest()
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {text}")
    record("theirs", pool=theirs)
    record("without a pool")
    visible_event = record("visible", pool=pool)
    assert [row["id"] for row in client.get(EVENTS, {"after": last}).json()["results"]] == [visible_event.pk]


def test_the_number_of_waiting_clients_is_limited(script, pool, monkeypatch):
    monkeypatch.setattr(routers, "_slots", threading.BoundedSemaphore(0))
    response = script.get(EVENTS, {"after": newest(), "wait": 30})
    assert (response.status_code, response["Retry-After"]) == (503, "5")
    assert response.json()["type"] == "urn:warmpath:problem:too-many-waiting"
    assert script.get(EVENTS, {"after": newest()}).status_code == 200  # a request without wait needs no slot


def test_restored_events_sort_before_new_ones(pool):
    Event.objects.update(xact=2**60)
    fresh = record("fresh")
    assert events.reset_foreign_events() > 0
    assert events.newest_position() == (fresh.xact, fresh.pk)
    assert events.reset_foreign_events() == 0


@pytest.mark.parametrize(("at", "status"), [("0798-10-31T08:40:16+21:54", 200), ("0001-01-01T00:00:00+21:54", 422)])
def test_a_time_may_have_any_offset(script, at, status):
    """PostgreSQL refuses those of 16 hours and more."""
    for path in (EVENTS, "/api/v1/alerts", "/api/v1/deliveries"):
        assert script.get(path, {"before": at}).status_code == status
