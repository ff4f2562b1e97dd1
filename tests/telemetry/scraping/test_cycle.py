"""Scrape cycles over real sockets: which counters of a replica are stored."""

from datetime import timedelta

import pytest

from telemetry.models import Reading
from telemetry.scraping import record
from tests.fakes.fake_metrics_server import endless, status, text, torn
from tests.telemetry.conftest import T0
from tests.telemetry.expositions import replica_text
from tests.telemetry.scraping.cycles import events, replica, run_cycle, scrape, stored

pytestmark = pytest.mark.django_db


def test_the_second_scrape_stores_the_increase_since_the_first(pool, metrics_server):
    scrape(pool, metrics_server, replica_text(1000, 100), replica_text(1500, 400, running=3.0, finished=2))

    first, second = Reading.objects.order_by("at")
    assert (first.state, first.queries, first.interval_s) == ("first", None, None)
    assert (second.state, second.queries, second.hits, second.finished) == ("ok", 500, 300, 2)
    assert (second.model, second.engine, second.running) == ("tiny", "0", 3.0)
    assert second.at == T0 + timedelta(seconds=5)


def test_a_task_delivered_twice_stores_one_reading(pool, metrics_server):
    replica(pool, metrics_server, "r1", *(replica_text(queries, 100) for queries in (1000, 1500, 9999)))

    for number in (0, 1, 1):
        run_cycle(number)

    assert stored("queries") == [None, 500]


def test_a_failed_scrape_leaves_a_gap_and_the_next_one_keeps_the_totals(pool, metrics_server):
    scrape(pool, metrics_server, replica_text(1000, 100), status(500), replica_text(1800, 500))

    assert stored("state", "queries", "hits") == [
        ("first", None, None), ("stale", None, None), ("gap", 800, 400),
    ]  # fmt: skip  # H10, H12


@pytest.mark.parametrize(
    "response",
    [
        pytest.param(torn(replica_text(1200, 100) * 50), id="torn"),
        pytest.param(text("<html>not found</html>\n", "text/html"), id="wrong content"),
        pytest.param(replica_text(1200, 100).rstrip("\n"), id="cut inside the last line"),
        pytest.param(replica_text("NaN", 100), id="NaN"),
        pytest.param(replica_text(-5, 100), id="negative"),
        pytest.param("x 1\n" * 10_001, id="too many series"),
        pytest.param(replica_text(1200, 100, model="m" * 300), id="label too long"),
        pytest.param(endless(), id="endless"),
        pytest.param(status(302, "/r1/metrics"), id="redirect"),
    ],
)
def test_an_invalid_exposition_is_stale_and_changes_no_total(pool, metrics_server, response):
    scrape(pool, metrics_server, replica_text(1000, 100), response, replica_text(1500, 400))

    assert stored("state", "queries") == [("first", None), ("stale", None), ("gap", 500)]
    assert events() == ["replica_changed"]  # the cache was reported; nothing went down


def test_a_reading_names_what_the_engine_does_not_report(pool, metrics_server):
    short = "".join(line for line in replica_text(10, 5).splitlines(keepends=True) if "prefix_cache_hits" not in line)
    scrape(pool, metrics_server, replica_text(5, 2, ttft=(1, 0, 0, 0, 0)), short, status(500))

    first, second, failed = Reading.objects.order_by("at")
    assert not {"hits", "ttft"} & set(first.not_reported)
    assert {"hits", "ttft", "device_tokens", "preemptions"} <= set(second.not_reported)
    assert "queries" not in second.not_reported
    assert (second.queries, second.hits) == (5, None)
    assert failed.not_reported is None


@pytest.mark.parametrize(
    "hostile",
    [
        replica_text(1e308, 0),
        replica_text(10, 5, engine="a\0b"),
        "".join(replica_text(10, 5, engine=str(number), facts=False) for number in range(257)),
        replica_text(10, 5, running=1e308, usage=-1e308),
        replica_text(10, 5, blocks=2**39, block_size=2**39),
    ],
    ids=["huge counter", "NUL", "257 engines", "huge gauge", "huge cache"],
)
def test_a_hostile_replica_costs_no_other_its_reading(pool, metrics_server, hostile):
    replica(pool, metrics_server, "bad", hostile)
    good = replica(pool, metrics_server, "good", replica_text(1000, 100), replica_text(1500, 400))

    run_cycle(0)
    run_cycle(1)

    assert list(Reading.objects.filter(replica=good).order_by("at").values_list("queries", flat=True)) == [None, 500]


def test_a_reading_that_the_database_rejects_costs_no_other_one(pool, metrics_server, monkeypatch, caplog):
    row_of = record.TargetKind.row

    def broken_row(kind, replica_id, *arguments):
        row = row_of(kind, replica_id, *arguments)
        return row if replica_id != bad.pk else (*row[:2], "a\0b", *row[3:])

    bad, good = (replica(pool, metrics_server, name, replica_text(1000, 100)) for name in ("bad", "good"))
    monkeypatch.setattr(record.TargetKind, "row", broken_row)

    run_cycle(0)

    assert stored("replica_id") == [good.pk]
    assert "stored scrapes: bad failed" in caplog.text
