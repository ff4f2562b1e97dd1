import csv
import io
import re
from datetime import timedelta

import pytest
from django.db import connection
from django.utils import timezone

from controlplane.api.filters import EventFilter
from controlplane.models import Event, EventKind, Router
from controlplane.services.events import record_event
from controlplane.services.fleet.pools import create_pool
from controlplane.services.fleet.replicas import add_replica
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from controlplane.services.routers import LOST_AFTER_S, announce, mark_lost_routers
from telemetry.web.views.events import TOPICS
from tests.controlplane.rollouts import publish_stages
from tests.fleet_history import drop_alert


def test_events_page_by_plain_links_in_a_fixed_number_of_queries(visitor, django_assert_num_queries):
    for number in range(120):
        record_event(EventKind.REPLICA_UP, f"event number {number}.")

    with django_assert_num_queries(5):
        first = visitor.get("/events/").text

    assert "event number 119." in first
    assert "event number 69." not in first
    older = first[first.index("?cursor=") :].split('"')[0]
    record_event(EventKind.REPLICA_UP, "in between.")
    second = visitor.get(f"/events/{older}").text
    assert "event number 69." in second
    assert "event number 70." not in second


def test_events_with_equal_times_appear_exactly_once_across_pages(visitor):
    moment = timezone.now()
    Event.objects.bulk_create(
        [Event(at=moment, kind=EventKind.REPLICA_UP, summary=f"number {number}.") for number in range(75)]
    )

    first = visitor.get("/events/").text
    second = visitor.get("/events/" + first[first.index("?cursor=") :].split('"')[0]).text

    for number in range(75):
        assert (f">number {number}." in first) != (f">number {number}." in second), number


@pytest.fixture
def busy(visitor, operator):
    """A pool, a replica, a router and a policy that each have a history."""
    pool = create_pool("chat", by=operator)
    add_replica(pool, name="gpu-1", url="http://10.0.0.1:8000", by=operator)
    announce(name="router-1", boot="b", admin_url="http://10.0.1.1:8081")
    policy = pool.policies.get(group=None)
    publish_revision(save_draft(policy, {"strategy": "random"}).pk, by=operator, reason="to see")
    record_event(EventKind.REPLICA_DOWN, "gpu-9 is down.")
    return pool


@pytest.mark.parametrize(
    "query",
    [
        "kind=replica_down",
        "kind=replica_down&kind=router_joined",
        "pool=chat",
        "replica=gpu-1",
        "router=router-1",
        "actor=olga",
        "pool=chat&actor=olga&kind=replica_added",
        "after=2020-01-01T00:00Z&before=2020-01-02T00:00Z",
        "after=2020-01-01T00:00Z",
        "pool=nobody",
    ],
)
def test_the_page_and_the_csv_file_have_the_same_filters_as_rest(visitor, busy, query):
    over_rest = [event["summary"] for event in visitor.get(f"/api/v1/events?{query}").json()["results"]]

    page = visitor.get(f"/events/?{query}").text
    told = list(csv.DictReader(io.StringIO(visitor.get(f"/events.csv?{query}").getvalue().decode())))

    assert [row["summary"] for row in told] == over_rest
    assert page.count('<li id="event-') == len(over_rest)
    assert ("No matching event" in page) == (not over_rest)


@pytest.mark.parametrize("query", ["kind=no_such_kind", "after=yesterday", "before=1"])
def test_an_invalid_filter_is_reported_and_not_ignored(visitor, busy, query):
    answer = visitor.get(f"/events/?{query}")

    assert 'role="alert"' in answer.text
    assert '<li id="event-' not in answer.text
    assert visitor.get(f"/events.csv?{query}").status_code == 422


def test_an_event_links_to_the_objects_that_it_names(visitor, busy):
    text = visitor.get("/events/").text

    policy = busy.policies.get(group=None)
    assert f'<a href="/policies/{policy.pk}/">policy chat</a>' in text
    assert '<a href="/replicas/gpu-1/">replica gpu-1</a>' in text
    assert ">router router-1</a>" in text


def test_an_event_of_a_rollout_leads_to_the_rollout_and_its_revision(visitor, busy):
    policy = busy.policies.get(group=None)
    rollout = publish_stages(policy)
    text = visitor.get("/events/?kind=rollout_started").text
    assert f'<a href="/rollouts/{rollout.pk}/">rollout</a>' in text
    assert f'<a href="/policies/{policy.pk}/revisions/">revision {rollout.revision.number}</a>' in text


def test_an_event_of_an_alert_leads_to_the_alert(visitor, busy):
    record_event(EventKind.ALERT_FIRING, "Hit rate fell.", pool=busy, detail={"alert": 12})
    assert '<a href="/alerts/12/">alert</a>' in visitor.get("/events/").text


def test_a_lost_router_is_told_without_a_raw_time(visitor, busy):
    Router.objects.update(last_seen_at=timezone.now() - timedelta(seconds=LOST_AFTER_S + 7))
    mark_lost_routers()
    text = visitor.get("/events/?kind=router_lost").text
    assert re.search(r"Router router-1 is lost: no heartbeat for \d+ s\.", text)


def test_topics_are_links_that_keep_the_other_filters(visitor, busy):
    text = visitor.get("/events/?pool=chat").text

    fleet = next(link for link in text.split('aria-label="Topics"')[1].split("<a ") if ">Fleet</a>" in link)
    assert "pool=chat" in fleet
    assert "kind=replica_down" in fleet
    href = fleet.split('"')[1].replace("&amp;", "&")
    narrowed = visitor.get(f"/events/{href}").text
    assert "Replica gpu-1" in narrowed
    assert "is active" not in narrowed
    assert 'aria-current="true">Fleet</a>' in narrowed


def test_each_kind_of_event_is_of_one_topic():
    for kind in EventKind:
        topics = [name for name, prefixes in TOPICS.items() if kind.startswith(prefixes)]
        assert len(topics) == 1, f"{kind}: TOPICS in telemetry/web/views/events.py"


def test_an_empty_list_says_the_next_step(visitor):
    assert "No events yet" in visitor.get("/events/").text
    assert "No matching event" in visitor.get("/events/?kind=replica_up").text


def test_a_page_of_events_is_read_from_an_index(operator):
    routers = [announce(name=f"router-{number}", boot="b", admin_url="http://10.0.1.1:8081") for number in range(20)]
    begun = timezone.now()
    Event.objects.bulk_create(
        Event(
            at=begun - timedelta(seconds=number),
            kind=EventKind.CONFIG_APPLIED,
            router=routers[number % 20],
            actor=operator if number % 50 == 0 else None,
            summary=str(number),
        )
        for number in range(10_000)
    )
    with connection.cursor() as cursor:
        cursor.execute("analyze controlplane_event")

    for query in ({"router": "router-7"}, {"actor": "olga"}, {}):
        plan = EventFilter(query, queryset=Event.objects.all()).qs.order_by("-at", "-pk")[:51].explain()

        assert "Index" in plan, plan
        assert "Seq Scan on controlplane_event" not in plan, plan


def test_an_alert_links_to_the_events_around_its_time(visitor, fleet, noon):
    drop_alert(fleet, noon)
    alerts = visitor.get("/alerts/").text

    link = alerts.split(">Events around this time<")[0].rpartition('href="')[2].split('"')[0].replace("&amp;", "&")
    text = visitor.get(link).text

    assert "pool=chat&after=2031-03-04T11" in link
    assert "is active" in text
    assert "Invalid filter" not in text
