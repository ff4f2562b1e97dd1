from datetime import UTC, date, datetime

import pytest
from django.db import connection

from telemetry.storage.partitions import drop_before, ensure_days, maintain

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


def test_a_reading_written_in_another_zone_lands_in_its_utc_day():
    ensure_days([date(2031, 3, 4)])
    with connection.cursor() as cursor:
        cursor.execute(
            "insert into telemetry_reading (at, replica_id, model, engine, state) values (%s, 1, '', '', 'stale')",
            ["2031-03-05 01:30+02:00"],
        )
        cursor.execute("select tableoid::regclass::text from telemetry_reading")
        assert cursor.fetchall() == [("telemetry_reading_20310304",)]
