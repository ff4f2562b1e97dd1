"""Ticks against real sockets: what is stored, what is not, and who waits for whom."""

import time
from datetime import timedelta

import pytest
from django.db import connection

from controlplane.models import Event, Replica, ReplicaState, Router
from controlplane.services.fleet.replicas import add_replica
from controlplane.services.snapshots import newest_snapshot
from telemetry import tasks
from telemetry.models import Reading, RouterReading, ScrapeShard, ScrapeState
from telemetry.scraping import record
from telemetry.scraping.shards import Shard
from telemetry.scraping.tick import scrape_shard
from telemetry.services.own.lag import scrape_lag_s, scrape_lags
from telemetry.storage.locks import SCRAPE
from tests.fakes.fake_metrics_server import endless, hang, refusing, silent, status, text, torn
from tests.side_by_side import alone
from tests.telemetry.conftest import T0
from tests.telemetry.expositions import replica_text, router_text

pytestmark = pytest.mark.django_db
WHOLE = Shard(0, 1)  # a small fleet's only one


def tick(number: int):
    return scrape_shard(WHOLE, (T0 + timedelta(seconds=5 * number)).timestamp())


def replica(pool, server, name, *answers) -> Replica:
    return add_replica(pool, name=name, url=server.script(f"/{name}/metrics", *answers))


def kinds():
    return list(
        Event.objects.filter(kind__startswith="replica_")
        .exclude(kind="replica_added")
        .order_by("pk")
        .values_list("kind", flat=True)
    )


def test_the_second_scrape_stores_what_was_added_since_the_first(pool, metrics_server):
    replica(
        pool,
        metrics_server,
        "r1",
        text(replica_text(1000, 100)),
        text(replica_text(1500, 400, running=3.0, finished=2)),
    )

    tick(0)
    tick(1)

    first, second = Reading.objects.order_by("at")
    assert (first.state, first.queries, first.interval_s) == ("first", None, None)
    assert (second.state, second.queries, second.hits, second.finished) == ("ok", 500, 300, 2)
    assert (second.model, second.engine, second.running) == ("tiny", "0", 3.0)
    assert second.at == T0 + timedelta(seconds=5)


def test_one_task_delivered_twice_stores_one_reading(pool, metrics_server):
    replica(
        pool,
        metrics_server,
        "r1",
        text(replica_text(1000, 100)),
        text(replica_text(1500, 400)),
        text(replica_text(9999, 400)),
    )

    tick(0)
    tick(1)
    tick(1)

    assert list(Reading.objects.order_by("at").values_list("queries", flat=True)) == [None, 500]


def test_a_failed_scrape_leaves_a_gap_and_the_next_one_keeps_the_totals(pool, metrics_server):
    replica(pool, metrics_server, "r1", text(replica_text(1000, 100)), status(500), text(replica_text(1800, 500)))

    for number in range(3):
        tick(number)

    states = list(Reading.objects.order_by("at").values_list("state", "queries", "hits"))
    assert states == [("first", None, None), ("stale", None, None), ("gap", 800, 400)]  # H10, H12


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(torn(replica_text(1200, 100) * 50), id="torn"),
        pytest.param(text("<html>not found</html>\n", "text/html"), id="wrong content"),
        pytest.param(text(replica_text(1200, 100).rstrip("\n")), id="cut inside the last line"),
        pytest.param(text(replica_text("NaN", 100)), id="NaN"),
        pytest.param(text(replica_text(-5, 100)), id="negative"),
        pytest.param(text("# nothing\n" * 10), id="no samples"),
        pytest.param(text("x 1\n" * 10_001), id="too many series"),
        pytest.param(text(replica_text(1200, 100, model="m" * 300)), id="too long a label"),
        pytest.param(endless(), id="endless"),
        pytest.param(status(302, "/r1/metrics"), id="redirect"),
    ],
)
def test_what_cannot_be_trusted_is_stale_and_touches_no_total(pool, metrics_server, answer):
    replica(pool, metrics_server, "r1", text(replica_text(1000, 100)), answer, text(replica_text(1500, 400)))

    for number in range(3):
        tick(number)

    rows = list(Reading.objects.order_by("at").values_list("state", "queries"))
    assert rows == [("first", None), ("stale", None), ("gap", 500)]  # R19, S8
    assert kinds() == ["replica_changed"]  # it told its cache; nothing went down


@alone
def test_a_slow_replica_delays_nobody_s_reading(pool, metrics_server, settings):
    """R20, with an interval short enough for a test."""
    settings.SCRAPE_INTERVAL_S = 2.0
    replica(pool, metrics_server, "slow", hang())
    for number in range(20):
        replica(pool, metrics_server, f"r{number}", text(replica_text(1, 0)))

    done = scrape_shard(WHOLE, T0.timestamp())

    assert (done.scrapes, done.failures) == (21, 1)
    assert done.elapsed_s < 2.0
    lags = ScrapeState.objects.exclude(replica__name="slow").values_list("lag_s", flat=True)
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


def test_a_replica_that_nobody_listens_for_is_down_at_once_and_told_once(pool, metrics_server):
    r1 = replica(pool, metrics_server, "r1", text(replica_text(1000, 100, facts=False)))
    tick(0)
    with refusing() as port:
        Replica.objects.filter(pk=r1.pk).update(url=f"http://127.0.0.1:{port}")
        tick(1)
        tick(2)
    Replica.objects.filter(pk=r1.pk).update(url=f"{metrics_server.url}/r1")
    tick(3)
    tick(4)

    assert kinds() == ["replica_down", "replica_up"]


def test_one_failure_is_no_reason_to_call_a_replica_down(pool, metrics_server):
    good = text(replica_text(1000, 100, facts=False))
    replica(pool, metrics_server, "r1", good, status(503), good, status(503), status(503), good)
    healths = []
    for number in range(6):
        tick(number)
        healths.append(ScrapeState.objects.get().health)

    assert healths == ["up", "up", "up", "up", "down", "up"]
    assert kinds() == ["replica_down", "replica_up"]


@pytest.mark.parametrize("started", [(None, None), (1000.0, 2000.0)], ids=["by a fallen counter", "by the start time"])
def test_a_restart_is_told_once_and_counted_from_zero(pool, metrics_server, started):
    fallen = started[0] is None
    after = (500, 100) if fallen else (1200, 900)
    replica(
        pool,
        metrics_server,
        "r1",
        text(replica_text(1000, 800, started=started[0], facts=False)),
        text(replica_text(*after, started=started[1], facts=False)),
        text(replica_text(after[0] + 100, after[1], started=started[1], facts=False)),
    )
    for number in range(3):
        tick(number)

    rows = list(Reading.objects.order_by("at").values_list("state", "queries", "hits"))
    assert rows == [("first", None, None), ("reset", *after), ("ok", 100, 0)]  # H8, H9
    assert kinds() == ["replica_restarted"]


def test_the_cache_s_size_is_recorded_without_the_null_block(pool, metrics_server):
    r1 = replica(pool, metrics_server, "r1", text(replica_text(1, 0, blocks=2049, block_size=32)))

    tick(0)
    tick(1)

    r1.refresh_from_db()
    assert (r1.block_tokens, r1.capacity_blocks) == (32, 2048)
    assert kinds() == ["replica_changed"]


def test_what_a_new_fleet_tells_of_its_caches_is_one_configuration_and_an_event_each(pool, metrics_server):
    for number in range(5):
        replica(pool, metrics_server, f"r{number}", text(replica_text(1, 0, blocks=2049)))
    before = newest_snapshot().number

    tick(0)

    assert newest_snapshot().number == before + 1
    assert set(Replica.objects.values_list("capacity_blocks", flat=True)) == {2048}
    assert kinds() == ["replica_changed"] * 5


def test_a_disabled_replica_is_left_alone(pool, metrics_server):
    r1 = replica(pool, metrics_server, "r1", text(replica_text(1, 0)))
    Replica.objects.filter(pk=r1.pk).update(state=ReplicaState.DISABLED)

    assert tick(0).scrapes == 0
    assert metrics_server.seen == {}


def router(server, *answers) -> Router:
    url = server.script("/router/metrics", *answers)
    return Router.objects.create(name="router-1", admin_url=url, boot="b1", last_seen_at=T0)


def test_a_router_s_label_set_that_is_new_in_its_boot_counts_from_zero(pool, metrics_server):
    """A router makes a label set when it first counts under it."""
    router(
        metrics_server,
        text(router_text()),
        text(
            router_text(
                {
                    "requests": {"ok": 5, "replica_error": 1},
                    "usage_reported": 5,
                    "prompt_tokens": 900,
                    "cached_tokens": 600,
                    "ttft": {10: 2, 200: 3},
                }
            )
        ),
        text(
            router_text(
                {
                    "requests": {"ok": 5, "replica_error": 1},
                    "usage_reported": 5,
                    "prompt_tokens": 900,
                    "cached_tokens": 600,
                    "ttft": {10: 2, 200: 3},
                }
            )
        ),
    )
    for number in range(3):
        tick(number)

    counted = RouterReading.objects.exclude(pool="").order_by("policy")
    ttft, requests = counted
    assert (requests.requests, requests.ok_requests, requests.replica_error_requests) == (6, 5, 1)
    assert (requests.prompt_tokens, requests.cached_tokens, requests.cacheable_tokens) == (900, 600, None)
    assert (ttft.policy, ttft.ttft_at, ttft.ttft_counts) == ("", [10, 200], [2, 3])
    states = RouterReading.objects.filter(pool="").order_by("at").values_list("state", flat=True)
    assert list(states) == ["first", "ok", "ok"]


def test_the_ttft_of_a_revision_on_trial_is_a_row_of_its_own(pool, metrics_server):
    def counted(number):
        arms = ({"revision": 1, "policy_ttft": {10: 4 * number}}, {"revision": 2, "policy_ttft": {12: number}})
        return text(router_text({"ttft": {10: 4 * number, 12: number}}, *arms))

    router(metrics_server, *map(counted, (1, 2, 4)))
    for number in range(3):
        tick(number)

    rows = RouterReading.objects.filter(pool="chat", replica="").order_by("at", "revision")
    assert [(row.group, row.policy, row.revision, row.ttft_at, row.ttft_counts) for row in rows] == [
        ("", "chat", 1, [10], [4]),
        ("", "chat", 2, [12], [1]),
        ("", "chat", 1, [10], [8]),
        ("", "chat", 2, [12], [2]),
    ]


def test_a_router_s_new_boot_counts_from_zero(pool, metrics_server):
    before = router_text({"requests": {"ok": 5}}, boot="b1")
    router(metrics_server, text(before), text(router_text({"requests": {"ok": 7}}, boot="b2")))

    tick(0)
    tick(1)

    reading = RouterReading.objects.get(pool="chat")
    assert (reading.state, reading.requests) == ("reset", 7)


def test_requests_refused_before_a_pool_was_known_stay_with_the_router_itself(pool, metrics_server):
    nowhere = {"pool": "", "replica": "", "policy": "", "revision": ""}
    router(
        metrics_server,
        text(router_text({**nowhere, "requests": {"client_error": 1}})),
        text(router_text({**nowhere, "requests": {"client_error": 4}})),
    )
    tick(0)
    tick(1)

    reading = RouterReading.objects.latest("at")
    assert (reading.pool, reading.state, reading.requests) == ("", "ok", 3)


def test_a_tick_of_64_targets_costs_a_bounded_number_of_queries(pool, metrics_server, django_assert_max_num_queries):
    for number in range(64):
        replica(pool, metrics_server, f"r{number}", text(replica_text(1, 0, facts=False)))
    tick(0)
    before = time.process_time()
    with django_assert_max_num_queries(60):  # 7 a batch
        tick(1)
    assert Reading.objects.filter(state="ok").count() == 64
    assert (time.process_time() - before) / 64 < 0.1  # seconds of CPU; README has the measured figure


def test_predictions_spills_and_ttft_by_reuse_of_a_router_are_stored(pool, metrics_server):
    """H17"""
    before = {"requests": {("hit", "ok"): 5}, "usage_reported": 5, "prompt_tokens": 500, "cached_tokens": 100}
    after = {
        "requests": {("hit", "ok"): 7, ("spill", "ok"): 2, ("all_full", "replica_error"): 1},
        "usage_reported": 8,
        "prompt_tokens": 900,
        "cached_tokens": 400,
        "predicted_answers": 3,
        "predicted_prompt_tokens": 400,
        "predicted_tokens": 350,
        "predicted_cached_tokens": 300,
        "hit_ttft": {3: 2},
        "miss_ttft": {90: 1},
    }
    router(metrics_server, text(router_text(before)), text(router_text(after)))

    tick(0)
    tick(1)

    counted = RouterReading.objects.get(policy="chat")
    assert (counted.requests, counted.spilled_requests, counted.predicted_answers) == (5, 3, 3)
    assert (counted.predicted_prompt_tokens, counted.predicted_tokens, counted.predicted_cached_tokens) == (
        400,
        350,
        300,
    )
    by_reuse = RouterReading.objects.exclude(reuse="").order_by("reuse").values_list("reuse", "replica", "ttft_counts")
    assert list(by_reuse) == [("hit", "", [2]), ("miss", "", [1])]


def test_spills_are_unknown_where_placing_knows_no_home(pool, metrics_server):
    router(
        metrics_server,
        text(router_text({"requests": {("round_robin", "ok"): 5}})),
        text(router_text({"requests": {("round_robin", "ok"): 9}})),
    )

    tick(0)
    tick(1)

    assert RouterReading.objects.get(policy="chat").spilled_requests is None


def test_spills_of_before_they_were_counted_do_not_come_at_once(pool, metrics_server):
    router(
        metrics_server,
        *(text(router_text({"requests": {("spill", "ok"): count}})) for count in (1000, 1004, 1009)),
    )
    tick(0)
    state = ScrapeState.objects.get()
    for source in state.marks["sources"]:
        source["counters"].pop("spilled_requests", None)
    state.save()

    tick(1)
    tick(2)

    spilled = RouterReading.objects.filter(policy="chat").order_by("at").values_list("requests", "spilled_requests")
    assert list(spilled) == [(4, None), (5, 5)]


def test_what_an_engine_does_not_report_is_named_and_a_gap_names_nothing(pool, metrics_server):
    short = "".join(line for line in replica_text(10, 5).splitlines(keepends=True) if "prefix_cache_hits" not in line)
    replica(pool, metrics_server, "r1", text(replica_text(5, 2, ttft=(1, 0, 0, 0, 0))), text(short), status(500))

    for number in range(3):
        tick(number)

    first, second, third = Reading.objects.order_by("at")
    assert "hits" not in first.not_reported
    assert "ttft" not in first.not_reported
    assert {"hits", "ttft", "itl", "device_tokens", "preemptions"} <= set(second.not_reported)
    assert "queries" not in second.not_reported
    assert (second.queries, second.hits) == (5, None)
    assert third.not_reported is None


@pytest.mark.parametrize(
    "hostile",
    [
        replica_text(1e308, 0),
        replica_text(1e18, 0),
        replica_text(10, 5, engine="a\0b"),
        "".join(replica_text(10, 5, engine=str(number), facts=False) for number in range(257)),
        replica_text(10, 5, running=1e308, usage=-1e308),
        replica_text(10, 5, blocks=2**39, block_size=2**39),
    ],
)
def test_what_one_replica_says_costs_no_other_its_reading(pool, metrics_server, hostile):
    replica(pool, metrics_server, "bad", text(hostile))
    good = replica(pool, metrics_server, "good", text(replica_text(1000, 100)), text(replica_text(1500, 400)))

    tick(0)
    tick(1)

    assert list(Reading.objects.filter(replica=good).order_by("at").values_list("queries", flat=True)) == [None, 500]


def test_a_reading_that_the_database_refuses_costs_no_other_one(pool, metrics_server, monkeypatch, caplog):
    rows = record.engine_row

    def spoilt(replica_id, *arguments):
        row = rows(replica_id, *arguments)
        return row if replica_id != bad.pk else (*row[:2], "a\0b", *row[3:])

    bad = replica(pool, metrics_server, "bad", text(replica_text(1000, 100)))
    good = replica(pool, metrics_server, "good", text(replica_text(1000, 100)))
    monkeypatch.setattr(record, "engine_row", spoilt)

    tick(0)

    assert [reading.replica_id for reading in Reading.objects.all()] == [good.pk]
    assert "what bad says cannot be stored" in caplog.text


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
    assert done.elapsed_s < 2.8


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
    lags = {lag.number: lag for lag in scrape_lags(T0 + timedelta(seconds=20))}
    assert [lags[number].lag_s > 10 for number in range(3)] == [False, True, False]
    assert scrape_lag_s(T0 + timedelta(seconds=20)) == lags[1].lag_s

    assert scrape_shard(shards[1], T0.timestamp() + 24) is not None
    assert [lag.missed for lag in scrape_lags(T0 + timedelta(seconds=25))] == [0, 3, 0]
    assert [lag.targets for lag in scrape_lags(T0)] == [tick.scrapes for tick in ticks]


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
