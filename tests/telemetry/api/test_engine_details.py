"""REST API of series that only some engines report."""

from datetime import timedelta

import pytest

from controlplane.services.fleet.replicas import add_replica
from tests.telemetry import engine_details as details
from tests.telemetry.conftest import T0

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize(
    ("metric", "by", "expected"),
    [
        ("engine_ttft", "phase", details.QUEUE_AND_PREFILL),
        ("waiting", "reason", details.WAITING_BY_REASON),
        ("prompt_share", "source", details.PROMPT_SOURCES),
        ("mm_hit_rate", "pools", details.MULTIMODAL),
        ("block_time", "phase", details.BLOCK_TIMES),
        ("sampled_evictions", "replica", details.EVICTIONS),
        ("cache_churn", "replica", details.CHURN),
    ],
)
def test_a_series_has_the_values_of_its_metric(api, pool, metric, by, expected):
    details.read_details(add_replica(pool, name="r1", url="http://127.0.0.1:9101"), T0 + timedelta(seconds=5))

    window = {"from": T0.isoformat(), "to": (T0 + timedelta(seconds=10)).isoformat(), "step": 10}
    body = api.get("/api/v1/series", {"metric": metric, "by": by, "pool": "chat", **window}).json()

    assert {line["label"]: line["points"][0]["value"] for line in body["series"]} == pytest.approx(expected)
