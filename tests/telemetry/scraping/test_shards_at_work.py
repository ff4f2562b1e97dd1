"""Many replicas and several shards: who waits for whom, and who does not."""

import time
from datetime import timedelta

import pytest
from django.db import connection

from controlplane.models import Replica
from controlplane.services.fleet.replicas import add_replica
from telemetry import tasks
from telemetry.models import Reading, ScrapeShard, ScrapeState
from telemetry.scraping.cycle import Shard, scrape_shard
from telemetry.services.self_monitoring import shard_lag_s
from telemetry.storage.locks import SCRAPE
from tests.fakes.fake_metrics_server import hang, silent, text
from tests.pace import is_within
from tests.side_by_side import alone
from tests.telemetry.conftest import T0
from tests.telemetry.expositions import replica_text
from tests.telemetry.scraping.ticks import WHOLE, replica, tick

pytestmark = pytest.mark.django_db


@alone
def test_a_slow_replica_delays_nobody_s_reading(pool, metrics_server, settings):
    """R20, with an interval short enough for a test."""
    settings.SCRAPE_INTERVAL_S = 2.0
    replica(pool, metrics_server, "slow", hang())
    for number in range(20):
        replica(pool, metrics_server, f"r{number}", text(replica_text(1, 0)))

    done = scrape_shard(WHOLE, T0.timestamp())

    assert (done.scrapes, done.failures) == (21, 1)
    assert is_within(done.elapsed_s, 2.0)
    lags = ScrapeState.objects.exclude(replica__name="slow").values_list("duration_s", flat=True)
    assert len(lags) == 20
    assert Reading.objects.get(replica__name="slow").state == "stale"


def test_a_tick_is_left_out_while_another_one_runs(pool, metrics_server):
    replica(pool, metrics_server, "r1", text(replica_text(1, 0)))
    with connection.get_new_connection(connection.get_connection_params()) as other:
        other.execute("select pg_advisory_lock(%s)", [SCRAPE])

        assert tick(0) is None
        assert not Reading.objects.exists()

        other.execute("select pg_advisory_unlock(%s)", [SCRAPE])
        assert tick(0) is not None


def test_a_tick_of_64_targets_costs_a_bounded_number_of_queries(pool, metrics_server, django_assert_max_num_queries):
    for number in range(64):
        replica(pool, metrics_server, f"r{number}", text(replica_text(1, 0, facts=False)))
    tick(0)
    before = time.process_time()
    with django_assert_max_num_queries(60):  # 7 a batch
        tick(1)
    assert Reading.objects.filter(state="ok").count() == 64
    assert (time.process_time() - before) / 64 < 0.1  # seconds of CPU; README has the measured figure


@alone
def test_half_a_large_fleet_that_hangs_does_not_make_a_tick_longer(pool, metrics_server, settings):
    settings.SCRAPE_INTERVAL_S = 2  # so a scrape has 1.6 s
    base = metrics_server.url
    for number in range(3):
        metrics_server.script(f"/{number}/metrics", text(replica_text(10, 5)))
    with silent() as port:
        hung = [Replica(pool=pool, name=f"h{n}", url=f"http://127.0.0.1:{port}/h{n}") for n in range(150)]
        good = [Replica(pool=pool, name=f"g{n}", url=f"{base}/{n}") for n in range(3)]
        Replica.objects.bulk_create([*hung, *good])

        done = tick(0)

    assert (done.scrapes, done.failures) == (153, 150)
    assert is_within(done.elapsed_s, 2.8)


def test_a_late_shard_hides_no_other(pool, metrics_server):
    """One shard's lock is held, as by a tick that hangs; the others go on, and the figures say which one is late."""
    shards = [Shard(number, 3) for number in range(3)]
    for number in range(12):
        replica(pool, metrics_server, f"r{number}", text(replica_text(1, 0, facts=False)))
    ticks = [scrape_shard(shard, T0.timestamp() + 4) for shard in shards]
    assert sum(done.scrapes for done in ticks) == 12

    with connection.get_new_connection(connection.get_connection_params()) as other:
        other.execute("select pg_advisory_lock(%s)", [SCRAPE + 1])
        for second in (9, 14, 19):
            done = [scrape_shard(shard, T0.timestamp() + second) for shard in shards]
            assert [tick is None for tick in done] == [False, True, False]
        other.execute("select pg_advisory_unlock(%s)", [SCRAPE + 1])  # a backend ends a while after its connection
    rows = ScrapeShard.objects.order_by("number")
    assert [shard_lag_s(row, T0 + timedelta(seconds=20)) > 10 for row in rows] == [False, True, False]

    assert scrape_shard(shards[1], T0.timestamp() + 24) is not None
    assert [row.missed for row in rows.all()] == [0, 3, 0]
    assert [row.targets for row in rows.all()] == [tick.scrapes for tick in ticks]


def test_a_large_fleet_s_shards_are_told_to_the_workers_and_a_small_one_is_scraped_at_once(
    pool, metrics_server, settings, monkeypatch
):
    told = []
    monkeypatch.setattr(tasks.scrape_shard, "apply_async", lambda args, **options: told.append((args, options)))
    url = metrics_server.script("/r/metrics", text(replica_text(1, 0, facts=False)))
    add_replica(pool, name="first", url=url)
    tasks.scrape_fleet()
    assert (Reading.objects.count(), told) == (1, [])

    Replica.objects.bulk_create(Replica(pool=pool, name=f"r{number}", url=f"{url}/{number}") for number in range(300))
    tasks.scrape_fleet()
    assert {args for args, _ in told} == {(number, 3) for number in range(3)}
    dues = [options["eta"] for _, options in told]
    assert dues == sorted(dues)
    assert all(due < options["expires"] for due, (_, options) in zip(dues, told, strict=True))

    Replica.objects.exclude(name="first").delete()
    ScrapeShard.objects.create(number=2, due_at=T0, lag_s=0)
    tasks.scrape_fleet()
    assert list(ScrapeShard.objects.values_list("number", flat=True)) == [0]  # no shard is late that is no more


def test_a_target_that_two_shards_hold_while_a_fleet_grows_is_counted_once(pool, metrics_server):
    replica(
        pool,
        metrics_server,
        "r1",
        text(replica_text(1000, 0)),
        text(replica_text(1500, 0)),
        text(replica_text(1700, 0)),
    )
    mine = next(shard for shard in (Shard(0, 2), Shard(1, 2)) if shard.holds(f"replica {Replica.objects.get().pk}"))

    scrape_shard(WHOLE, T0.timestamp())
    scrape_shard(mine, T0.timestamp() + 5)
    scrape_shard(WHOLE, T0.timestamp() + 10)

    assert sum(queries or 0 for queries in Reading.objects.values_list("queries", flat=True)) == 700
