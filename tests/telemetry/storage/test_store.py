"""Rows going in: by COPY, and rightly where something stands in its way."""

from datetime import timedelta

import pytest
from django.db import connection

from controlplane.services.fleet.replicas import add_replica
from telemetry.models import BucketLayout, Reading
from telemetry.storage.store import layout_ids
from tests.telemetry.conftest import T0
from tests.telemetry.readings import EDGES, engine_reading

pytestmark = pytest.mark.django_db


@pytest.fixture
def r1(pool):
    return add_replica(pool, name="r1", url="http://127.0.0.1:9101")


def test_a_reading_that_exists_stays_as_it_is(r1):
    engine_reading(r1, T0, queries=100, hits=50)
    engine_reading(r1, T0, queries=999, hits=999)

    assert list(Reading.objects.values_list("queries", "hits")) == [(100, 50)]


def test_a_day_without_a_table_gets_one_when_its_first_reading_comes(r1):
    far = T0 + timedelta(days=400)

    engine_reading(r1, far, queries=1, hits=0)

    assert Reading.objects.get().at == far


def test_unknown_and_nothing_observed_are_kept_apart(r1):
    engine_reading(r1, T0, queries=1, ttft={})
    engine_reading(r1, T0 + timedelta(seconds=5), queries=1)

    empty, unknown = Reading.objects.order_by("at")
    assert (empty.ttft_at, empty.ttft_counts, empty.first_tokens, empty.hits) == ([], [], 0, None)
    assert (unknown.ttft_at, unknown.ttft_counts, unknown.first_tokens) == (None, None, None)


def test_edges_are_kept_once(django_assert_num_queries):
    first = layout_ids({EDGES, (1.0, 2.0)})

    with django_assert_num_queries(1):
        assert layout_ids({EDGES, (1.0, 2.0)}) == first
    assert BucketLayout.objects.count() == 2


def test_a_replica_s_readings_outlive_its_row(r1):
    engine_reading(r1, T0, queries=1, hits=0)

    r1.delete()

    with connection.cursor() as cursor:
        cursor.execute("select count(*) from telemetry_reading")
        assert cursor.fetchone() == (1,)
