"""Charts and tiles from stored readings: sums before ratios, gaps with their reasons."""

from datetime import timedelta

import pytest
import time_machine
from django.db import connection

from controlplane.models import ReplicaState, Router
from controlplane.services.fleet.replicas import add_replica, remove_replica, set_replica_state
from controlplane.services.fleet.task_groups import create_task_group
from telemetry.metrics.counters import ReadingState
from telemetry.metrics.rates import UPPER_BOUND
from telemetry.metrics.windows import PointState, Window
from telemetry.services.figures import figures, groups, overview, series
from telemetry.services.figures.overview import Subject
from telemetry.storage import sums
from telemetry.storage.dimension_sums import usage_reports
from tests.telemetry.breakdown_bins import breakdown_bin
from tests.telemetry.conftest import T0, fleet_of
from tests.telemetry.readings import engine_reading, gap, route_reading, router_scraped, scraped, steps

pytestmark = pytest.mark.django_db
MINUTE = Window(T0, T0 + timedelta(seconds=60), 10.0)


@pytest.fixture
def r2(pool):
    return add_replica(pool, name="r2", url="http://127.0.0.1:9102")


@pytest.fixture
def router(db):
    return Router.objects.create(name="router-1", admin_url="http://127.0.0.1:8081", boot="b", last_seen_at=T0)


def values(line):
    return [value for _, value in line.points]


def test_a_step_contains_the_readings_after_its_start_up_to_its_end(r1, pool):
    for at, queries in zip(steps(T0, 4), (100, 100, 300, 500), strict=True):
        engine_reading(r1, at, queries=queries, hits=50)

    (line,) = series.hit_rate_by_replica(Subject([pool]), MINUTE)

    assert line.points[0] == (T0, 0.5)  # 100 / 200
    assert line.points[1] == (T0 + timedelta(seconds=10), 0.125)  # 100 / 800


def test_a_pools_hit_rate_is_summed_over_replicas_before_it_is_divided(r1, r2, pool):
    """H2, with the two-replica example of its source: true 65.0 %, mean of the replicas 57.5 %."""
    at = T0 + timedelta(seconds=5)
    engine_reading(r1, at, queries=8000, hits=5600)  # 70 %
    engine_reading(r2, at, queries=2000, hits=900)  # 45 %

    (line,) = series.hit_rate_by_pool(Subject([pool]), MINUTE)
    tiles = overview.fleet_tiles(fleet_of(pool), MINUTE)

    assert values(line)[0] == pytest.approx(0.65)
    assert tiles.hit_rate_ratio == pytest.approx(0.65)


def test_external_hits_count_as_hits_and_external_queries_do_not_count(r1, pool):
    engine_reading(r1, T0 + timedelta(seconds=5), queries=1000, hits=400, external_queries=600, external_hits=300)

    assert values(series.hit_rate_by_replica(Subject([pool]), MINUTE)[0])[0] == pytest.approx(0.7)  # H3
    assert values(series.hit_rate_by_replica(Subject([pool]), MINUTE, local=True)[0])[0] == pytest.approx(0.4)  # H4


def test_engines_of_one_replica_are_added_up(r1, pool):
    """H15: ``engine`` is a rank inside one server."""
    at = T0 + timedelta(seconds=5)
    engine_reading(r1, at, engine="0", queries=100, hits=100, gauges={"running": 2, "kv_usage_ratio": 0.2})
    engine_reading(r1, at, engine="1", queries=300, hits=0, gauges={"running": 5, "kv_usage_ratio": 0.6})

    assert values(series.hit_rate_by_replica(Subject([pool]), MINUTE)[0])[0] == 0.25
    assert values(series.utilization_by_replica(Subject([pool]), MINUTE, "running")[0])[0] == 7
    assert values(series.utilization_by_replica(Subject([pool]), MINUTE, "kv_usage")[0])[0] == pytest.approx(0.4)


def test_a_missing_value_is_due_to_no_traffic_a_failed_scrape_or_no_scrape(r1, pool):
    first, second, third, _ = steps(T0, 4, every_s=10)
    engine_reading(r1, first, queries=10, hits=0)
    engine_reading(r1, second, queries=0, hits=0)  # H11
    gap(r1, third)  # H12

    (line,) = series.hit_rate_by_replica(Subject([pool]), MINUTE)

    assert values(line)[:4] == [0.0, None, None, None]
    assert line.states[:4] == [PointState.OK, PointState.NO_TRAFFIC, PointState.STALE, PointState.UNKNOWN]


def test_increases_over_missed_scrapes_count_at_the_next_scrape(r1, pool):
    """H10"""
    engine_reading(r1, T0 + timedelta(seconds=5), queries=100, hits=0)
    gap(r1, T0 + timedelta(seconds=25))
    engine_reading(r1, T0 + timedelta(seconds=35), queries=900, hits=900, state=ReadingState.GAP, interval_s=30)

    tiles = overview.fleet_tiles(fleet_of(pool), MINUTE)

    assert tiles.hit_rate_ratio == pytest.approx(0.9)


def test_a_task_groups_hit_rate_is_of_responses_that_report_cached_tokens(router, pool):
    """H16"""
    create_task_group(pool, name="coding")
    at = T0 + timedelta(seconds=5)
    router_scraped(router, at)
    route_reading(router, at, group="coding", requests=3, usage_reported=2, prompt_tokens=1000, cached_tokens=800)
    route_reading(router, at, group="", requests=3)
    router_scraped(router, at + timedelta(seconds=10))

    other, coding = series.hit_rate_by_group(Subject([pool]), MINUTE)

    assert (coding.label, values(coding)[0], coding.states[0]) == ("coding", 0.8, PointState.OK)
    assert (values(coding)[1], coding.states[1]) == (None, PointState.NO_TRAFFIC)
    assert (other.label, values(other)[0], other.states[0]) == ("no group", None, PointState.UNKNOWN)


def test_every_task_group_has_a_row_with_its_reachable_hit_rate_also_without_traffic(router, pool):
    breakdown_bin(pool, T0 - timedelta(minutes=5), group="busy", requests=400, reachable=0.36)
    create_task_group(pool, name="quiet")
    at = T0 + timedelta(seconds=5)
    router_scraped(router, at)
    route_reading(
        router, at, group="busy", requests=10, replica_error_requests=1,
        usage_reported=9, prompt_tokens=1000, cached_tokens=500,
    )  # fmt: skip
    route_reading(router, at, group="busy", ttft={100: 10})

    busy, quiet = overview.group_rows(fleet_of(pool), MINUTE)

    assert (busy.name, busy.hit_rate_ratio) == ("busy", 0.5)
    assert busy.reachable.ratio == pytest.approx(0.36)  # though whole blocks could hold 0.96
    assert quiet.reachable is None
    assert busy.failed_ratio == pytest.approx(0.1)
    assert busy.requests_per_s == pytest.approx(2.0)
    assert busy.ttft_p50_s == pytest.approx(0.001 * 1.05**100, rel=0.05)
    assert (quiet.name, quiet.hit_rate_ratio, quiet.hit_rate_state) == ("quiet", None, PointState.NO_TRAFFIC)
    assert quiet.requests_per_s == 0.0


def test_a_rate_divides_by_each_second_once_however_many_routers_follow_each_other(pool):
    """A deployment replaces two routers by two others with other names; all four count 10 requests in 5 s."""
    names = ("a1", "a2", "b1", "b2")
    routers = [
        Router.objects.create(name=name, admin_url=f"http://127.0.0.1/{name}", last_seen_at=T0) for name in names
    ]
    for second in range(5, 61, 5):
        for router in routers[:2] if second <= 30 else routers[2:]:
            router_scraped(router, T0 + timedelta(seconds=second))
            route_reading(router, T0 + timedelta(seconds=second), group="busy", requests=10, ok_requests=10)

    assert overview.fleet_tiles(fleet_of(pool), MINUTE).requests_per_s == pytest.approx(4.0)
    assert overview.group_rows(fleet_of(pool), MINUTE)[0].requests_per_s == pytest.approx(4.0)
    busy = Subject.of_pool(pool, "busy")
    assert groups.group_tiles(busy, MINUTE).requests_per_s == pytest.approx(4.0)
    (line,) = figures.outcomes(busy, MINUTE)
    assert values(line) == pytest.approx([4.0] * 6)


def test_the_past_does_not_change_when_a_replica_is_removed_or_disabled(r1, r2, pool):
    r3 = add_replica(pool, name="r3", url="http://127.0.0.1:9103")
    for replica, hits in ((r1, 900), (r2, 300), (r3, 0)):
        engine_reading(replica, T0 + timedelta(seconds=5), queries=1000, hits=hits, finished=10)
    with time_machine.travel(T0 + timedelta(seconds=30), tick=False):
        remove_replica(r2)
        set_replica_state(r3, ReplicaState.DISABLED)

        tiles = overview.fleet_tiles(fleet_of(pool), MINUTE)
        (line,) = series.hit_rate_by_pool(Subject([pool]), MINUTE)
        chart = figures.hit_rate(Subject.of_pool(pool), MINUTE)[0]
    assert (tiles.hit_rate_ratio, values(line)[0], values(chart)[0]) == (0.4, 0.4, 0.4)
    assert tiles.replicas_total == 1


def test_ttft_is_the_quantile_of_merged_buckets_with_its_bucket_as_a_band(r1, r2, pool):
    """T4, T5"""
    at = T0 + timedelta(seconds=5)
    engine_reading(r1, at, queries=1, hits=0, ttft={0: 90})  # up to 0.1 s
    engine_reading(r2, at, queries=1, hits=0, ttft={3: 10})  # 1 s to 5 s

    p50, p95 = figures.ttft_by_router(Subject([pool]), MINUTE)

    assert p50.label == "p50 (engine)"
    assert values(p50)[0] == pytest.approx(0.1 * 50 / 90)
    assert p95.band[0] == (1.0, 5.0)
    assert values(p95)[0] == pytest.approx(1.0 + 4.0 * 5 / 10)
    assert p95.band[1] is None


def test_histograms_by_revision_are_not_counted_twice(router, pool):
    at = T0 + timedelta(seconds=5)
    router_scraped(router, at)
    route_reading(router, at, group="busy", ttft={100: 10})
    route_reading(router, at, group="busy", ttft={100: 1, 200: 90}, revision=2)

    (p50,) = figures.ttft_by_router(Subject([pool]), MINUTE)[:1]
    busy = next(row for row in overview.group_rows(fleet_of(pool), MINUTE) if row.name == "busy")

    for p50_s in (values(p50)[0], busy.ttft_p50_s, overview.fleet_tiles(fleet_of(pool), MINUTE).ttft_p50_s):
        assert p50_s == pytest.approx(0.001 * 1.05**100, rel=0.05)


def test_ttft_of_routers_is_preferred_over_ttft_of_engines(r1, router, pool):
    """T1"""
    at = T0 + timedelta(seconds=5)
    engine_reading(r1, at, queries=1, hits=0, ttft={0: 90})
    router_scraped(router, at)
    route_reading(router, at, ttft={200: 5})

    (p50,) = figures.ttft_by_router(Subject([pool]), MINUTE)[:1]
    (engine,) = figures.ttft_by_engine(Subject([pool]), MINUTE)[:1]
    tiles = overview.fleet_tiles(fleet_of(pool), MINUTE)

    assert (p50.label, engine.label, tiles.ttft_source) == ("p50 (router)", "p50 (engine)", "router")
    assert p50.band[0] == pytest.approx((0.001 * 1.05**199, 0.001 * 1.05**200))


def test_ttft_has_the_share_of_timed_responses_and_other_responses_have_a_latency(r1, router, pool):
    at = T0 + timedelta(seconds=5)
    engine_reading(r1, at, queries=1, hits=0, ttft={0: 90})
    router_scraped(router, at)
    route_reading(router, at, group="mixed", ttft={100: 51}, streamed={180: 51}, plain={200: 49})
    route_reading(router, at, group="plain", plain={200: 10})

    mixed, plain = overview.group_rows(fleet_of(pool), MINUTE)
    lines = figures.ttft_by_router(Subject([pool]), MINUTE)

    assert mixed.ttft_timed_ratio == 0.51
    assert mixed.ttft_p95_s == pytest.approx(0.001 * 1.05**100, rel=0.05)
    assert mixed.plain_p95_s == pytest.approx(0.001 * 1.05**200, rel=0.05)
    assert (plain.ttft_p50_s, plain.ttft_timed_ratio) == (None, 0.0)
    assert plain.plain_p50_s == pytest.approx(0.001 * 1.05**200, rel=0.05)
    assert overview.fleet_tiles(fleet_of(pool), MINUTE).ttft_timed_ratio == pytest.approx(51 / 110)
    assert [line.note for line in lines] == ["Of streamed responses: 46% of all."] * 2


def test_ttft_is_of_engines_if_no_response_was_streamed(r1, router, pool):
    """T1"""
    at = T0 + timedelta(seconds=5)
    engine_reading(r1, at, queries=1, hits=0, ttft={0: 90})
    router_scraped(router, at)
    route_reading(router, at, plain={200: 10})

    tiles = overview.fleet_tiles(fleet_of(pool), MINUTE)
    (p50,) = figures.ttft_by_router(Subject([pool]), MINUTE)[:1]

    assert (tiles.ttft_source, tiles.ttft_timed_ratio, p50.label, p50.note) == ("engine", 1.0, "p50 (engine)", "")
    assert tiles.ttft_p50_s == pytest.approx(0.05)
    assert tiles.plain_p50_s == pytest.approx(0.001 * 1.05**200, rel=0.05)


def test_histograms_with_different_edges_are_merged_on_common_edges_with_a_note(r1, r2, pool):
    """T3"""
    at = T0 + timedelta(seconds=5)
    engine_reading(r1, at, queries=1, hits=0, ttft={1: 4}, edges=(0.1, 0.5, 1.0))
    engine_reading(r2, at, queries=1, hits=0, ttft={0: 4}, edges=(0.3, 1.0))

    (p50,) = figures.ttft_by_router(Subject([pool]), MINUTE)[:1]

    assert p50.band[0] == (0.0, 1.0)
    assert p50.note


def test_running_and_waiting_are_of_the_newest_scrape_and_unknown_after_a_failed_scrape(r1, r2, pool):
    """H12"""
    engine_reading(r1, T0 + timedelta(seconds=55), queries=1, hits=0, gauges={"running": 9, "waiting": 9})
    engine_reading(r1, T0 + timedelta(seconds=60), queries=1, hits=0, gauges={"running": 2, "waiting": 1})
    engine_reading(r2, T0 + timedelta(seconds=55), queries=1, hits=0, gauges={"running": 7, "waiting": 7})
    gap(r2, T0 + timedelta(seconds=60))

    tiles = overview.fleet_tiles(fleet_of(pool), MINUTE)

    assert tiles.waiting == 1


def test_a_replicas_row_has_its_health_and_rates(r1, r2, pool, time_machine):
    time_machine.move_to(T0 + timedelta(seconds=61), tick=False)
    scraped(r1, T0 + timedelta(seconds=60))
    scraped(r2, T0 + timedelta(seconds=60), health="down", failures=3, reason="nobody listens there", ok_at=T0)
    engine_reading(r1, T0 + timedelta(seconds=60), queries=10, hits=5, finished=20, prompt_tokens=100)

    up, down = overview.replica_rows(fleet_of(pool), MINUTE)
    tiles = overview.fleet_tiles(fleet_of(pool), MINUTE)

    assert (up.health, up.requests_per_s, up.prompt_tokens_per_s) == ("up", 4.0, 20.0)
    assert (down.health, down.reason) == ("down", "nobody listens there")
    assert (tiles.replicas_up, tiles.replicas_total, tiles.read_at) == (1, 2, T0 + timedelta(seconds=60))


@pytest.mark.parametrize(
    ("fields", "seconds_later", "health"),
    [
        ({}, 1, "up"),
        ({}, 30, "stale"),
        ({"failures": 1}, 1, "stale"),
        ({"health": "down", "failures": 2}, 1, "down"),
        ({"restarted_at": T0 - timedelta(seconds=60)}, 1, "cold"),
        ({"restarted_at": T0 - timedelta(seconds=600)}, 1, "up"),
        ({"asleep": True}, 1, "cold"),
        ({"lacks_prefix_cache": True}, 1, "cold"),
        ({"ok_at": None, "health": "unknown"}, 1, "unknown"),
    ],
)
def test_the_health_of_a_replica(r1, time_machine, fields, seconds_later, health):
    time_machine.move_to(T0 + timedelta(seconds=seconds_later), tick=False)
    scraped(r1, T0, **fields)

    (row,) = overview.replica_rows(fleet_of(r1.pool), MINUTE)

    assert row.health == health


def test_the_number_of_queries_does_not_grow_with_the_fleet(pool, router, django_assert_num_queries):
    for number in range(12):
        replica = add_replica(pool, name=f"r{number}", url=f"http://127.0.0.1:{9101 + number}")
        scraped(replica, T0)
        for at in steps(T0, 3):
            engine_reading(replica, at, queries=10, hits=5, ttft={0: 1})
    router_scraped(router, T0 + timedelta(seconds=5))
    route_reading(router, T0 + timedelta(seconds=5), ttft={10: 1})

    for query, count in (
        (lambda: overview.fleet_tiles(fleet_of(pool), MINUTE), 9),
        (lambda: overview.replica_rows(fleet_of(pool), MINUTE), 5),
        (lambda: overview.group_rows(fleet_of(pool), MINUTE), 5),
        (lambda: series.hit_rate_by_replica(Subject([pool]), MINUTE), 2),
        (lambda: series.hit_rate_by_group(Subject([pool]), MINUTE), 1),
        (lambda: figures.ttft_by_router(Subject([pool]), MINUTE), 2),
        (lambda: series.utilization_by_replica(Subject([pool]), MINUTE, "kv_usage"), 2),
    ):
        with django_assert_num_queries(count):
            query()


def test_a_query_uses_the_primary_keys_of_the_partitions_of_its_window_only(r1):
    engine_reading(r1, T0, queries=1, hits=0)
    engine_reading(r1, T0 - timedelta(days=2), queries=1, hits=0)
    with connection.cursor() as cursor:
        cursor.execute("set local enable_seqscan = off")
        cursor.execute(
            "explain select sum(queries) from telemetry_reading where at > %s and at <= %s and replica_id = any(%s)",
            [T0 - timedelta(hours=1), T0, [r1.pk]],
        )
        plan = "\n".join(row[0] for row in cursor.fetchall())

    assert "telemetry_reading_20310304_pkey" in plan
    assert "20310302" not in plan


def test_a_hit_rate_that_the_engine_does_not_report_is_not_reported_instead_of_zero(r1, r2, pool):
    at = T0 + timedelta(seconds=5)
    engine_reading(r1, at, queries=1000, not_reported=["hits"])
    engine_reading(r2, at, queries=1000, hits=400)

    lines = series.hit_rate_by_replica(Subject([pool]), MINUTE)
    (of_pool,) = series.hit_rate_by_pool(Subject([pool]), MINUTE)

    assert [(values(line)[0], line.states[0]) for line in lines] == [
        (None, PointState.NOT_REPORTED),
        (0.4, PointState.OK),
    ]
    assert (values(of_pool)[0], of_pool.states[0]) == (0.4, PointState.OK)


def test_histograms_by_reuse_are_not_counted_twice(pool, router):
    at = T0 + timedelta(seconds=5)
    router_scraped(router, at)
    route_reading(router, at, ttft={10: 3})
    route_reading(router, at, ttft={10: 2}, reuse="hit")
    route_reading(router, at, ttft={90: 1}, reuse="miss")

    everything = sums.router_ttft([pool.name], MINUTE, whole=True)
    split = sums.router_ttft([pool.name], MINUTE, by="reuse", whole=True)

    assert {key: merged.buckets.total for (key, _), merged in everything.items()} == {"": 3}
    assert {key: merged.buckets.total for (key, _), merged in split.items()} == {
        ("chat", "", "hit"): 2,
        ("chat", "", "miss"): 1,
    }


def test_a_group_s_figures_say_which_share_of_the_responses_they_rest_on(pool, router):
    at = T0 + timedelta(seconds=5)
    router_scraped(router, at)
    told = {"usage_reported": 3, "prompt_tokens": 300, "cached_tokens": 150}
    route_reading(router, at, group="part", replica="r1", requests=8, ok_requests=6, **told)
    route_reading(router, at, group="part", replica="r2", requests=6, ok_requests=6)
    route_reading(router, at, group="none", requests=4, ok_requests=4)
    route_reading(router, at, group="failed", requests=4, replica_error_requests=4)
    route_reading(router, at, group="whole", requests=3, ok_requests=3, **told)

    rows = {row.name: row.accounted_ratio for row in overview.group_rows(fleet_of(pool), MINUTE)}
    assert rows == {"part": 0.25, "none": 0.0, "failed": None, "whole": 1.0}

    subject = Subject.of_pool(pool, "part")
    assert groups.group_tiles(subject, MINUTE).accounted_ratio == 0.25
    shares = groups.replica_shares(subject, MINUTE)
    assert {share.name: share.accounted_ratio for share in shares} == {"r1": 0.5, "r2": 0.0}

    notes = {line.label: line.note for line in series.hit_rate_by_group(Subject([pool]), MINUTE)}
    assert notes["part"] == f"part covers 25.0 % of the responses. {UPPER_BOUND}"
    assert notes["whole"] == notes["failed"] == ""
    assert figures.hit_rate(subject, MINUTE)[0].note.startswith("Hit rate covers 25.0 % of the responses.")


@pytest.mark.parametrize(
    ("counted", "lacks", "share"),
    [
        ({"ok_requests": 4, "usage_without_details": 4}, True, 0.0),
        ({"ok_requests": 4, "usage_without_details": 1, "usage_reported": 3}, False, 0.75),  # a release that omits 0
        ({"ok_requests": 4}, False, 0.0),
        ({"replica_error_requests": 4}, False, None),
    ],
)
def test_a_replica_that_reports_usage_without_cached_tokens_is_told_from_others(pool, router, counted, lacks, share):
    route_reading(router, T0 + timedelta(seconds=5), replica="r1", requests=4, **counted)
    route_reading(router, T0 + timedelta(seconds=5), replica="r2", requests=4, ok_requests=4, usage_reported=4)

    found = usage_reports(pool.name, "r1", MINUTE)
    assert (found.lacks_details, found.accounted_ratio) == (lacks, share)
