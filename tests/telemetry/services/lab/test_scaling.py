"""Scaling signals of a pool from stored scrapes: over all routers and replicas, and never from old figures."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from controlplane.models import Pool, Replica
from controlplane.services.fleet.pools import create_pool
from controlplane.services.fleet.replicas import add_replica, record_engine_facts, update_replica
from telemetry.lab.scaling import Limit
from telemetry.models import CapacityCurve, ScrapeState
from telemetry.services.lab.scaling import PoolScaling, scaling_of
from telemetry.storage.partitions import ensure_days
from tests.telemetry.conftest import T0
from tests.telemetry.readings import engine_reading, scraped, stored_together
from tests.telemetry.stored_decisions import a_router
from tests.telemetry.what_if_results import finished_sweep

pytestmark = pytest.mark.django_db
RATE = 4000.0  # tokens/s of all four replicas
LOAD = {"saturation_ratio": 0.25, "waiting_s": 1.5, "prefill_tokens_per_s": RATE}


def routed(name: str, loads: dict[str, Any] | None, *, age_s: float = 0.0) -> None:
    at = T0 - timedelta(seconds=age_s)
    ScrapeState.objects.create(router=a_router(name), at=at, ok_at=at, health="up", pool_loads=loads)


@pytest.fixture
def replicas(pool: Pool) -> list[Replica]:
    """Four replicas that were scraped at ``T0``, with an hour of light traffic, half of it cached."""
    ensure_days([T0.date()])
    made = [add_replica(pool, name=f"r{number}", url=f"http://r{number}") for number in range(4)]
    with stored_together():
        for replica in made:
            scraped(replica, T0)
            for minute in range(60):
                at = T0 - timedelta(minutes=minute)
                engine_reading(replica, at, interval_s=60.0, queries=12_000, hits=6_000, gauges={"kv_usage_ratio": 0.1})
    return made


def busy_minute(replica: Replica, tokens: int) -> None:
    engine_reading(replica, T0 - timedelta(minutes=30, seconds=5), engine="1", queries=tokens, hits=0)


def only(pool: Pool) -> PoolScaling:
    return scaling_of([pool], T0)[0]


def test_figures_of_routers_add_up_and_the_kv_cache_counts_if_it_is_fuller(pool, replicas):
    routed("a", {"chat": LOAD, "other": LOAD | {"saturation_ratio": 0.9}})
    routed("b", {"chat": LOAD | {"saturation_ratio": 0.5, "waiting_s": 0.5}})
    found = only(pool)
    assert (found.replicas, found.prefill_ratio, found.kv_usage_ratio) == (4, 0.75, 0.1)
    assert (found.saturation_ratio, found.waiting_work_s) == (0.75, 2.0)
    assert (found.recommended_replicas, found.limited_by) == (5, Limit.PREFILL)

    engine_reading(replicas[0], T0, engine="1", gauges={"kv_usage_ratio": 0.9})
    for replica in replicas[1:]:
        engine_reading(replica, T0 - timedelta(seconds=1), engine="1", gauges={"kv_usage_ratio": 0.9})
    routed("c", {"chat": LOAD | {"saturation_ratio": 0.5}})
    assert only(pool).prefill_ratio == 1.0


def test_the_busiest_minute_of_the_last_hour_counts(pool, replicas):
    routed("a", {"chat": LOAD})
    assert only(pool).peak_saturation_ratio == pytest.approx(0.25)
    busy_minute(replicas[0], 200_000)  # beside 24,000 tokens of all replicas, of 240,000 in a minute

    found = only(pool)

    assert found.saturation_ratio == 0.25
    assert found.peak_saturation_ratio == pytest.approx(224 / 240, rel=0.01)
    assert found.recommended_replicas == 6


def test_scaling_in_rests_on_the_working_set_or_a_sweep(pool, replicas):
    routed("a", {"chat": LOAD})
    assert (only(pool).recommended_replicas, "capacity sweep" in only(pool).reason) == (4, True)

    for replica in replicas:
        record_engine_facts(replica, block_tokens=16, capacity_blocks=1000)
    curve = CapacityCurve.objects.create(pool=pool, at=T0, working_set={"tokens": 40_000, "low": 0, "high": 45_000})
    assert only(pool).recommended_replicas == 3
    CapacityCurve.objects.filter(pk=curve.pk).update(at=T0 - timedelta(hours=2))
    assert only(pool).recommended_replicas == 4

    sweep = finished_sweep(pool, T0)  # three replicas lose five points
    found = only(pool)
    assert (found.recommended_replicas, found.reason) == (4, "With 3 replicas the hit rate would be 5 points lower.")
    sweep.result["candidates"][1]["figures"]["hit_rate"] = 0.44
    sweep.save()
    assert only(pool).recommended_replicas == 3


def one_router_is_silent(_: list[Replica]) -> None:
    routed("b", {"chat": LOAD}, age_s=60)


def one_router_failed_its_scrape(_: list[Replica]) -> None:
    routed("b", None)


def one_router_has_no_rate(_: list[Replica]) -> None:
    routed("b", {"chat": {"waiting_s": 0.0}})


def nothing_was_scraped(_: list[Replica]) -> None:
    ScrapeState.objects.update(at=T0 - timedelta(minutes=5), ok_at=T0 - timedelta(minutes=5))


def replicas_are_down(_: list[Replica]) -> None:
    ScrapeState.objects.filter(router=None).update(health="down", failures=3)


def replicas_have_roles(replicas: list[Replica]) -> None:
    update_replica(replicas[0], role="prefill")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (one_router_is_silent, "Router b was not scraped lately."),
        (one_router_failed_its_scrape, "Router b was not scraped lately."),
        (one_router_has_no_rate, "Router b has not measured the prefill rate of this pool"),
        (nothing_was_scraped, "Router a was not scraped lately."),
        (replicas_are_down, "No active replica was scraped lately."),
        (replicas_have_roles, "Prefill and decode replicas are scaled separately"),
    ],
)
def test_nothing_is_recommended_from_old_or_partial_figures(
    pool: Pool, replicas: list[Replica], damage: Callable[[list[Replica]], None], reason: str
) -> None:
    routed("a", {"chat": LOAD})
    damage(replicas)

    found = only(pool)

    assert found.recommended_replicas is None
    assert found.reason.startswith(reason)


def test_a_pool_without_routers_is_unknown_and_a_lost_router_does_not_count(pool, replicas):
    assert (only(pool).saturation_ratio, only(pool).reason) == (None, "No router is connected.")
    routed("a", {"chat": LOAD})
    routed("b", None)
    a_router("b")
    type(a_router("b")).objects.filter(name="b").update(lost_at=T0)
    assert only(pool).saturation_ratio == 0.25


def test_all_pools_take_a_fixed_number_of_queries(pool, replicas, django_assert_max_num_queries):
    for number in range(5):
        create_pool(f"other-{number}", models=[f"m{number}"])
    routed("a", {"chat": LOAD})

    with django_assert_max_num_queries(14):
        found = scaling_of(None, T0)

    assert [(row.pool, row.replicas) for row in found][:2] == [("chat", 4), ("other-0", 0)]
