"""The replica's page: which routers follow its KV events, what a state means, and what to do."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest

from controlplane.models import Replica, ReplicaState, Role, Router
from controlplane.services.access.users import set_role
from controlplane.services.fleet.kv_event_sources import record_event_sources
from controlplane.services.fleet.replicas import set_replica_state, update_replica
from telemetry.models import ScrapeState

PAGE = "/replicas/gpu-1/"
EVENTS = {"endpoint": "tcp://gpu-1:5557", "replay_endpoint": "tcp://gpu-1:5657", "topic": ""}


@pytest.fixture
def followed(fleet) -> Replica:
    """A replica with KV events, and no router."""
    Router.objects.all().delete()
    return update_replica(Replica.objects.get(name="gpu-1"), kv_events=EVENTS)


def scraped(noon, name="router-1", streams=None, **state) -> Router:
    """A router with its last scrape; ``streams`` are those of gpu-1, by rank."""
    router = Router.objects.create(name=name, admin_url="http://10.0.0.9:8081", boot="b", last_seen_at=noon)
    fields = {"at": noon, "ok_at": noon, "health": "up"} | state
    ScrapeState.objects.create(router=router, kv_streams=streams and {"gpu-1": streams}, **fields)
    return router


def panel(visitor) -> str:
    """The section as text."""
    page = visitor.get(PAGE).text
    section = page[page.index('id="kv-events"') :]
    section = section[: section.index("</section>")]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", section))


def test_without_events_one_line_says_that_it_is_an_estimate_and_how_to_switch_them_on(visitor, fleet):
    assert "Off: routers estimate what this replica has cached" in panel(visitor)
    assert "start it with --kv-events-config , and enter the endpoint" in panel(visitor)

    replica = Replica.objects.get(name="gpu-1")
    record_event_sources(replica.pk, {"kv_events": EVENTS, "problem": ""})
    assert "Its engine publishes KV events at tcp://gpu-1:5557 : follow them" in panel(visitor)
    assert f'href="/fleet/replicas/{replica.pk}/?kv_events=reported"' in visitor.get(PAGE).text


def test_a_viewer_gets_no_link_to_a_form_that_is_closed_to_them(client, fleet, noon, django_user_model):
    viewer = django_user_model.objects.create_user("vera")
    set_role(viewer, Role.VIEWER, fleet.project)
    client.force_login(viewer)
    assert "let an editor enter the endpoint" in panel(client)


@pytest.mark.parametrize(
    ("state", "meaning", "action"),
    [
        ("following", "knows every block that the engine has cached.", "Counts are since"),
        ("partial", "estimates what was cached before", "nc -vz gpu-1 5657"),
        ("replaying", "Messages were lost and requested again", "nc -vz gpu-1 5657"),
        ("estimated", "There is no connection to the engine's events", "nc -vz gpu-1 5557"),
        ("unused", "No policy of the pool compares cached prefixes", "publish lowest_cost"),
    ],
)
def test_each_state_says_what_it_means_and_what_to_do(visitor, followed, noon, state, meaning, action):
    figures = {"since_s": (noon - timedelta(minutes=3)).timestamp(), "lag_s": 0.048, "gaps": 7.0, "lost": 2.0}
    scraped(noon, streams={"0": {"states": {state: 1}, **figures}})

    text = panel(visitor).replace("&#x27;", "'")
    assert f" {state} " in text
    assert meaning in text
    assert re.sub(r"\s+", " ", action) in text.replace("publish  ", "publish ")
    for figure in ("11:57:00", "48 ms", " 7 ", " 2 "):
        assert figure in text


def test_the_worst_state_of_a_routers_processes_is_shown_and_what_is_not_reported_is_unknown(visitor, followed, noon):
    scraped(noon, streams={"0": {"states": {"following": 3, "estimated": 1}}})
    text = panel(visitor)
    assert "estimated in some of its processes" in text
    assert "unknown unknown" in text  # since when, and lag


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({}, "does not report this stream"),
        ({"failures": 2, "reason": "the connection was refused"}, "cannot be scraped: the connection was refused."),
        ({"ok_at": None}, "has not been scraped yet"),
        ({"at": "old"}, "was not scraped recently"),
    ],
)
def test_a_stream_that_a_router_does_not_report_is_unknown(visitor, followed, noon, state, reason):
    if state.get("at") == "old":
        state = {"at": noon - timedelta(minutes=5)}
    streams = {"0": {"states": {"following": 1}}} if state else None
    scraped(noon, streams=streams, **state)

    text = panel(visitor)
    assert " unknown " in text
    assert reason in text
    assert " following " not in text


def test_ranks_have_a_row_each_and_lost_routers_have_none(visitor, followed, noon):
    update_replica(followed, data_parallel_size=2)
    one, later = {"states": {"following": 1}}, {"states": {"new": 1}}
    scraped(noon, streams={"0": one, "1": later})
    Router.objects.filter(pk=scraped(noon, "router-2", streams={"0": one}).pk).update(lost_at=noon)
    text = panel(visitor)
    assert text.count(" router-1 ") == 2
    assert "router-2" not in text
    assert text.count(" following ") == 2  # in the table, and what it means
    assert "router-1: The router does not report this stream" in text  # a state of a later release


def test_without_a_router_or_disabled_it_says_so(visitor, followed):
    assert "No router is connected" in panel(visitor)
    set_replica_state(followed, ReplicaState.DISABLED)
    assert "The replica is disabled, so routers do not follow its events." in panel(visitor)
