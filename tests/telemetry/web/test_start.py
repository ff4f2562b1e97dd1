"""The steps of a new installation, ticked off by what is measured, and the lines that clients copy."""

from __future__ import annotations

import re
from datetime import timedelta
from html import unescape

import pytest
from django.contrib.auth.models import User

from controlplane.models import Pool, Replica
from controlplane.services.fleet.pools import update_pool
from controlplane.services.fleet.replicas import add_replica
from controlplane.services.routers import announce
from telemetry.models import Health, Notification, ScrapeState
from telemetry.services.notifications.channels import create_channel, test_send
from telemetry.services.setup import served_model, setup_steps
from telemetry.storage.partitions import ensure_days
from tests.telemetry.readings import engine_reading, route_reading
from tests.telemetry.services.lab.test_sizing import COSTS
from tests.telemetry.stored_decisions import a_router

pytestmark = pytest.mark.django_db


def done(user, now) -> set[str]:
    return {step.label for step in setup_steps(user, now) if step.done}


def test_each_step_is_ticked_off_by_what_is_measured(operator, noon, pool, django_assert_num_queries):
    with django_assert_num_queries(1):
        assert done(operator, noon) == set()
    replica: Replica = add_replica(pool, name="gpu-1", url="http://10.0.0.1:8000")
    state = ScrapeState.objects.create(replica=replica, at=noon, health=Health.UP, lacks_prefix_cache=True)
    assert done(operator, noon) == {"A replica that responds"}
    ScrapeState.objects.filter(pk=state.pk).update(lacks_prefix_cache=False)
    expected = {"A replica that responds", "Prefix caching"}
    assert done(operator, noon) == expected

    ensure_days([noon.date()])
    route_reading(a_router(), noon - timedelta(minutes=2), requests=1)
    expected |= {"A request of a client"}
    assert done(operator, noon) == expected
    route_reading(a_router(), noon - timedelta(minutes=1), group="agents", requests=1, usage_reported=1)
    expected |= {"Cached tokens in responses", "A task group of requests"}
    assert done(operator, noon) == expected

    test_send(create_channel("on-call", config={"url": "https://example.org/hook"}))
    assert done(operator, noon) == expected  # it was not delivered yet
    Notification.objects.update(state="delivered")
    update_pool(pool, costs=COSTS)
    User.objects.create_user("second")
    assert len(done(operator, noon)) == 8


def test_the_steps_link_to_where_they_are_done(visitor):
    page = visitor.get("/start/").text
    for href in ("/fleet/", "/channels/new/", "/value/", "/users/", "#connect"):
        assert f'href="{href}"' in page, href
    assert page.count('<span class="badge">to do</span>') == 8


def test_the_lines_of_clients_have_the_router_s_address_and_a_model(visitor, pool, noon):
    page = visitor.get("/start/").text
    assert "No router has announced its address yet" in page
    assert "http://ROUTER:8080/v1" in page
    ensure_days([noon.date()])
    engine_reading(add_replica(pool, name="gpu-1", url="http://10.0.0.1:8000"), noon)
    assert served_model(Pool.objects.all(), noon)
    assert served_model(Pool.objects.exclude(pk=pool.pk), noon) is None
    update_pool(pool, models=["qwen3"])
    announce(name="r1", boot="b", admin_url="http://10.0.1.1:8081", data_url="http://10.0.1.1:8080/")
    lines = [
        unescape(text)
        for text in re.findall(r"<textarea[^>]*>\n(.*?)</textarea>", visitor.get("/start/").text, re.DOTALL)
    ]
    assert len(lines) == 6
    assert all("http://10.0.1.1:8080" in text and "//v1" not in text for text in lines)
    assert sum("qwen3" in text for text in lines) == 5  # Open WebUI lists the models itself
    for text in lines[1:4]:
        compile(text, "lines", "exec")


def test_an_administrator_dismisses_the_open_steps_of_the_overview(visitor):
    assert 'id="setup"' in visitor.get("/").text
    assert visitor.post("/start/dismiss/").headers["Location"] == "/"
    assert 'id="setup"' not in visitor.get("/").text
    assert "A second user" in visitor.get("/start/").text  # where they stay
