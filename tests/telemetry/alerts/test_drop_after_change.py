"""Drops relative to the last change, on stored readings and with the rule that a new pool gets."""

import random
from datetime import timedelta

import pytest

from controlplane.models import Event
from controlplane.services.fleet.replicas import add_replica
from controlplane.services.fleet.task_groups import create_task_group
from controlplane.services.routers import announce
from telemetry.alerts import pipeline
from telemetry.alerts.history import engine_hours
from telemetry.models import Alert, AlertRule
from tests.telemetry.conftest import T0
from tests.telemetry.readings import engine_reading, route_reading, router_scraped, stored_together

pytestmark = pytest.mark.django_db
STEP_S = 10


@pytest.fixture
def r1(pool):
    engine_hours.cache_clear()
    return add_replica(pool, name="r1", url="http://127.0.0.1:9101")


def at(seconds):
    return T0 + timedelta(seconds=seconds)


@stored_together()
def readings(replica, start_s, end_s, ratio, rng):
    """About 6 requests/s whose hit rate varies by 2 points from reading to reading."""
    for second in range(start_s + STEP_S, end_s + 1, STEP_S):
        hits = int(60_000 * min(max(rng.gauss(ratio, 0.02), 0.0), 1.0))
        engine_reading(replica, at(second), queries=60_000, hits=hits, finished=60, ttft={1: 60})


def rule_of(pool):
    (rule,) = AlertRule.objects.select_related("pool", "group").filter(pool=pool, kind="hit_rate_drop")
    return rule


def fired_after(pool, start_s, end_s):
    """Seconds after ``start_s`` at which the pool's drop alert fires; None: it does not."""
    for second in range(start_s + STEP_S, end_s + 1, STEP_S):
        pipeline.evaluate([rule_of(pool)], at(second))
        if Alert.objects.filter(rule__kind="hit_rate_drop", state="firing").exists():
            return second - start_s
    return None


def test_a_drop_of_a_pool_whose_requests_have_no_task_group_fires(pool, r1):
    """Routers tell of the group "": it counts as any other."""
    router = announce(name="router-1", boot="b", admin_url="http://10.0.0.9:8081")
    rng = random.Random(17)
    with stored_together():
        for second in range(10, 1000, 10):
            ratio = rng.gauss(0.8 if second <= 900 else 0.5, 0.02)
            routed(router, second, {"": (60, ratio)})

    assert fired_after(pool, 900, 990) is not None


def test_a_change_of_the_traffic_mix_is_recorded_once_and_is_no_drop(pool, r1):
    router = announce(name="router-1", boot="b", admin_url="http://10.0.0.9:8081")
    for name in ("chat", "batch"):
        create_task_group(pool, name)
    rng = random.Random(18)
    with stored_together():
        for second in range(10, 1201, 10):
            chat, batch = (54, 6) if second <= 900 else (20, 40)
            router_scraped(router, at(second))
            routed(router, second, {"chat": (chat, rng.gauss(0.9, 0.02)), "batch": (batch, rng.gauss(0.2, 0.02))})

    assert fired_after(pool, 800, 1200) is None
    event = Event.objects.get(kind="traffic_mix_changed")
    assert event.pool == pool
    assert at(900) < event.at <= at(990)
    assert event.detail["mix_points"] == pytest.approx(-15, abs=6)  # and more as it lasts
    assert {one["name"] for one in event.detail["groups"]} == {"chat", "batch"}


def routed(router, second, groups):
    """What a router counted in the ten seconds before: requests and hit rate by task group."""
    for name, (requests, ratio) in groups.items():
        prompt = 1000 * requests
        route_reading(
            router, at(second), group=name, requests=requests, ok_requests=requests, usage_reported=requests,
            prompt_tokens=prompt, cached_tokens=int(prompt * min(max(ratio, 0.0), 1.0)),
        )  # fmt: skip
