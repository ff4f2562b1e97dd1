"""Rollups give the same sums as their readings, also with late, duplicate or missing readings."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Event
from unittest.mock import patch

import pytest
from django.db import connection, transaction
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.models import Router
from controlplane.services.fleet.replicas import add_replica, remove_replica
from telemetry.metrics.counters import ReadingState
from telemetry.metrics.windows import Window
from telemetry.models import RollupRepair, RollupState
from telemetry.storage import sums
from telemetry.storage.dimension_sums import response_cache_sums, route_sums
from telemetry.storage.locks import ROLLUP
from telemetry.storage.partitions import drop_before, partitions_of
from telemetry.storage.rollup import CHUNK_BINS, close, mark_late, roll_up
from telemetry.storage.rollup_tables import BY_PART, RESOLUTIONS_S, SUMS, TABLES, Span, histograms, spans_of
from tests.conftest import wait_until
from tests.controlplane.threads import at_once, waiting
from tests.telemetry.conftest import T0
from tests.telemetry.readings import cache_reading, engine_reading, gap, route_reading, router_scraped, stored_together

pytestmark = pytest.mark.django_db
KEPT_S = 3 * 86_400.0
HOURS = Window(T0, T0 + timedelta(hours=4), 3600)
SIX_HOURS = Window(T0, T0 + timedelta(hours=6), 6 * 3600)
MINUTES = Window(T0, T0 + timedelta(hours=1), 60)


@pytest.fixture
def replicas(pool):
    return [add_replica(pool, name=name, url=f"http://127.0.0.1:1/{name}") for name in ("r1", "r2")]


@pytest.fixture
def router(db):
    return Router.objects.create(name="router-1", admin_url="http://127.0.0.1:1", boot="b", last_seen_at=T0)


def roll(hours=5.0):
    return roll_up(T0 + timedelta(hours=hours), readings_retention_s=KEPT_S)


def at(minute, second=0):
    return T0 + timedelta(minutes=minute, seconds=second)


@stored_together()
def some_hours(replicas, router, every_min=7):
    """Four hours with traffic, silence, failed scrapes, a restart, two engines, two layouts, and a router's counts."""
    r1, r2 = replicas
    for number, minute in enumerate(range(1, 240, every_min)):
        state = ReadingState.RESET if number == 9 else ReadingState.OK
        gauges = {"running": float(number % 4), "waiting": 1.0, "kv_usage_ratio": number % 10 / 10}
        engine_reading(
            r1, at(minute), queries=1000 + number, hits=300, external_hits=5, prompt_tokens=900, finished=3,
            ttft={number % 4: 5, 2: 1}, gauges=gauges, state=state, interval_s=5.0 + number,
        )  # fmt: skip
        engine_reading(r1, at(minute), engine="1", queries=10, hits=1, gauges={"kv_usage_ratio": 0.5})
        if number % 3 == 0:
            gap(r2, at(minute, 20))
        elif number % 3 == 1:
            engine_reading(r2, at(minute, 20), queries=0, hits=0, ttft={1: 2}, edges=(0.5, 1.0, 5.0))
        router_scraped(router, at(minute), stale=number % 5 == 4)
        counts = {"requests": 9, "replica_error_requests": 1, "usage_reported": 8, "prompt_tokens": 800}
        route_reading(router, at(minute), group="busy", **counts, cached_tokens=500)
        if number % 4:
            cached = {"cache_hits": number % 7, "cache_misses": 2, "cache_prompt_tokens": 50 * (number % 7)}
            cached |= {"objective_requests": 9, "objective_kept": number % 9}
            cache_reading(router, at(minute, 1), group="busy" if number % 2 else "cached-only", **cached)
        route_reading(
            router, at(minute), group="busy", ttft={100: 4, 120: number % 3}, streamed={150: 4}, plain={160: number % 5}
        )


def all_sums(replicas, window):
    """The results of every query, by name."""
    ids = [replica.pk for replica in replicas]
    return {
        "engines": sums.engine_sums(ids, window),
        "engines, whole": sums.engine_sums(ids, window, whole=True),
        "hits": sorted(sums.hit_sums(ids, window)),
        "hits together": sorted(sums.hit_sums_by_set([ids, ids[:1]], window)),
        "routers": sums.router_sums(["chat"], window),
        "routers, whole": sums.router_sums(None, window, whole=True),
        "response caches": response_cache_sums(["chat"], window),
        "response caches by group": response_cache_sums(["chat"], window, by_group=True),
        "response cache of a group": response_cache_sums(None, window, group="cached-only", whole=True),
        "objectives": route_sums(
            ["chat"], window, ("objective_requests", "objective_kept"), by=("group",), counted="objective_requests"
        ),
        "gauges": [
            sorted((pk, step, value and round(value, 9), stale) for pk, step, value, stale in rows)
            for rows in (sums.mean_gauge(ids, window, name) for name in ("running", "kv_usage_ratio"))
        ],
        "engine TTFT": sums.engine_ttft(ids, window),
        "engine TTFT by replica": sums.engine_ttft(ids, window, by="replica", whole=True),
        "engine TTFT of pools": sums.pools_engine_ttft(["chat"], window),
        "router TTFT of pools": sums.router_ttft(None, window),
        "router TTFT by group": sums.router_ttft(["chat"], window, by="group"),
        "plain latency of pools": sums.router_latency(None, window, streamed=False),
        "streamed latency by group": sums.router_latency(["chat"], window, streamed=True, by="group"),
    }


def read_from(window, whole=False):
    return {part.resolution_s for part in spans_of(window, whole=whole)}


@pytest.mark.parametrize(
    ("window", "resolution_s"),
    [
        pytest.param(SIX_HOURS, 21_600, id="from 6 hours"),
        pytest.param(HOURS, 3600, id="from hours"),
        pytest.param(MINUTES, 60, id="from minutes"),
    ],
)
def test_rollups_give_the_sums_of_the_readings(replicas, router, window, resolution_s):
    some_hours(replicas, router)
    before = all_sums(replicas, window)
    assert read_from(window) == {None}

    rolled = roll(hours=6.5 if window is SIX_HOURS else 5)

    assert rolled.behind_s == 0
    assert read_from(window) == {resolution_s}
    assert all_sums(replicas, window) == before


def test_bins_that_are_not_rolled_up_yet_are_read_from_finer_bins_and_readings(replicas, router):
    some_hours(replicas, router)
    before = all_sums(replicas, HOURS)

    roll(hours=3 + 7.5 / 60)

    assert [part.resolution_s for part in spans_of(HOURS)] == [3600, 300, 60, None]
    assert all_sums(replicas, HOURS) == before


def test_a_second_run_changes_nothing(replicas, router):
    some_hours(replicas, router)
    assert roll().bins == 299 + 59 + 4  # the last minute of five hours is not over for long enough

    before = all_rows()
    assert (roll().bins, roll().repaired) == (0, 0)
    assert all_rows() == before


def all_rows():
    with connection.cursor() as cursor:
        rows = []
        for tables in TABLES.values():
            for table in tables:
                cursor.execute(f"select * from {table} order by 1, 2, 3, 4, 5, 6")
                rows.append(cursor.fetchall())
    return rows


def test_a_late_reading_is_in_every_resolution_after_the_next_run(replicas, router):
    some_hours(replicas, router)
    roll()

    engine_reading(replicas[0], at(61, 30), queries=5000, hits=5000, ttft={0: 7})
    assert list(RollupRepair.objects.values_list("resolution_s", "at")) == [(60, at(62))]
    assert roll().repaired == 3

    assert not RollupRepair.objects.exists()
    late = all_sums(replicas, HOURS)
    assert read_from(HOURS) == {3600}
    RollupState.objects.all().delete()  # as if nothing were rolled up
    assert all_sums(replicas, HOURS) == late
    assert late["engines"][1].hits >= 5000


@pytest.mark.django_db(transaction=True)
def test_an_uncommitted_reading_is_in_its_bin_or_marks_it_again(replicas, router):
    some_hours(replicas, router)
    roll()
    engine_reading(replicas[0], at(61, 30), queries=5000, hits=5000)  # marks the minute

    is_closed, is_stored = Event(), Event()

    def close_and_wait(through):
        close(through)
        is_closed.set()
        assert is_stored.wait(20)

    with patch("telemetry.storage.rollup.close", close_and_wait), ThreadPoolExecutor(1) as beside:
        rolled = beside.submit(at_once, roll)
        assert is_closed.wait(20)
        with transaction.atomic():
            engine_reading(replicas[0], at(61, 40), queries=7000, hits=7000)  # finds the mark
            is_stored.set()
            wait_until(lambda: waiting() or rolled.done(), 20, "the mark to be deleted")
    rolled.result(timeout=20)
    roll()

    assert not RollupRepair.objects.exists()
    late = all_sums(replicas, HOURS)
    assert read_from(HOURS) == {3600}
    RollupState.objects.all().delete()
    assert all_sums(replicas, HOURS) == late


def test_a_bin_whose_readings_were_dropped_stays_as_it_is(replicas, router):
    some_hours(replicas, router)
    roll()
    before = all_sums(replicas, HOURS)
    drop_before((T0 + timedelta(days=1)).date())
    engine_reading(replicas[0], at(61, 30), queries=5000, hits=5000)

    roll_up(T0 + timedelta(days=1), readings_retention_s=KEPT_S / 6)

    assert not RollupRepair.objects.exists()
    assert all_sums(replicas, HOURS) == before


def test_one_worker_at_a_time_rolls_up(replicas, router):
    some_hours(replicas, router)
    with connection.get_new_connection(connection.get_connection_params()) as other:
        other.execute("select pg_advisory_lock(%s)", [ROLLUP])
        assert roll() is None
        other.execute("select pg_advisory_unlock(%s)", [ROLLUP])

    assert roll().bins > 0


def test_a_worker_that_was_away_catches_up_run_by_run(replicas):
    engine_reading(replicas[0], at(1), queries=10, hits=1)
    engine_reading(replicas[0], at(60 * 12), queries=10, hits=1)
    runs = 0
    while (done := roll_up(at(60 * 13), readings_retention_s=KEPT_S, budget_s=0.05)).behind_s > 0:
        assert done.bins > 0
        runs += 1

    assert runs > 1
    (row,) = sums.engine_sums([replicas[0].pk], Window(T0, at(60 * 13), 3600), whole=True)
    assert (row.queries, row.hits) == (20, 2)


def test_late_histograms_of_a_removed_replica_count_for_the_pool_that_it_belonged_to(replicas, pool, time_machine):
    time_machine.move_to(at(180), tick=False)
    engine_reading(replicas[0], at(1), ttft={2: 5})
    roll()
    remove_replica(replicas[0])
    engine_reading(replicas[0], at(1, 30), ttft={2: 3})
    mark_late([at(1, 30)])
    roll()

    with connection.cursor() as cursor:
        cursor.execute(f"select pool, sum(counts[1]) from {histograms(60)} where kind = 'engine_ttft' group by pool")
        assert cursor.fetchall() == [(pool.name, 8)]


def test_partitions_of_rollups_are_days_and_months(replicas, router):
    some_hours(replicas, router)
    roll()

    assert partitions_of("telemetry_reading_1m") == ["telemetry_reading_1m_20310304"]
    assert partitions_of("telemetry_reading_1h") == ["telemetry_reading_1h_20310301"]
    assert drop_before((T0 + timedelta(days=20)).date(), TABLES[3600]) == []
    assert len(drop_before((T0 + timedelta(days=30)).date(), TABLES[3600])) == 3


def test_the_tables_have_the_listed_columns(db):
    """A column of the list must be in the tables."""
    with connection.cursor() as cursor:
        for rollup in SUMS:
            expected = {"at", *(name.strip('"') for name in rollup.key), *(column.name for column in rollup.columns)}
            for resolution_s in RESOLUTIONS_S:
                cursor.execute(f"select * from {rollup.table(resolution_s)} limit 0")
                assert {column.name for column in cursor.description} >= expected
        cursor.execute(f"select * from {histograms(60)} limit 0")
        assert len(cursor.description) == 9
    assert len({of.kind for of in BY_PART}) == len(BY_PART)


kinds = st.sampled_from(["traffic", "silence", "failed"])
scrapes = st.lists(st.tuples(st.integers(0, 3 * 3600 // 5), kinds, st.integers(0, 1)), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def large_chunks():
    """An example then takes few statements; the tests above use chunks of the usual size."""
    with patch.dict(CHUNK_BINS, {60: 300, 300: 60}):
        yield


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("large_chunks")
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(early=scrapes, late=scrapes, until_min=st.integers(30, 200))
def test_the_order_of_readings_and_rollups_changes_no_sum(replicas, early, late, until_min):
    """Late and duplicate readings, runs in between, and a window that ends anywhere."""
    with connection.cursor() as cursor:
        for table in ("telemetry_reading", *(table for tables in TABLES.values() for table in tables)):
            cursor.execute(f"delete from {table}")
    RollupState.objects.all().delete()
    RollupRepair.objects.all().delete()

    @stored_together()
    def store(scrapes):
        for place, kind, which in scrapes:
            due = at(0, 5 * place + 5)
            if kind == "failed":
                gap(replicas[which], due)
            else:
                count = place if kind == "traffic" else 0
                engine_reading(replicas[which], due, queries=count, hits=count // 2, ttft={place % 4: 1 + count})

    beside_the_grid = Window(at(1, 17), at(until_min, 31), 3600)  # a bin across two of its steps is told in one
    windows = [HOURS, MINUTES, beside_the_grid]

    def sums_of_all():
        sums = {name: found for name, found in all_sums(replicas, beside_the_grid).items() if name.endswith("whole")}
        return [all_sums(replicas, HOURS), all_sums(replicas, MINUTES), sums]

    store(early)
    roll(until_min / 60)
    store(late)
    store(early)
    roll()
    rolled = sums_of_all()
    RollupState.objects.all().delete()

    assert rolled == sums_of_all()
    assert rolled[2]
    assert all(part == Span(None, window.start, window.end) for window in windows for part in spans_of(window))
