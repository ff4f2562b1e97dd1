"""The breakdown's page: what it says, what it draws, and what it says when there is nothing to draw."""

from __future__ import annotations

from datetime import timedelta

import pytest
import time_machine

from controlplane.models import Replica
from controlplane.services.fleet.pools import create_pool
from telemetry.models import DecisionCursor
from telemetry.services.lab.replays import replay_pools, update_curve
from tests.telemetry.decisions import store
from tests.telemetry.lab.traces import traffic
from tests.telemetry.services.lab.test_breakdowns import add_fleet
from tests.telemetry.services.lab.test_breakdowns import fleet as room  # noqa: F401 - a fixture
from tests.telemetry.web.conftest import NOW

pytestmark = pytest.mark.django_db


@pytest.fixture(scope="module")
def module_replay(once_for_module) -> None:
    """Requests of three task groups within the quarter of an hour before noon, placed at random, in pool ``chat``."""
    once_for_module(store_replay)


def store_replay() -> None:
    with time_machine.travel(NOW, tick=False):
        pool, start = add_fleet(create_pool("chat")), NOW - timedelta(minutes=12)
        requests = traffic(900, placed="random")
        store([one._replace(at_s=start.timestamp() + number / 2) for number, one in enumerate(requests)])
        replay_pools(NOW)
        update_curve(pool, NOW)


@pytest.fixture
def replayed(module_replay, visitor):
    return visitor


def test_the_page_shows_the_loss_at_each_step(replayed, django_assert_max_num_queries):
    with django_assert_max_num_queries(16):
        page = replayed.get("/breakdown/?range=15m").content.decode()
    assert "Hit rate 50 % of" in page
    assert "lost" in page.split("</h2>")[0]
    for words in ("Placement", "New prompts", "/policies/", "900 requests", "g0", "Doubling the cache"):
        assert words in page, words
    narrower = replayed.get("/breakdown/?range=15m&pool=chat&group=g1").content.decode()
    assert "task group g1" in narrower
    assert "<p>900 requests" not in narrower


def test_the_page_says_whether_prefix_routing_is_worth_it_and_what_to_do(replayed):
    page = replayed.get("/breakdown/?range=15m").content.decode()
    worth = page[page.index("Is prefix routing worth it here?") : page.index('id="steps-title"')]
    for words in (
        *('Prefix routing <span class="badge good">worth it</span>', "round robin would lose up to", "900 requests"),
        *("Working set", 'href="/what-if/?pool=chat"', "points (95 %"),
    ):
        assert words in worth, words
    assert "Both are about all requests" in replayed.get("/breakdown/?range=15m&pool=chat&group=g1").content.decode()


def test_too_few_requests_have_no_verdict(visitor, noon, pool, room):  # noqa: F811
    start = noon - timedelta(minutes=12)
    store([one._replace(at_s=start.timestamp() + number) for number, one in enumerate(traffic(37))])
    replay_pools(noon)
    page = visitor.get("/breakdown/?range=15m").content.decode()
    assert 'Prefix routing <span class="badge ">unknown</span>' in page
    assert "Unknown: needs 100 requests, 37 were replayed." in page
    assert "The replay of the last hour has not run yet" in page


def test_the_figures_and_the_tables_agree(replayed):
    steps = replayed.get("/breakdown/figures/steps/?range=15m").json()
    (bars,) = steps["data"]
    assert (bars["y"][0], bars["x"][0], bars["y"][-1]) == ("Prompt tokens", 1.0, "Delivered")
    for place in range(2, len(bars["x"]) - 1):
        assert bars["base"][place] + bars["x"][place] == pytest.approx(bars["base"][place - 1], abs=2e-4)
    curve = replayed.get("/breakdown/figures/curve/").json()
    assert [len(line["x"]) for line in curve["data"]] == [6, 6, 6]
    assert replayed.get("/breakdown/figures/other/").status_code == 404
    assert replayed.get("/breakdown/figures/steps/?group=none&pool=chat").status_code == 404


def test_steps_without_a_known_value_are_shown_as_one(visitor, noon, pool, room):  # noqa: F811
    Replica.objects.update(capacity_blocks=None)
    start = noon - timedelta(minutes=12)
    store([one._replace(at_s=start.timestamp() + number) for number, one in enumerate(traffic(300))])
    replay_pools(noon)
    page = visitor.get("/breakdown/?range=15m").content.decode()
    assert "Unknown" in page
    assert "The cache size of" in page
    (bars,) = visitor.get("/breakdown/figures/steps/?range=15m").json()["data"]
    assert bars["y"] == ["Prompt tokens", "New prompts", "Unknown", "Delivered"]


def test_without_pools_requests_or_a_router_that_answers_the_page_says_so(visitor, noon):
    assert "No pools yet" in visitor.get("/breakdown/").content.decode()
    create_pool("chat")
    assert "No replayed requests" in visitor.get("/breakdown/").content.decode()
    assert visitor.get("/breakdown/figures/steps/").status_code == 404
    store([])
    DecisionCursor.objects.update(reason="it answers with status 401")
    assert "it answers with status 401" in visitor.get("/breakdown/").content.decode()
