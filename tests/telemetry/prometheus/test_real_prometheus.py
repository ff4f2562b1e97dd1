"""Read from Debian's own Prometheus, which scrapes the same replicas that we scrape directly."""

from datetime import UTC, datetime

import pytest

from controlplane.services.fleet.replicas import add_replica
from telemetry.models import MetricsServer, Reading, ScrapeState
from telemetry.scraping.metrics_servers import read_server
from telemetry.services.metrics_servers import create_server, try_server
from tests.fakes import real_prometheus
from tests.fakes.fake_metrics_server import serving, status, text
from tests.telemetry.expositions import replica_text

pytestmark = [pytest.mark.django_db, pytest.mark.xdist_group("prometheus")]
FIRST = text(replica_text(1000, 100, finished=1, ttft=(1, 2, 0, 0, 0)))


@pytest.fixture(scope="module")
def metrics_server():
    """A replica that every test here scripts for itself; Prometheus scrapes it all the time."""
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def prometheus(metrics_server, tmp_path_factory):
    """Prometheus over that replica; it takes seconds to begin."""
    home = tmp_path_factory.mktemp("prometheus")
    with real_prometheus.running(home, [f"{metrics_server.url[7:]}/metrics"]) as url:
        yield url


def test_readings_from_prometheus_equal_what_the_replica_said(pool, metrics_server, prometheus):
    metrics_server.script("/metrics", FIRST)
    replica = add_replica(pool, name="r1", url=metrics_server.url)
    server = create_server(name="prom", url=prometheus, pools=[pool], matchers='job=~"vllm-.*"')
    real_prometheus.wait_until(lambda: try_server(server).found == ["r1"], "Prometheus to have scraped r1")

    read_server(server, due=datetime(2031, 3, 4, 12, 0, 0, tzinfo=UTC), deadline_s=10)
    metrics_server.script("/metrics", text(replica_text(1500, 400, running=3.0, finished=2, ttft=(1, 4, 0, 0, 0))))
    real_prometheus.wait_until(lambda: _reads(server, queries=1500), "Prometheus to have scraped what is new")
    read_server(server, due=datetime(2031, 3, 4, 12, 0, 5, tzinfo=UTC), deadline_s=10)

    first, second = Reading.objects.filter(replica=replica).order_by("at")
    assert (first.state, first.queries) == ("first", None)
    assert (second.state, second.queries, second.hits, second.finished, second.running) == ("ok", 500, 300, 1, 3.0)
    assert (second.ttft_at, second.ttft_counts) == ([1], [2])
    replica.refresh_from_db()
    assert (replica.block_tokens, replica.capacity_blocks) == (16, 2048)
    server.refresh_from_db()
    assert (server.found, server.missing, server.error) == (1, 0, "")


def test_a_replica_that_prometheus_cannot_scrape_is_down_and_a_prometheus_that_is_away_leaves_it_up(
    pool, metrics_server, prometheus
):
    metrics_server.script("/metrics", FIRST)
    replica = add_replica(pool, name="r1", url=metrics_server.url)
    server = create_server(name="prom", url=prometheus, pools=[pool])
    real_prometheus.wait_until(lambda: try_server(server).found == ["r1"], "Prometheus to have scraped r1")
    read_server(server, due=datetime(2031, 3, 4, 12, 0, 0, tzinfo=UTC), deadline_s=10)

    MetricsServer.objects.filter(pk=server.pk).update(url="http://127.0.0.1:1")
    server.refresh_from_db()
    for second in (5, 10, 15):
        read_server(server, due=datetime(2031, 3, 4, 12, 0, second, tzinfo=UTC), deadline_s=10)

    assert ScrapeState.objects.get(replica=replica).health == "up"
    assert list(Reading.objects.order_by("at").values_list("state", flat=True)) == ["first", "stale", "stale", "stale"]
    server.refresh_from_db()
    assert "did not respond" in server.error

    metrics_server.script("/metrics", status(500))
    MetricsServer.objects.filter(pk=server.pk).update(url=prometheus)
    server.refresh_from_db()
    real_prometheus.wait_until(lambda: try_server(server).missing != [], "Prometheus to notice")
    for second in (20, 25):
        read_server(server, due=datetime(2031, 3, 4, 12, 0, second, tzinfo=UTC), deadline_s=10)
    state = ScrapeState.objects.get(replica=replica)
    assert (state.health, state.reason) == ("down", "the Prometheus server cannot scrape it")


def _reads(server, *, queries):
    """Whether the server tells of this count already; asked for without storing anything."""
    from telemetry.scraping.metrics_servers import read_fleet, replicas_of

    counts = [
        engine.counters.get("queries")
        for scrapes in read_fleet(server, list(replicas_of(server)), deadline_s=10)
        for scrape in scrapes
        for engine in scrape.outcome.sample.engines.values()
    ]
    return counts == [queries]
