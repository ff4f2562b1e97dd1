"""What version a replica runs is asked beside its metrics (H13), and TensorRT-LLM's metrics are where it has them."""

from datetime import timedelta

import pytest

from controlplane.services.fleet.replicas import add_replica
from telemetry.models import Reading, ScrapeState
from telemetry.scraping.cycle import Shard, scrape_shard
from telemetry.scraping.fetch import RECHECK_AFTER, check_versions
from tests.fakes.fake_metrics_server import status, text
from tests.telemetry.conftest import T0
from tests.telemetry.expositions import replica_text
from tests.telemetry.metrics.pages import TENSORRT_LLM

pytestmark = pytest.mark.django_db
JSON = "application/json"


def tick(number):
    return scrape_shard(Shard(0, 1), (T0 + timedelta(seconds=5 * number)).timestamp())


def test_a_version_is_asked_once_an_hour_and_after_each_restart(pool, metrics_server):
    """H13"""
    metrics_server.script("/r1/version", *(text(f'{{"version": "0.3{n}.0"}}', JSON) for n in range(1, 4)))
    replica = add_replica(
        pool, name="r1", url=metrics_server.script("/r1/metrics", text(replica_text(9, 3)), text(replica_text(5, 0)))
    )
    tick(0)

    told = [check_versions(T0), check_versions(T0 + timedelta(minutes=1))]
    assert (told, ScrapeState.objects.get().version) == ([1, 0], "0.31.0")
    check_versions(T0 + RECHECK_AFTER + timedelta(seconds=1))
    assert ScrapeState.objects.get().version == "0.32.0"
    ScrapeState.objects.update(version_at=T0)
    tick(1)  # its counters fell: another process
    assert check_versions(T0 + timedelta(seconds=9)) == 1
    assert ScrapeState.objects.get(replica=replica).version == "0.33.0"


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(status(404), id="none"),
        pytest.param(text("not JSON", JSON), id="no JSON"),
        pytest.param(text("[1]", JSON), id="no object"),
        pytest.param(text('{"version": 33}', JSON), id="a number"),
        pytest.param(text('{"version": "<script>"}', JSON), id="no version"),
        pytest.param(text('{"version": "' + "1" * 5000 + '"}', JSON), id="too long"),
        pytest.param(text("[" * 4000, JSON), id="deep"),
    ],
)
def test_what_is_no_version_is_unknown(pool, metrics_server, answer):
    """H13, S8"""
    metrics_server.script("/r1/version", answer)
    add_replica(pool, name="r1", url=metrics_server.script("/r1/metrics", text(replica_text(9, 3))))
    tick(0)

    assert check_versions(T0) == 0
    assert ScrapeState.objects.get().version == ""


def test_metrics_of_tensorrt_llm_are_read_from_where_it_has_them(pool, metrics_server):
    later = TENSORRT_LLM.replace("} 9000.0", "} 9500.0").replace("} 4096.0", "} 4496.0")
    add_replica(pool, name="t1", url=metrics_server.script("/t1/metrics", text("[]", JSON)))
    metrics_server.script("/t1/prometheus/metrics", text(TENSORRT_LLM), text(later))

    tick(0)
    tick(1)

    newest = Reading.objects.order_by("at").last()
    assert (newest.state, newest.queries, newest.hits) == ("ok", 500, 400)
    assert ScrapeState.objects.get().engine == "tensorrt_llm"
