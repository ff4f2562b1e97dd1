from datetime import UTC, date, datetime, timedelta

import pytest
from django.db import connection

from controlplane.services.fleet.replicas import add_replica
from telemetry.metrics.windows import Window
from telemetry.models import RollupState
from telemetry.storage.partitions import drop_before, ensure_days, maintain
from telemetry.storage.rollup import roll_up
from telemetry.storage.sums import engine_sums
from tests.telemetry.readings import engine_reading

pytestmark = pytest.mark.django_db
NOON = datetime(2031, 3, 4, 12, tzinfo=UTC)


def partitions():
    with connection.cursor() as cursor:
        cursor.execute("select inhrelid::regclass::text from pg_inherits order by 1")
        return {row[0] for row in cursor.fetchall() if row[0].startswith("telemetry_")}


def test_today_and_the_days_ahead_have_a_table_for_each_kind_of_reading(no_days):
    made = set(maintain(NOON, retention_days=14, decisions_h=24, rollup_days={}).created)

    assert made >= {"telemetry_reading_20310304", "telemetry_reading_20310306", "telemetry_routerreading_20310305"}
    assert made <= partitions()


def test_a_second_run_changes_nothing():
    maintain(NOON, retention_days=14, decisions_h=24, rollup_days={})

    assert maintain(NOON, retention_days=14, decisions_h=24, rollup_days={}).created == []


def test_a_day_goes_when_its_retention_is_over_and_not_before():
    ensure_days([date(2031, 2, 17), date(2031, 2, 18)])

    dropped = drop_before(date(2031, 2, 18))

    assert "telemetry_reading_20310217" in dropped
    assert "telemetry_reading_20310218" in partitions()
    assert "telemetry_reading_20310217" not in partitions()


def test_readings_that_are_not_rolled_up_stay_after_their_time_but_for_a_week_at_most(pool):
    """Rollups stand still from an evening on, over midnight."""
    replica = add_replica(pool, name="r1", url="http://127.0.0.1:1")
    evening = datetime(2031, 3, 4, 23, 50, tzinfo=UTC)
    late = datetime(2031, 3, 4, 23, 58, tzinfo=UTC)
    engine_reading(replica, evening, queries=10, hits=5)
    roll_up(evening + timedelta(minutes=2), readings_kept_s=86_400)
    engine_reading(replica, late, queries=100, hits=50)

    def kept(days: int) -> bool:
        maintain(NOON + timedelta(days=days), retention_days=1, decisions_h=24, rollup_days={60: 2, 300: 60})
        return "telemetry_reading_20310304" in partitions()

    assert kept(days=3)
    roll_up(NOON + timedelta(days=3), readings_kept_s=86_400, budget_s=60)
    assert not kept(days=3)
    whole = Window(evening - timedelta(minutes=50), evening + timedelta(hours=1), 3600)
    (row,) = engine_sums([replica.pk], whole, whole=True)
    assert (row.queries, row.hits) == (110, 55)

    RollupState.objects.all().delete()  # as if nothing had ever been rolled up
    ensure_days([evening.date()])
    assert kept(days=8)
    assert not kept(days=9)


def test_a_reading_written_in_another_zone_lands_in_its_utc_day():
    ensure_days([date(2031, 3, 4)])
    with connection.cursor() as cursor:
        cursor.execute(
            "insert into telemetry_reading (at, replica_id, model, engine, state) values (%s, 1, '', '', 'stale')",
            ["2031-03-05 01:30+02:00"],
        )
        cursor.execute("select tableoid::regclass::text from telemetry_reading")
        assert cursor.fetchall() == [("telemetry_reading_20310304",)]
