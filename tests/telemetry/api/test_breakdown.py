"""REST API of a pool's hit-rate breakdown."""

import pytest

from controlplane.services.fleet.pools import create_pool
from telemetry.services.lab.replays import replay_pools, update_curve
from tests.telemetry.conftest import T0
from tests.telemetry.decisions import store
from tests.telemetry.lab.traces import traffic
from tests.telemetry.services.lab.test_breakdowns import at, fleet, spread  # noqa: F401 - a fixture

pytestmark = pytest.mark.django_db


@pytest.fixture
def url() -> str:
    return "/api/v1/breakdown?from={}&to={}".format(*(time.isoformat().replace("+", "%2B") for time in (T0, at(60))))


def test_a_breakdown_has_terms_losses_groups_and_a_capacity_curve(api, fleet, url, django_assert_max_num_queries):  # noqa: F811
    store(spread(traffic(900, placed="random")))
    replay_pools(at(30))
    update_curve(fleet, at(30))

    with django_assert_max_num_queries(10):
        body = api.get(f"{url}&pool=chat").json()

    breakdown = body["breakdown"]
    assert [term["term"] for term in breakdown["terms"]] == [
        *("reachable", "capacity", "split", "best", "predicted", "delivered"),
    ]
    assert breakdown["summary"].startswith("Hit rate ")
    assert breakdown["requests"] == 900 == sum(group["requests"] for group in body["groups"])
    lost_tokens = sum(loss["tokens"] for loss in breakdown["losses"])
    assert lost_tokens + breakdown["terms"][-1]["tokens"] == pytest.approx(breakdown["prompt_tokens"], rel=0.5)
    assert all(loss["advice"] for loss in breakdown["losses"])
    assert [point["multiple"] for point in body["curve"]["points"]] == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0]
    worth = body["worth"]
    assert (worth["routing"]["verdict"], worth["replicas"], worth["replica_tokens"]) == ("worth_it", 4, 600 * 64)
    assert worth["placements"]["round_robin"] < worth["placements"]["by_prefix"]
    assert worth["working_set"]["low"] <= worth["working_set"]["tokens"] <= worth["working_set"]["high"]
    assert worth["caches"]["verdict"] in ("fits_one_replica", "fits_fleet", "thrashing")
    assert api.get(f"{url}&pool=chat&group=g1").json()["breakdown"]["requests"] < 900
    assert api.get(f"{url}&pool=chat&group=").json()["breakdown"] is None


def test_an_idle_pool_has_no_breakdown_and_an_unknown_pool_is_rejected(api, url):
    create_pool("idle")
    body = api.get(f"{url}&pool=idle").json()
    assert (body["breakdown"], body["groups"], body["curve"]) == (None, [], None)
    assert (body["worth"]["routing"]["verdict"], body["worth"]["routing"]["needed_requests"]) == (None, 100)
    assert api.get(f"{url}&pool=other").status_code == 422
    assert api.get(url).status_code == 422
