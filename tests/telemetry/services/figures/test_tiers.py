"""Hits by tier as shares of queries (H4)."""

from datetime import timedelta

import pytest

from controlplane.services.fleet.replicas import add_replica
from telemetry.metrics.windows import PointState, Window
from telemetry.services.figures import series
from telemetry.services.figures.series import reuse_by_tier
from tests.telemetry.conftest import T0
from tests.telemetry.readings import engine_reading

pytestmark = pytest.mark.django_db
MINUTE = Window(T0, T0 + timedelta(seconds=60), 60.0)
AT = T0 + timedelta(seconds=5)


@pytest.fixture
def replicas(pool):
    return [add_replica(pool, name=f"r{n}", url=f"http://127.0.0.1:91{n:02}") for n in range(2)]


def test_tiers_are_shares_of_the_same_queries_and_stack_up_to_the_rate(pool, replicas):
    """H4: total reuse, with the external part told apart."""
    for replica in replicas:
        engine_reading(
            replica, AT, queries=1000, hits=300, external_hits=200, device_tokens=300, host_tokens=150, disk_tokens=50,
            p2p_tokens=0, other_tokens=0,
        )  # fmt: skip

    lines = {line.label: line.points[0][1] for line in reuse_by_tier([pool], MINUTE)}

    assert lines == {"device": 0.3, "host memory": 0.15, "disk": 0.05}
    assert sum(lines.values()) == pytest.approx(series.hit_rate_by_pool([pool], MINUTE)[0].points[0][1])


def test_engines_without_tiers_are_no_part_of_the_shares(pool, replicas):
    """H4, H14: names that came with vLLM 0.32."""
    new, old = replicas
    engine_reading(new, AT, queries=1000, hits=400, device_tokens=400)
    engine_reading(old, AT, queries=9000, hits=0, not_reported=["device_tokens"])

    (device,) = reuse_by_tier([pool], MINUTE)
    assert (device.points[0][1], device.states[0]) == (0.4, PointState.OK)


def test_a_pool_of_engines_without_tiers_says_so(pool, replicas):
    engine_reading(replicas[0], AT, queries=9000, hits=10, not_reported=["device_tokens"])

    (device,) = reuse_by_tier([pool], MINUTE)
    assert (device.points[0][1], device.states[0]) == (None, PointState.NOT_REPORTED)
