"""What scraping detects about a replica: health, restarts, cache size, LoRA adapters, version and engine."""

import json
from datetime import timedelta

import pytest

from controlplane.models import Replica
from controlplane.services.snapshots import newest_snapshot
from telemetry.models import Reading, ScrapeState
from telemetry.scraping.fetch import RECHECK_AFTER, check_versions
from tests.fakes.fake_metrics_server import hang, refusing, status, text
from tests.telemetry.conftest import T0
from tests.telemetry.expositions import replica_text
from tests.telemetry.metrics.pages import TENSORRT_LLM
from tests.telemetry.scraping.cycles import events, replica, run_cycle, scrape, stored

pytestmark = pytest.mark.django_db
JSON = "application/json"


def test_a_refused_connection_makes_a_replica_down_at_once_and_the_event_is_recorded_once(pool, metrics_server):
    r1 = scrape(pool, metrics_server, replica_text(1000, 100, facts=False))
    with refusing() as port:
        Replica.objects.filter(pk=r1.pk).update(url=f"http://127.0.0.1:{port}")
        run_cycle(1)
        run_cycle(2)
    Replica.objects.filter(pk=r1.pk).update(url=f"{metrics_server.url}/r1")
    run_cycle(3)
    run_cycle(4)

    assert events() == ["replica_down", "replica_up"]


def test_a_replica_is_down_after_two_failures_in_a_row(pool, metrics_server):
    good, bad = replica_text(1000, 100, facts=False), status(503)
    replica(pool, metrics_server, "r1", good, bad, good, bad, bad, good)
    healths = []
    for number in range(6):
        run_cycle(number)
        healths.append(ScrapeState.objects.get().health)

    assert healths == ["up", "up", "up", "up", "down", "up"]
    assert events() == ["replica_down", "replica_up"]


@pytest.mark.parametrize(
    ("started", "after"),
    [pytest.param((None, None), (500, 100), id="a counter decreased"),
     pytest.param((1000.0, 2000.0), (1200, 900), id="the start time moved")],
)  # fmt: skip
def test_a_restart_is_recorded_once_and_counted_from_zero(pool, metrics_server, started, after):
    """H8, H9"""
    counts = [((1000, 800), started[0]), (after, started[1]), ((after[0] + 100, after[1]), started[1])]
    scrape(pool, metrics_server, *(replica_text(*count, started=start, facts=False) for count, start in counts))

    assert stored("state", "queries", "hits") == [("first", None, None), ("reset", *after), ("ok", 100, 0)]
    assert events() == ["replica_restarted"]


def test_the_cache_size_excludes_the_null_block(pool, metrics_server):
    r1 = scrape(pool, metrics_server, *[replica_text(1, 0, blocks=2049, block_size=32)] * 2)

    r1.refresh_from_db()
    assert (r1.block_tokens, r1.capacity_blocks) == (32, 2048)
    assert events() == ["replica_changed"]


def test_cache_sizes_of_a_new_fleet_are_one_configuration_and_one_event_each(pool, metrics_server):
    for number in range(5):
        replica(pool, metrics_server, f"r{number}", replica_text(1, 0, blocks=2049))
    before = newest_snapshot().number

    run_cycle(0)

    assert newest_snapshot().number == before + 1
    assert set(Replica.objects.values_list("capacity_blocks", flat=True)) == {2048}
    assert events() == ["replica_changed"] * 5


def test_lora_adapters_are_those_of_the_last_scrape_and_unknown_after_a_failure(pool, metrics_server):
    info = 'vllm:lora_requests_info{running_lora_adapters="a,b",waiting_lora_adapters="a,b"} 1.8e9\n'
    scrape(pool, metrics_server, replica_text(1, 0, started=5) + info)
    assert ScrapeState.objects.get().lora_adapters == ["a", "b"]

    metrics_server.script("/r1/metrics", status(503))
    run_cycle(1)
    assert ScrapeState.objects.get().lora_adapters is None


def test_the_version_is_read_once_an_hour_and_after_each_restart(pool, metrics_server):
    """H13"""
    metrics_server.script("/r1/version", *(text(f'{{"version": "0.3{n}.0"}}', JSON) for n in range(1, 4)))
    replica(pool, metrics_server, "r1", replica_text(9, 3), replica_text(5, 0))
    run_cycle(0)

    assert [check_versions(T0), check_versions(T0 + timedelta(minutes=1))] == [1, 0]
    assert ScrapeState.objects.get().version == "0.31.0"
    check_versions(T0 + RECHECK_AFTER + timedelta(seconds=1))
    assert ScrapeState.objects.get().version == "0.32.0"
    ScrapeState.objects.update(version_at=T0)
    run_cycle(1)  # a counter decreased: another process
    assert check_versions(T0 + timedelta(seconds=9)) == 1
    assert ScrapeState.objects.get().version == "0.33.0"


@pytest.mark.parametrize(
    "response",
    [status(404), *(text(body, JSON) for body in (
        "not JSON", "[1]", '{"version": 33}', '{"version": "<script>"}', '{"version": "' + "1" * 5000 + '"}', "[" * 4000
    ))],
    ids=["not found", "not JSON", "a list", "a number", "not a version", "too long", "deeply nested"],
)  # fmt: skip
def test_an_invalid_version_is_unknown(pool, metrics_server, response):
    """H13"""
    metrics_server.script("/r1/version", response)
    scrape(pool, metrics_server, replica_text(9, 3))

    assert check_versions(T0) == 0
    assert ScrapeState.objects.get().version == ""


def test_where_an_engine_publishes_kv_events_is_read_with_its_version(pool, metrics_server):
    source = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv@"}
    published, version = json.dumps({"0": source}), text('{"version": "0.33.0"}', JSON)
    metrics_server.script("/r1/version", *[version] * 4)
    metrics_server.script("/r1/kv_event_sources", text(published, JSON), status(404), text(published, JSON), hang())
    r1 = scrape(pool, metrics_server, replica_text(9, 3))
    before = newest_snapshot().number

    reported = []
    for hours in range(4):
        check_versions(T0 + hours * (RECHECK_AFTER + timedelta(seconds=1)))
        r1.refresh_from_db()
        reported.append(r1.reported_kv_events)

    events = {"endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": None, "topic": "kv@"}
    known = {"kv_events": events, "problem": ""}
    assert reported == [known, None, known, known]  # without a response it stays as it was
    assert ScrapeState.objects.get().version == "0.33.0"
    assert newest_snapshot().number == before


def test_tensorrt_llm_is_scraped_at_its_own_path(pool, metrics_server):
    later = TENSORRT_LLM.replace("} 9000.0", "} 9500.0").replace("} 4096.0", "} 4496.0")
    metrics_server.script("/r1/prometheus/metrics", text(TENSORRT_LLM), text(later))

    scrape(pool, metrics_server, *[text("[]", JSON)] * 2)

    newest = Reading.objects.order_by("at").last()
    assert (newest.state, newest.queries, newest.hits) == ("ok", 500, 400)
    assert ScrapeState.objects.get().engine == "tensorrt_llm"
