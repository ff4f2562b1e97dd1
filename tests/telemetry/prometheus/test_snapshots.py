"""What is read of a server's answers, in the words of a server that is scripted here."""

import json
import re
from ipaddress import ip_network
from urllib.parse import parse_qs, urlsplit

import pytest

from telemetry.metrics.engine import EngineKey
from telemetry.models import MetricsServer
from telemetry.scraping.merge import ScrapeFailure, ScrapeResult
from telemetry.scraping.metrics_servers import PrometheusError, read_snapshots
from tests.fakes.fake_metrics_server import hang, serving, status, text

QUERIES, HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"


def series(name, *points, instance="a:1", job="vllm", **labels):
    """One entry of a matrix; points are (time, value)."""
    metric = {"__name__": name, "instance": instance, "job": job, **labels}
    if name.startswith("vllm:"):
        metric |= {"model_name": "tiny", "engine": "0"}
    return {"metric": metric, "values": [[at, str(value)] for at, value in points]}


def answer(*entries):
    return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": list(entries)}})


@pytest.fixture
def prometheus():
    with serving() as fake:
        yield fake


def ask(fake, *bodies, values=("a:1",), deadline_s=5.0, **settings):
    fake.script("/api/v1/query", *bodies)
    parts = read_snapshots(MetricsServer(url=fake.url, **settings), values, deadline_s=deadline_s)
    return {value: outcome for part in parts for value, outcome in part.items()}


def test_the_newest_scrape_is_read_whole_and_what_it_dropped_is_not(prometheus):
    entries = [
        series(QUERIES, (10, 100), (15, 160)),
        series(HITS, (10, 10), (15, 60)),
        series("vllm:num_preemptions_total", (10, 3)),  # the engine stopped reporting it
        series("up", (10, 1), (15, 1)),
    ]

    snapshot = ask(prometheus, text(answer(*entries)))["a:1"]

    assert isinstance(snapshot, ScrapeResult)
    assert snapshot.scraped_s == 15
    engine = snapshot.sample.engines[EngineKey("tiny", "0")]
    assert engine.counters == {"queries": 160, "hits": 60}


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([], "no samples of"),
        ([series("up", (15, 1))], "no samples of"),
        ([series("up", (10, 1), (15, 0)), series(QUERIES, (10, 5))], "cannot scrape it"),
        ([series(QUERIES, (15, 5), job="x"), series(QUERIES, (15, 5), job="y")], "2 targets"),
        ([series(QUERIES)], "empty"),
    ],
)
def test_a_replica_without_a_whole_scrape_is_absent_and_the_reason_is_said(prometheus, entries, reason):
    absent = ask(prometheus, text(answer(*entries)))["a:1"]

    assert isinstance(absent, ScrapeFailure)
    assert reason in absent.reason


def test_series_of_others_change_nothing(prometheus):
    mixed = [series(QUERIES, (15, 7), instance="b:1"), series(QUERIES, (15, 5))]

    found = ask(prometheus, text(answer(*mixed)))

    assert list(found) == ["a:1"]
    assert [engine.counters["queries"] for engine in found["a:1"].sample.engines.values()] == [5]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (status(401), "credentials"),
        (status(404), "no query API"),
        (status(400), "matchers"),
        (status(503), "503"),
        (text("<html>"), "not one of Prometheus' query API"),
        (text('{"status":"success"}'), "not one of Prometheus' query API"),
        (text('{"data":{"result":{"a":1}}}'), "not one of Prometheus' query API"),
        (text('{"data":{"result":[1]}}'), "not a matrix"),
        (text('{"data":{"result":[{"metric":{},"values":[["x","y"]]}]}}'), "not a matrix"),
    ],
)
def test_a_server_that_fails_is_told_in_words_without_its_address(prometheus, body, reason):
    with pytest.raises(PrometheusError) as refusal:
        ask(prometheus, body)

    assert reason in str(refusal.value)
    assert prometheus.url not in str(refusal.value)


def test_a_server_that_hangs_ends_with_the_deadline(prometheus):
    with pytest.raises(PrometheusError, match="did not respond"):
        ask(prometheus, hang(), deadline_s=0.3)


def test_an_address_outside_the_fleets_networks_is_never_connected_to(settings):
    settings.FLEET_NETWORKS = [ip_network("10.0.0.0/8")]
    with serving() as fake:
        fake.script("/api/v1/query", text(answer()))
        with pytest.raises(PrometheusError, match="did not respond"):
            list(read_snapshots(MetricsServer(url=fake.url), ["a:1"], deadline_s=2))
        assert not fake.seen


def test_large_fleets_are_asked_for_in_parts_and_each_value_is_matched_literally(prometheus):
    values = [f"10.0.0.{number}:8000" for number in range(90)]

    found = ask(prometheus, text(answer()), values=values, matchers='job="vllm"')

    queries = [parse_qs(urlsplit(path).query)["query"][0] for path in prometheus.seen]
    assert sorted(found) == sorted(values)
    assert len(queries) == 3
    assert all('job="vllm"' in query and query.endswith("[60s]") for query in queries)
    assert all(len(path) < 8000 for path in prometheus.seen)
    patterns = [re.search(r'instance=~"([^"]+)"', query)[1].replace("\\\\", "\\") for query in queries]
    assert not any(re.fullmatch(pattern, "10a0b0c1:8000") for pattern in patterns)
    assert any(re.fullmatch(pattern, "10.0.0.1:8000") for pattern in patterns)
