"""Ticks against real sockets: what is stored of a replica's counts, and what is not."""

from datetime import timedelta

import pytest

from telemetry.models import Reading
from telemetry.scraping import record
from tests.fakes.fake_metrics_server import endless, status, text, torn
from tests.telemetry.conftest import T0
from tests.telemetry.expositions import replica_text
from tests.telemetry.scraping.ticks import kinds, replica, tick

pytestmark = pytest.mark.django_db


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
    row_of = record.TargetKind.row

    def spoilt(kind, replica_id, *arguments):
        row = row_of(kind, replica_id, *arguments)
        return row if replica_id != bad.pk else (*row[:2], "a\0b", *row[3:])

    bad = replica(pool, metrics_server, "bad", text(replica_text(1000, 100)))
    good = replica(pool, metrics_server, "good", text(replica_text(1000, 100)))
    monkeypatch.setattr(record.TargetKind, "row", spoilt)

    tick(0)

    assert [reading.replica_id for reading in Reading.objects.all()] == [good.pk]
    assert "stored scrapes: bad failed" in caplog.text
