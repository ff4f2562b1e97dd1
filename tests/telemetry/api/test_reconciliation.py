"""REST API of reconciliation: three hit rates of each replica (H17)."""

from datetime import timedelta

import pytest

from controlplane.models import Router
from controlplane.services.fleet.replicas import add_replica
from tests.telemetry.conftest import T0
from tests.telemetry.readings import engine_reading, route_reading, router_scraped

pytestmark = pytest.mark.django_db
ADDRESS = "/api/v1/reconciliation"
AT = T0 + timedelta(seconds=5)
QUERY = {"pool": "chat", "from": T0.isoformat(), "to": (T0 + timedelta(seconds=60)).isoformat()}


def test_each_replica_has_three_hit_rates_and_a_verdict(api, pool):
    router = Router.objects.create(name="router-1", admin_url="http://127.0.0.1:8081", boot="b", last_seen_at=T0)
    router_scraped(router, AT)
    replica = add_replica(pool, name="r1", url="http://127.0.0.1:9101")
    engine_reading(
        replica, AT, queries=50_000, hits=0, prompt_tokens=51_000, finished=500, not_reported=["disk_tokens"]
    )
    counted = {"requests": 500, "usage_reported": 500, "prompt_tokens": 50_000, "cached_tokens": 20_000}
    route_reading(router, AT, replica="r1", **counted)

    (row,) = api.get(ADDRESS, QUERY).json()["replicas"]

    assert (row["pool"], row["replica"], row["verdict"], row["points"]) == ("chat", "r1", "disagree", 40.0)
    assert row["engine"] == {"ratio": 0.0, "requests": 500}
    assert row["responses"] == {"ratio": 0.4, "requests": 500}
    assert row["prediction"] == {"ratio": None, "requests": None}
    assert (row["not_eligible_tokens"], row["not_reported"]) == (1000, ["disk_tokens"])


def test_a_window_of_more_than_a_day_is_rejected(api, pool):
    assert api.get(ADDRESS, QUERY | {"from": "2031-03-01T00:00:00Z"}).status_code == 422
    assert api.get(ADDRESS, {"pool": "unknown"}).status_code == 422
