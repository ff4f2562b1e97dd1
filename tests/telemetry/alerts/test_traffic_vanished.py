"""Requests that vanish, compared with the same time of the days before."""

from datetime import timedelta

import pytest

from controlplane.models import Router
from telemetry.alerts import history, pipeline
from telemetry.models import AlertRule
from tests.telemetry.conftest import T0
from tests.telemetry.readings import route_reading, router_scraped, stored_together

pytestmark = pytest.mark.django_db
STEP_S = 300
DAY = timedelta(days=1)


@pytest.fixture
def router(pool):
    history.requests_around.cache_clear()
    return Router.objects.create(name="router-1", admin_url="http://127.0.0.1:9000", last_seen_at=T0)


@stored_together()
def requests(router, until, counts):
    """Requests in the steps before a time."""
    for index, count in enumerate(reversed(counts)):
        at = until - timedelta(seconds=index * STEP_S)
        router_scraped(router, at, covered_s=STEP_S)
        if count:
            route_reading(router, at, group="support", replica="r1", requests=count, ok_requests=count)


def a_week(router, *days):
    """The 40 minutes around the time of the rule on each of the days before, the day before first."""
    for back, counts in enumerate(days, 1):
        if counts is not None:
            requests(router, T0 - back * DAY + timedelta(minutes=10), counts)


def verdict(pool, now=T0):
    (rule,) = AlertRule.objects.select_related("pool", "group").filter(pool=pool, kind="traffic_vanished")
    pipeline.evaluate([rule], now)
    rule.refresh_from_db()
    return rule.verdict


BUSY, QUIET = [100] * 8, [0] * 8


def test_requests_that_stop_are_a_breach(pool, router):
    a_week(router, *[BUSY] * 7)
    requests(router, T0, [0, 0])
    found = verdict(pool)
    assert (found["result"], found["value"], found["limit"], found["baseline"]) == ("breach", 0, 10, 200)


@pytest.mark.parametrize(
    ("days", "now", "reason"),
    [
        ([BUSY] * 7, [20, 1], "within"),
        ([BUSY] * 6 + [QUIET], [0, 0], "little_traffic"),  # the same weekday a week ago was as quiet
        ([BUSY, QUIET, *[BUSY] * 5], [0, 0], "little_traffic"),
        ([QUIET] * 7, [0, 0], "little_traffic"),  # a quiet night
        ([[100, 0, 0, 0, 100, 0, 0, 0]] * 7, [0, 0], "little_traffic"),  # a job every 20 minutes, a little late today
        ([BUSY] * 6 + [None], [0, 0], "little_history"),
        ([None] * 7, [0, 0], "little_history"),
    ],
)
def test_what_is_usual_at_this_time_is_no_breach(pool, router, days, now, reason):
    a_week(router, *days)
    requests(router, T0, now)
    assert verdict(pool)["reason"] == reason


def test_requests_that_no_router_counted_are_unknown(pool, router):
    a_week(router, *[BUSY] * 7)
    assert verdict(pool)["reason"] == "no_readings"
