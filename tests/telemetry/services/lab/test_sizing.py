"""Capacity and cost of a pool from stored rows: what figures rest on, and what is missing."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from math import exp
from random import Random

import pytest

from controlplane.errors import ConflictError
from controlplane.models import Pool
from controlplane.services.fleet.pools import create_pool, update_pool
from controlplane.services.fleet.replicas import add_replica
from routing.schema import LowestCostSettings
from telemetry.lab.costs import LearntRate
from telemetry.lab.shared_cache import TIERS, Advice
from telemetry.metrics.counters import Increase, ReadingState
from telemetry.metrics.windows import Window
from telemetry.models import CapacityCurve, WhatIf
from telemetry.scraping.merge import ROUTER_ITSELF, SourceReading
from telemetry.scraping.record import ROUTERS, store_readings
from telemetry.services.lab import what_if_runs
from telemetry.services.lab.breakdowns import breakdown_of
from telemetry.services.lab.costs import PoolPrefill, prefill_in, prefill_rate_of
from telemetry.services.lab.replays import replay_pools, update_curve
from telemetry.services.lab.sizing import create_sweep, newest_sweep, open_sweep, sizing_of
from telemetry.storage.partitions import ensure_days
from tests.telemetry.breakdown_bins import breakdown_bin
from tests.telemetry.conftest import T0
from tests.telemetry.decisions import store
from tests.telemetry.lab.traces import traffic
from tests.telemetry.readings import route_reading, router_scraped
from tests.telemetry.services.lab.test_breakdowns import CAPACITY_BLOCKS, fleet, spread  # noqa: F401 - a fixture
from tests.telemetry.services.lab.what_if_world import add_fleet, publish_and_store, serve
from tests.telemetry.services.lab.what_if_world import traffic as served_traffic
from tests.telemetry.stored_decisions import a_router
from tests.telemetry.what_if_results import finished_sweep

pytestmark = pytest.mark.django_db
DAY = Window(T0 - timedelta(hours=24), T0, 300)
COSTS = {"gpu_hour_price": 3.6, "gpus_per_replica": 2, "currency": "USD"}  # 0.002 a second of a replica


def prefill_of(pool: Pool, window: Window) -> PoolPrefill | None:
    return prefill_in(pool, window, breakdown_of(pool, window), prefill_rate_of(pool))


def bins(pool: Pool, hours: float = 24, **columns: float | str) -> None:
    """A bin of 100 requests of 1,000 tokens each half hour, of which 800 are reachable and 500 are delivered."""
    terms = {"delivered": 50_000.0, "capacity": 75_000, "split": 70_000, "best": 65_000, "predicted": 60_000} | columns
    for number in range(int(2 * hours)):
        at = T0 - timedelta(minutes=30 * (number + 1))
        breakdown_bin(pool, at, requests=100, reachable=0.8, reported_tokens=100_000, **terms)


def learnt(pool: Pool, rate: float = 1000.0, *, deviation: float = 0.0) -> CapacityCurve:
    values = {"prefill_rate": rate, "prefill_deviation": deviation, "prefill_fits": 12, "fitted_requests": 1234}
    return CapacityCurve.objects.create(pool=pool, at=T0, **values)


def test_computed_tokens_of_a_day_are_time_and_money(pool):
    bins(pool)
    bins(pool, group="agents")
    pool = update_pool(pool, costs=COSTS)
    learnt(pool)

    found = prefill_of(pool, DAY)

    assert found.requests == 9600
    assert found.measured_s == pytest.approx(23.583 * 3600, rel=0.001)  # from the first bin to the end of the last
    per_day = 86_400 / found.measured_s
    assert found.computed_per_day.tokens == pytest.approx(4_800_000 * per_day)
    assert found.computed_per_day.money == pytest.approx(4800 * 0.002 * per_day)
    assert found.notes == []


def test_a_short_time_is_extrapolated_and_says_so(pool):
    bins(pool, hours=1)
    for number in range(4):
        add_replica(pool, name=f"r{number}", url=f"http://r{number}", state="disabled" if number == 3 else "active")
    found = prefill_of(pool, DAY)
    text = " ".join(found.notes)
    assert found.is_extrapolated
    assert found.measured_hours == pytest.approx(0.583, abs=0.01)
    assert found.replica_hours_per_day == 72
    assert "No price is set" in text
    assert "prefill rate is unknown" in text
    computed = found.computed_per_day
    assert computed.replica_seconds is computed.money is found.traffic_ratio is None
    assert computed.tokens > 0


def test_figures_say_which_share_of_the_traffic_they_rest_on(pool):
    bins(pool)
    router = a_router()
    at = T0 - timedelta(hours=1)
    ensure_days([at.date()])
    router_scraped(router, at)
    route_reading(router, at, requests=9600)
    found = prefill_of(pool, DAY)
    assert found.traffic_ratio == pytest.approx(0.5)
    assert "Only 50 % of the requests were replayed" in " ".join(found.notes)


def test_figures_per_day_rest_on_the_time_without_an_outage_and_since_the_pool_exists(pool):
    """The first bin begins before the pool does; then all was down but for 20 minutes."""
    for minutes, at in ((14, 50), (10, 10)):
        end = T0 - timedelta(minutes=at)
        ensure_days([end.date()])
        reading = SourceReading(ROUTER_ITSELF, Increase(ReadingState.RESET, minutes * 60.0))
        store_readings(ROUTERS, end, [(a_router().pk, reading)])
    Pool.objects.filter(pk=pool.pk).update(created_at=T0 - timedelta(minutes=64))
    pool.refresh_from_db()
    breakdown_bin(pool, T0 - timedelta(minutes=65), requests=100, reachable=0.8)
    breakdown_bin(pool, T0 - timedelta(minutes=15), requests=100, reachable=0.8)

    found = prefill_of(pool, DAY)

    assert (found.start, found.measured_s) == (T0 - timedelta(minutes=64), 24 * 60)


def test_without_reported_tokens_figures_are_unknown(pool):
    breakdown_bin(pool, T0 - timedelta(hours=1), requests=100, reachable=0.8)
    found = prefill_of(pool, DAY)
    assert found.computed_per_day.tokens is None
    assert "--enable-prompt-tokens-details" in " ".join(found.notes)


def test_a_rate_is_learnt_slowly_with_the_range_of_its_fits():
    rng = Random(1)
    learnt_rate = None
    for _ in range(200):
        learnt_rate = LearntRate.after(learnt_rate, 8000 * exp(rng.gauss(0, 0.1)), 0.01)
    assert learnt_rate.tokens_per_s == pytest.approx(8000, rel=0.03)
    assert learnt_rate.deviation == pytest.approx(0.1, rel=0.2)

    once = LearntRate.after(learnt_rate, 18_300, 0.01)
    assert once.tokens_per_s == pytest.approx(learnt_rate.tokens_per_s, rel=0.01)
    for _ in range(600):
        once = LearntRate.after(once, 16_000, 0.01)
    assert once.tokens_per_s == pytest.approx(16_000, rel=0.02)


def test_a_sweep_is_built_around_the_present_size(fleet):  # noqa: F811
    created = create_sweep(fleet)
    assert [row.get("replicas") for row in created.candidates[:5]] == [2, 3, 5, 6, 8]
    own = CAPACITY_BLOCKS * 64
    assert [row["cache_tokens"] for row in created.candidates[5:]] == [own // 2, 2 * own, 4 * own]
    assert open_sweep(fleet) == created
    assert newest_sweep(fleet).is_calibrated is None
    assert sizing_of(fleet, DAY, TIERS).sweep.state == "queued"


def test_a_pool_without_replicas_cannot_be_swept(pool):
    with pytest.raises(ConflictError, match="no active replica"):
        create_sweep(pool)


def test_the_newest_finished_sweep_is_shown_while_another_runs(fleet):  # noqa: F811
    done = finished_sweep(fleet, T0)
    WhatIf.objects.create(pool=fleet, start=T0, end=T0 + timedelta(hours=1), candidates=[{"name": "other"}])
    running = create_sweep(fleet)
    fleet = update_pool(fleet, costs=COSTS)

    found = newest_sweep(fleet)

    assert found.what_if == done.pk
    assert open_sweep(fleet) == running
    assert [point.replicas for point in found.by_replicas] == [3, 4, 5]
    assert found.summaries[0].endswith("It would save 172.80 USD a day.")


def test_captured_requests_say_how_long_the_lost_prefixes_are(fleet):  # noqa: F811
    requests = spread(traffic(1200, placed="random", sessions=600))
    store(requests)
    now = T0 + timedelta(minutes=12)
    replay_pools(now)
    fleet = update_pool(fleet, kv_cache={"bytes_per_token": 1000}, costs=COSTS)

    curve = update_curve(fleet, now)

    assert curve.gaps["requests"] == 800  # the first third warms the caches
    every, *longer = curve.gaps["sums"]
    assert every[2] > 0, "the caches are too small for this traffic"
    assert all(later[2] <= every[2] for later in longer)
    assert (curve.prefill_rate, curve.fitted_requests) == (None, 1200)  # each has the same TTFT

    CapacityCurve.objects.filter(pool=fleet).update(prefill_rate=1000.0)
    found = sizing_of(fleet, Window(T0 - timedelta(minutes=30), now, 300), TIERS).shared_cache
    cpu = found.tiers[0]
    assert cpu.needs == ()
    assert cpu.break_even_tokens == pytest.approx(0.025 / (1 / 1000 - 1000 / 20e9))
    prefill = prefill_of(fleet, Window(T0 - timedelta(minutes=30), now, 300))
    lost_per_day = found.lost_ratio * prefill.prompt_tokens_per_day
    assert 0 < cpu.effect.tokens_per_day <= lost_per_day * 1.001
    assert cpu.money_per_day == pytest.approx(cpu.effect.saved_s_per_day * 0.002)


def test_the_advice_names_what_is_missing(fleet):  # noqa: F811
    bins(fleet)
    found = sizing_of(fleet, DAY, TIERS).shared_cache
    assert {advice.advice for advice in found.tiers} == {Advice.UNKNOWN}
    assert len(found.tiers[0].needs) == 3  # bytes per token, prefill rate, requests of the last hour
    assert (found.delivered_ratio, found.reachable_ratio) == (pytest.approx(0.5), pytest.approx(0.8))
    assert (found.lost_ratio, found.placement_ratio) == (pytest.approx(0.1), pytest.approx(0.1))


def test_a_pool_of_which_nothing_is_known_has_no_figures():
    sizing = sizing_of(create_pool("idle"), DAY, TIERS)
    assert (sizing.kv_bytes_per_token, sizing.prefill, sizing.sweep) == (None, None, None)
    assert sizing.prefill_rate.tokens_per_s is None
    assert {tier.advice for tier in sizing.shared_cache.tiers} == {"unknown"}


def test_a_sweep_of_served_traffic_fits_the_engines_and_ranks_the_sizes(pool):
    start = datetime.now(UTC) - timedelta(hours=1)
    pool = update_pool(add_fleet(pool), costs=COSTS, kv_cache={"bytes_per_token": 20_000})
    workload = served_traffic(2, seconds=240)
    publish_and_store(pool, workload, LowestCostSettings(), start)
    created = create_sweep(pool, start=start, end=start + timedelta(minutes=4))

    what_if_runs.run_queued()

    found = newest_sweep(pool)
    assert found.what_if == created.pk
    assert found.is_calibrated is not None, found.reason
    assert found.is_calibrated, found.problems
    assert [point.replicas for point in found.by_replicas] == [2, 3, 4, 5, 6, 8]
    update_curve(pool, start + timedelta(minutes=5))
    assert prefill_rate_of(pool).tokens_per_s == pytest.approx(8000, rel=0.02)
    hit_rates = [point.figures["hit_rate"] for point in found.by_cache]
    assert hit_rates == sorted(hit_rates)
    assert hit_rates[-1] > hit_rates[0] + 0.05
    fewest, most = found.by_replicas[0], found.by_replicas[-1]
    assert fewest.figures["ttft_p95_s"] > most.figures["ttft_p95_s"]
    assert "It would save 172.80 USD a day" in found.summaries[0]
    doubled = serve(workload, LowestCostSettings(), cache_tokens=120_000)
    assert hit_rates[-2] == pytest.approx(doubled.hit_rate(80), abs=0.03), "what a fleet with twice the cache does"

    now = start + timedelta(minutes=5)
    replay_pools(now)
    assert update_curve(pool, now).prefill_rate == pytest.approx(8000, rel=0.2)
    advice = sizing_of(pool, Window(start - timedelta(minutes=10), now, 300), TIERS).shared_cache
    assert advice.tiers[0].advice == Advice.WORTH_IT
    assert 0.1 < advice.lost_ratio < doubled.hit_rate(80) - advice.delivered_ratio
