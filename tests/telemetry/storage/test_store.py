"""Storing readings and their partitions, also while other readings arrive or queries run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta

import pytest
from django.db import connection

from telemetry.metrics.windows import Window
from telemetry.models import BucketLayout, Reading, RollupState
from telemetry.storage.partitions import drop_before, ensure_days, maintain, partitions_of
from telemetry.storage.rollup import roll_up
from telemetry.storage.store import layout_ids
from telemetry.storage.sums import engine_sums, engine_ttft, router_ttft
from tests.telemetry.conftest import T0
from tests.telemetry.readings import EDGES, engine_reading, route_reading
from tests.telemetry.stored_decisions import a_router

pytestmark = pytest.mark.django_db
WINDOW = Window(T0, T0 + timedelta(seconds=60), 60.0)
AT = T0 + timedelta(seconds=5)


def test_an_existing_reading_stays_as_it_is(r1):
    engine_reading(r1, T0, queries=100, hits=50)
    engine_reading(r1, T0, queries=999, hits=999)

    assert list(Reading.objects.values_list("queries", "hits")) == [(100, 50)]


def test_unknown_and_nothing_observed_are_different(r1):
    engine_reading(r1, T0, queries=1, ttft={})
    engine_reading(r1, AT, queries=1)

    empty, unknown = Reading.objects.order_by("at")
    assert (empty.ttft_at, empty.ttft_counts, empty.first_tokens, empty.hits) == ([], [], 0, None)
    assert (unknown.ttft_at, unknown.ttft_counts, unknown.first_tokens) == (None, None, None)


def test_bucket_layouts_are_stored_once(django_assert_num_queries):
    first = layout_ids({EDGES, (1.0, 2.0)})

    with django_assert_num_queries(1):
        assert layout_ids({EDGES, (1.0, 2.0)}) == first
    assert BucketLayout.objects.count() == 2


def test_a_missing_partition_is_created_and_a_replica_s_readings_outlive_its_row(r1):
    far = T0 + timedelta(days=400)
    engine_reading(r1, far, queries=1, hits=0)

    r1.delete()

    assert list(Reading.objects.values_list("at", flat=True)) == [far]


@contextmanager
def stored_meanwhile(store: Callable[[], None]) -> Iterator[None]:
    """Store something right before the query for histograms, after all earlier queries."""
    waiting = [store]

    def before(execute, sql, params, many, context):
        if "unnest(" in sql and waiting:
            waiting.pop()()
        return execute(sql, params, many, context)

    with connection.execute_wrapper(before):
        yield
    assert not waiting


def test_a_reading_with_new_edges_may_arrive_while_an_engine_s_histograms_are_queried(r1):
    with stored_meanwhile(lambda: engine_reading(r1, AT, ttft={1: 3}, edges=(0.25, 7.0))):
        found = engine_ttft([r1.pk], WINDOW)
    assert [(merged.buckets.edges, merged.buckets.counts) for merged in found.values()] == [((0.25, 7.0), {1: 3})]


@pytest.mark.parametrize("by", [None, "group", "replica"])
def test_the_first_reading_may_arrive_while_routers_histograms_are_queried(pool, by):
    router = a_router()
    with stored_meanwhile(lambda: route_reading(router, AT, group="coding", ttft={4: 2})):
        found = [merged.buckets.counts for merged in router_ttft(None, WINDOW, by=by).values()]
    assert found == [{4: 2}]


NOON = datetime(2031, 3, 4, 12, tzinfo=UTC)
DEFAULTS = {"retention_days": 14, "decisions_h": 24, "rollup_days": {}}


def test_maintenance_creates_the_tables_of_today_and_the_days_ahead_once(no_days):
    created = set(maintain(NOON, **DEFAULTS).created)

    assert created >= {"telemetry_reading_20310304", "telemetry_reading_20310306", "telemetry_routerreading_20310305"}
    assert set(partitions_of("telemetry_reading")) <= created
    assert maintain(NOON, **DEFAULTS).created == []


def test_a_day_is_dropped_after_its_retention():
    ensure_days([date(2031, 2, 17), date(2031, 2, 18)])

    assert "telemetry_reading_20310217" in drop_before(date(2031, 2, 18))

    left = partitions_of("telemetry_reading")
    assert "telemetry_reading_20310218" in left
    assert "telemetry_reading_20310217" not in left


def test_readings_that_are_not_rolled_up_are_retained_for_a_week_more(r1):
    """Rollups stop in the evening and continue after midnight."""
    evening = datetime(2031, 3, 4, 23, 50, tzinfo=UTC)
    late = datetime(2031, 3, 4, 23, 58, tzinfo=UTC)
    engine_reading(r1, evening, queries=10, hits=5)
    roll_up(evening + timedelta(minutes=2), readings_retention_s=86_400)
    engine_reading(r1, late, queries=100, hits=50)

    def is_retained(days: int) -> bool:
        maintain(NOON + timedelta(days=days), retention_days=1, decisions_h=24, rollup_days={60: 2, 300: 60})
        return "telemetry_reading_20310304" in partitions_of("telemetry_reading")

    assert is_retained(days=3)
    roll_up(NOON + timedelta(days=1), readings_retention_s=86_400, budget_s=60)
    assert not is_retained(days=3)
    whole = Window(evening - timedelta(minutes=50), evening + timedelta(hours=1), 3600)
    (row,) = engine_sums([r1.pk], whole, whole=True)
    assert (row.queries, row.hits) == (110, 55)

    RollupState.objects.all().delete()  # as if nothing had ever been rolled up
    ensure_days([evening.date()])
    assert is_retained(days=8)
    assert not is_retained(days=9)
