"""Many replicas and several shards: targets and shards that hang delay no others."""

import time
from datetime import timedelta

import pytest
from django.db import connection

from controlplane.models import Replica
from controlplane.services.snapshots import single_snapshot
from telemetry import tasks
from telemetry.models import Reading, ScrapeShard
from telemetry.scraping.cycle import Shard, scrape_shard
from telemetry.services.self_monitoring import shard_lag_s
from telemetry.storage.locks import SCRAPE
from tests.fakes.fake_metrics_server import silent, text
from tests.pace import is_within
from tests.side_by_side import alone
from tests.telemetry.conftest import T0
from tests.telemetry.expositions import replica_text
from tests.telemetry.scraping.cycles import replica, run_cycle

pytestmark = pytest.mark.django_db
TEXT = replica_text(1, 0, facts=False)


def other_connection():
    return connection.get_new_connection(connection.get_connection_params())


def test_a_cycle_is_skipped_while_another_one_runs(pool, metrics_server):
    replica(pool, metrics_server, "r1", TEXT)
    with other_connection() as other:
        other.execute("select pg_advisory_lock(%s)", [SCRAPE])

        assert run_cycle(0) is None
        assert not Reading.objects.exists()

        other.execute("select pg_advisory_unlock(%s)", [SCRAPE])
        assert run_cycle(0) is not None


def test_a_cycle_of_64_targets_costs_a_bounded_number_of_queries(pool, metrics_server, django_assert_max_num_queries):
    with single_snapshot(reason="a fleet"):
        for number in range(64):
            replica(pool, metrics_server, f"r{number}", TEXT)
    run_cycle(0)
    before = time.process_time()
    with django_assert_max_num_queries(60):  # 7 a batch
        run_cycle(1)
    assert Reading.objects.filter(state="ok").count() == 64
    assert (time.process_time() - before) / 64 < 0.1  # seconds of CPU; README has the measured figure


@alone
def test_half_a_large_fleet_that_hangs_does_not_make_a_cycle_longer(pool, metrics_server, settings):
    """With an interval short enough for a test."""
    settings.SCRAPE_INTERVAL_S = 2  # so a scrape has 1.6 s
    with silent() as port:
        hung = [Replica(pool=pool, name=f"h{n}", url=f"http://127.0.0.1:{port}/h{n}") for n in range(150)]
        Replica.objects.bulk_create(hung)
        for number in range(3):
            replica(pool, metrics_server, f"g{number}", TEXT)

        cycle = run_cycle(0)

    assert (cycle.scrapes, cycle.failures) == (153, 150)
    assert is_within(cycle.elapsed_s, 2.8)
    assert set(Reading.objects.filter(replica__name__startswith="g").values_list("state", flat=True)) == {"first"}


def test_a_late_shard_delays_no_other_and_its_lag_is_recorded(pool, metrics_server):
    shards = [Shard(number, 3) for number in range(3)]
    for number in range(12):
        replica(pool, metrics_server, f"r{number}", TEXT)
    cycles = [scrape_shard(shard, T0.timestamp() + 4) for shard in shards]
    assert sum(cycle.scrapes for cycle in cycles) == 12

    with other_connection() as other:  # holds a shard's lock, as a cycle that hangs would
        other.execute("select pg_advisory_lock(%s)", [SCRAPE + 1])
        for second in (9, 14, 19):
            done = [scrape_shard(shard, T0.timestamp() + second) for shard in shards]
            assert [cycle is None for cycle in done] == [False, True, False]
        other.execute("select pg_advisory_unlock(%s)", [SCRAPE + 1])  # a backend ends a while after its connection
    rows = ScrapeShard.objects.order_by("number")
    assert [shard_lag_s(row, T0 + timedelta(seconds=20)) > 10 for row in rows] == [False, True, False]

    assert scrape_shard(shards[1], T0.timestamp() + 24) is not None
    assert [row.missed for row in rows.all()] == [0, 3, 0]
    assert [row.targets for row in rows.all()] == [cycle.scrapes for cycle in cycles]


def test_shards_of_a_large_fleet_are_scheduled_and_a_small_fleet_is_scraped_at_once(
    pool, metrics_server, settings, monkeypatch
):
    scheduled = []
    monkeypatch.setattr(tasks.scrape_shard, "apply_async", lambda args, **options: scheduled.append((args, options)))
    first = replica(pool, metrics_server, "first", text(TEXT))
    tasks.scrape_fleet()
    assert (Reading.objects.count(), scheduled) == (1, [])

    added = [Replica(pool=pool, name=f"r{number}", url=f"{first.url}/{number}") for number in range(300)]
    Replica.objects.bulk_create(added)
    tasks.scrape_fleet()
    assert {args for args, _ in scheduled} == {(number, 3) for number in range(3)}
    due_times = [options["eta"] for _, options in scheduled]
    assert due_times == sorted(due_times)
    assert all(options["eta"] < options["expires"] for _, options in scheduled)

    Replica.objects.exclude(name="first").delete()
    ScrapeShard.objects.create(number=2, due_at=T0, lag_s=0)
    tasks.scrape_fleet()
    assert list(ScrapeShard.objects.values_list("number", flat=True)) == [0]  # a removed shard is not late
