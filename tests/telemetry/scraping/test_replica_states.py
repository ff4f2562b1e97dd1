"""What scraping finds out about a replica: whether it is up, began anew, and how large its cache is."""

import pytest

from controlplane.models import Replica, ReplicaState
from controlplane.services.snapshots import newest_snapshot
from telemetry.models import Reading, ScrapeState
from tests.fakes.fake_metrics_server import refusing, status, text
from tests.telemetry.expositions import replica_text
from tests.telemetry.scraping.ticks import kinds, replica, tick

pytestmark = pytest.mark.django_db


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


def test_adapters_of_the_last_scrape_are_kept_and_unknown_after_a_failure(pool, metrics_server):
    info = 'vllm:lora_requests_info{running_lora_adapters="a,b",waiting_lora_adapters="a,b"} 1.8e9\n'
    r1 = replica(pool, metrics_server, "r1", text(replica_text(1, 0, started=5) + info), status(503))

    tick(0)
    r1.scrape_state.refresh_from_db()
    assert r1.scrape_state.lora_adapters == ["a", "b"]

    tick(1)
    r1.scrape_state.refresh_from_db()
    assert r1.scrape_state.lora_adapters is None


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
