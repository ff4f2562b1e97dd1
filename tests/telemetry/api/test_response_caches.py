"""``/api/v1/response-caches``: what response caches answered, and the evidence of a semantic cache."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.models import Router
from controlplane.services.fleet.pools import create_pool, update_pool
from controlplane.services.fleet.task_groups import create_task_group
from telemetry.models import CapacityCurve, ScrapeState
from tests.telemetry.conftest import T0
from tests.telemetry.readings import cache_reading, router_scraped

pytestmark = pytest.mark.django_db
URL = "/api/v1/response-caches"
AT = T0 + timedelta(seconds=5)
QUERY = {"pool": "chat", "from": T0.isoformat(), "to": (T0 + timedelta(seconds=60)).isoformat()}
COUNTS = {"cache_hits": 30, "cache_misses": 10, "cache_bypasses": 5}
SAVED = {"cache_prompt_tokens": 60_000, "cache_generated_tokens": 900}
SEMANTIC = {"embedding_pool": "vectors", "embedding_model": "embedder"}
CHECKS = {"0.90": {"right": 10, "wrong": 10}, "0.95": {"right": 60, "wrong": 4}}


@pytest.fixture
def router(pool) -> Router:
    """A router before a pool with two task groups."""
    router = Router.objects.create(name="router-1", admin_url="http://127.0.0.1:8081", boot="b", last_seen_at=T0)
    router_scraped(router, AT)
    for name in ("faq", "other"):
        create_task_group(pool, name, response_cache={})
    return router


def test_hits_have_tokens_time_and_money_by_pool_and_group(api, pool, router):
    cache_reading(router, AT, group="faq", **COUNTS, **SAVED)
    cache_reading(router, AT, group="other", cache_misses=20)
    CapacityCurve.objects.create(pool=pool, at=T0, prefill_rate=1000.0, fitted_requests=500)
    update_pool(pool, costs={"gpu_hour_price": 3.6, "gpus_per_replica": 2, "currency": "EUR"})

    whole, faq, other = (api.get(URL, QUERY | query).json() for query in ({}, {"group": "faq"}, {"group": "other"}))

    assert [whole[name] for name in ("pool", "group", "start", "hits", "misses", "bypassed", "hit_ratio")] == [
        *("chat", None, T0.isoformat().replace("+00:00", "Z"), 30, 30, 5, 0.5)
    ]
    assert (faq["hits"], faq["hit_ratio"], faq["prompt_tokens"], faq["generated_tokens"]) == (30, 0.75, 60_000, 900)
    assert faq["prefill"] == {"tokens": 60_000, "replica_seconds": 60, "money": pytest.approx(0.12)}
    assert faq["currency"] == "EUR"
    assert (other["hits"], other["hit_ratio"], other["semantic"]) == (0, 0, None)


def test_without_a_scrape_everything_is_unknown(api, pool):
    found = api.get(URL, QUERY).json()

    assert [found[name] for name in ("hits", "misses", "hit_ratio", "prompt_tokens", "currency")] == [None] * 5
    assert found["prefill"] == {"tokens": None, "replica_seconds": None, "money": None}


def test_a_group_with_a_semantic_cache_has_its_state_and_precision(api, pool, router):
    update_pool(pool, models=["tiny"])
    create_pool("vectors", project=pool.project, models=["embedder"])
    create_task_group(pool, "similar", response_cache={}, semantic_cache=SEMANTIC)
    now = timezone.now()
    cache = {"states": {"shadow": 1}, "checks": CHECKS, "lower_bound": 0.91, "entries": 70}
    state = {"at": now, "ok_at": now, "health": "up", "semantic_caches": {"chat": {"similar": cache}}}
    ScrapeState.objects.create(router=router, **state)

    found = api.get(URL, QUERY | {"group": "similar"}).json()["semantic"]

    (row,) = found["routers"]
    assert (row["router"], row["state"], row["lower_bound"], row["recent_precision"]) == (
        "router-1",
        "shadow",
        0.91,
        None,
    )
    assert [(point["threshold"], point["checks"], point["wrong"]) for point in found["points"]] == [
        (0.9, 84, 14),
        (0.95, 64, 4),
    ]
    assert found["points"][1]["precision"] == pytest.approx(60 / 64)
    low, high = found["points"][1]["interval"]
    assert low < 60 / 64 < high


def test_the_query_is_checked(api, pool):
    assert api.get(URL).status_code == 422
    assert api.get(URL, {"pool": "unknown"}).status_code == 422
    assert api.get(URL, QUERY | {"to": "2000-01-01T00:00:00Z"}).status_code == 422
