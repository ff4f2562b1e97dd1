"""The task group's page: the state of its semantic cache at each router, and its precision by threshold."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from controlplane.models import Router, TaskGroup
from controlplane.services.fleet.pools import create_pool, update_pool
from controlplane.services.fleet.task_groups import create_task_group
from telemetry.alerts import pipeline
from telemetry.models import Alert, ScrapeState
from telemetry.services.alerts.rules import create_rule
from telemetry.services.figures.semantic_cache import precision_points

PAGE = "/pools/chat/groups/faq/"
SETTINGS = {"embedding_pool": "vectors", "embedding_model": "embedder", "mode": "serve"}
CHECKS = {"0.90": {"right": 10, "wrong": 10}, "0.95": {"right": 60, "wrong": 4}, "0.98": {"right": 40}}


@pytest.fixture
def group(fleet) -> TaskGroup:
    """A group with a semantic cache, and no router."""
    Router.objects.all().delete()
    update_pool(fleet, models=["tiny"])
    create_pool("vectors", project=fleet.project, models=["embedder"])
    return create_task_group(fleet, "faq", response_cache={}, semantic_cache=SETTINGS)


def scraped(noon, name="router-1", cache=None, pool="chat", **state) -> Router:
    """A router with its last scrape."""
    router = Router.objects.create(name=name, admin_url=f"http://{name}:8081", boot="b", last_seen_at=noon)
    fields = {"at": noon, "ok_at": noon, "health": "up"} | state
    ScrapeState.objects.create(router=router, semantic_caches=cache and {pool: {"faq": cache}}, **fields)
    return router


def sections(visitor) -> str:
    """Both sections as text."""
    page = visitor.get(PAGE).text
    page = page[page.index('id="semantic-cache"') :]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


def test_a_group_without_a_semantic_cache_has_no_section(visitor, fleet):
    create_task_group(fleet, "faq", response_cache={})
    page = visitor.get(PAGE)
    assert page.status_code == 200
    assert "Semantic cache" not in page.text


@pytest.mark.parametrize(
    ("state", "meaning", "action"),
    [
        ("serving", "1 % of the requests are answered by a replica", "Routers with a store count together"),
        ("shadow", "none is served", "Set the mode to serve"),
        (
            "collecting",
            "needs 200 checks of its own requests at or above the threshold",
            "Wait for more similar requests",
        ),
        ("stopped", "precision of the last 200 checks of a caller is below 98 %", "Raise the threshold"),
    ],
)
def test_each_state_says_what_it_means_and_what_to_do(visitor, group, noon, state, meaning, action):
    figures = {"recent_precision": 0.965, "lower_bound": 0.911, "window_checks": 104.0, "entries": 77.0}
    scraped(noon, cache={"states": {state: 1}, "checks": CHECKS, **figures})

    text = sections(visitor)
    assert f" {state} " in text
    assert meaning in text
    assert action in text
    for figure in ("96.5 %", "91.1 %", " 104 ", " 77 "):
        assert figure in text
    assert "96.2 % at the threshold ( 90.5 % to 98.5 % ), from 104 checks".replace("( ", "(").replace(" )", ")") in text


def test_a_router_without_the_cache_and_one_that_cannot_be_scraped_are_unknown(visitor, group, noon):
    scraped(noon, "router-1", cache={"states": {"shadow": 1, "stopped": 2}})
    scraped(noon, "router-2", cache={"states": {"serving": 1}}, pool="other")
    scraped(noon, "router-3", cache={"states": {"serving": 1}}, failures=2, reason="connection refused")
    scraped(noon, "router-4", cache={"states": {"serving": 1}}, at=noon - timedelta(minutes=9))

    text = sections(visitor)
    assert "stopped for some callers or in some processes" in text
    assert "router-2: The router does not report this cache." in text
    assert "router-3: The router cannot be scraped: connection refused." in text
    assert "router-4: The router was not scraped recently" in text
    assert " serving " not in text
    assert "No checks yet" in text


def test_the_page_costs_one_more_query(visitor, group, noon):
    for number in range(5):
        scraped(noon, f"router-{number}", cache={"states": {"serving": 1}, "checks": CHECKS})
    with CaptureQueriesContext(connection) as with_cache:
        visitor.get(PAGE)
    TaskGroup.objects.filter(pk=group.pk).update(semantic_cache=None)
    with CaptureQueriesContext(connection) as without:
        visitor.get(PAGE)
    assert len(with_cache) == len(without) + 1


def test_a_rule_fires_while_a_router_has_stopped_serving(group, noon):
    rules = [
        create_rule(group.pool, name="semantic", kind="semantic_cache_precision"),
        create_rule(group.pool, name="of the group", kind="semantic_cache_precision", group="faq"),
        create_rule(group.pool, name="of another", kind="semantic_cache_precision", group="coding"),
    ]
    cache = {"states": {"stopped": 1, "serving": 0}, "recent_precision": 0.9, "window_checks": 200.0}
    router = scraped(noon, cache=cache)
    pipeline.evaluate(rules, noon)

    alerts = Alert.objects.order_by("rule__name")
    assert [(alert.rule.name, alert.state, alert.value, alert.limit) for alert in alerts] == [
        ("of the group", "firing", 0.9, 0.98),
        ("semantic", "firing", 0.9, 0.98),
    ]
    assert "stopped serving a caller at router-1" in alerts[0].summary
    recovered = cache | {"states": {"stopped": 0, "serving": 1}, "recent_precision": 0.99}
    ScrapeState.objects.filter(router=router).update(semantic_caches={"chat": {"faq": recovered}})
    pipeline.evaluate(rules, noon + timedelta(seconds=60))
    pipeline.evaluate(rules, noon + timedelta(seconds=600))
    assert set(Alert.objects.values_list("state", flat=True)) == {"resolved"}


def test_checks_add_up_from_the_most_similar_down():
    points = precision_points([{"checks": CHECKS}])
    assert [(point.threshold, point.checks, point.wrong) for point in points] == [
        (0.9, 124, 14),
        (0.95, 104, 4),
        (0.98, 40, 0),
    ]
    low, high = points[1].interval
    assert points[1].precision == pytest.approx(100 / 104)
    assert low < points[1].precision < high


def test_own_checks_are_added_and_shared_ones_count_once():
    shared = {"0.95": {"right": 60, "wrong": 4}}
    earlier = {"0.95": {"right": 59, "wrong": 4}, "0.96": {"right": 1}}
    caches = [
        {"checks": {"0.95": {"right": 5}}},
        {"checks": {"0.95": {"right": 6, "wrong": 1}}},
        {"checks": {"0.95": {"right": 1000}}, "shared_checks": shared},
        {"shared_checks": earlier},
    ]
    (at_95, at_96) = precision_points(caches)
    assert (at_95.checks, at_95.wrong, at_96.checks) == (60 + 11 + 5 + 1, 5, 1)
    assert precision_points([{"checks": {"nonsense": {"right": 1}}}, {"states": {}}]) == []
