"""``/api/v1/capacity``, ``/api/v1/report`` and sweeps of ``/api/v1/what-ifs``."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from controlplane.models import Pool, Rollout
from controlplane.services.fleet.pools import create_pool, update_pool
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from telemetry.models import WhatIf
from tests.telemetry.conftest import T0
from tests.telemetry.services.lab.test_breakdowns import fleet  # noqa: F401 - a fixture
from tests.telemetry.services.lab.test_sizing import COSTS, bins, learnt
from tests.telemetry.stored_decisions import a_router, repeated_in_a_row
from tests.telemetry.what_if_results import finished_sweep

pytestmark = pytest.mark.django_db
URL = "/api/v1/capacity"
TO = T0.isoformat().replace("+", "%2B")


def test_capacity_has_prefill_a_sweep_and_advice(api, fleet, django_assert_max_num_queries):  # noqa: F811
    bins(fleet)
    finished_sweep(fleet, T0)
    learnt(fleet)
    update_pool(fleet, kv_cache={"bytes_per_token": 327_680}, costs=COSTS)

    with django_assert_max_num_queries(26):
        body = api.get(f"{URL}?pool=chat&to={TO}&cpu_latency_ms=10").json()

    assert body["start"] == "2031-03-03T12:00:00Z"
    assert body["kv_bytes_per_token"] == 327_680
    assert (body["prefill"]["currency"], body["prefill"]["replica_day_price"]) == ("USD", pytest.approx(172.8))
    assert body["prefill"]["computed_per_day"]["money"] > 0
    assert body["prefill_rate"]["low"] <= body["prefill_rate"]["tokens_per_s"] <= body["prefill_rate"]["high"]
    assert [point["replicas"] for point in body["sweep"]["by_replicas"]] == [3, 4, 5]
    assert len(body["sweep"]["summaries"]) == 2
    cpu = body["shared_cache"]["tiers"][0]
    assert (cpu["tier"]["latency_s"], cpu["advice"]) == (0.01, "unknown")
    assert cpu["break_even_tokens"] > 0
    assert cpu["needs"][0].startswith("needs: the cache size")
    assert body["response_cache"] is None


def test_capacity_has_what_a_response_cache_would_bring(api, fleet):  # noqa: F811
    repeated_in_a_row(a_router(), T0, 120)

    found = api.get(f"{URL}?pool=chat&to={TO}").json()["response_cache"]

    assert (found["start"], found["sample_ratio"], found["traffic_ratio"]) == ("2031-03-04T10:00:00Z", 1, None)
    (group,) = found["groups"]
    assert (group["group"], group["requests"], group["cacheable_requests"]) == ("agents", 120, 120)
    assert [(effect["ttl_s"], effect["hits"], effect["repeat_ratio"]) for effect in group["effects"]] == [
        (300, 60, 0.5),
        (3600, 60, 0.5),
    ]
    assert group["effects"][0]["generated_tokens"] == 3000
    assert group["effects"][0]["uncached_prompt_tokens"] == 220 * 60
    assert group["effects"][0]["prefill"]["replica_seconds"] is None
    assert found["total"]["effects"] == group["effects"]


@pytest.mark.parametrize(
    ("query", "field"),
    [("", "pool"), ("pool=other", "pool"), ("pool=chat&cpu_latency_ms=-1", "cpu_latency_ms"), ("pool=chat&to=x", "to")],
)
def test_an_invalid_parameter_is_named(api, query, field):
    create_pool("chat")
    response = api.get(f"{URL}?{query}")
    assert response.status_code == 422
    assert field in str(response.data["errors"])


def test_a_sweep_fills_the_candidates(api, fleet):  # noqa: F811
    created = api.post("/api/v1/what-ifs", {"pool": "chat", "sweep": "capacity"})
    assert created.status_code == 201, created.data
    assert len(created.data["candidates"]) == 8
    for body in ({"sweep": "everything"}, {"sweep": "capacity", "candidates": [{"name": "a", "replicas": 2}]}):
        assert api.post("/api/v1/what-ifs", {"pool": "chat", **body}).status_code == 422
    assert WhatIf.objects.count() == 1
    create_pool("empty", models=["other"])
    assert api.post("/api/v1/what-ifs", {"pool": "empty", "sweep": "capacity"}).status_code == 409


def test_a_report_is_of_a_time_or_of_a_rollout(api):
    pool = create_pool("chat")
    Pool.objects.update(created_at=datetime.now(UTC) - timedelta(days=1))
    body = api.get("/api/v1/report?pool=chat&span_s=3600").json()
    assert (body["pool"], body["figures"]["before"]["hit_rate"], body["groups"]) == ("chat", None, [])
    length = datetime.fromisoformat(body["windows"]["after"]["end"]) - datetime.fromisoformat(
        body["windows"]["after"]["start"]
    )
    assert length == timedelta(hours=1)
    assert set(body["windows"]["before"]) == {"start", "end"}

    rollout = publish_revision(save_draft(pool.policies.get(group=None), {"strategy": "random"}).pk)
    assert api.get(f"/api/v1/report?rollout={rollout.pk}").status_code == 422  # it has no after yet
    Rollout.objects.filter(pk=rollout.pk).update(started_at=datetime.now(UTC) - timedelta(hours=2))
    assert api.get(f"/api/v1/report?rollout={rollout.pk}").json()["pool"] == "chat"
    for query in ("", f"pool=chat&rollout={rollout.pk}", "rollout=999999", "pool=chat&at=x", "pool=chat&span_s=1"):
        assert api.get(f"/api/v1/report?{query}").status_code == 422, query
