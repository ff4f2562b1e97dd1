"""Before anything was measured every figure is unknown, and no page fails for it."""

from datetime import UTC, datetime

import pytest

from controlplane.services.fleet.pools import create_pool
from controlplane.services.fleet.replicas import add_replica
from telemetry.metrics.windows import PointState, Window
from telemetry.services.figures import figures, overview, replicas, series
from telemetry.services.figures.overview import Subject
from tests.telemetry.conftest import fleet_of

pytestmark = pytest.mark.django_db
WINDOW = Window.last(900, until=datetime(2031, 3, 4, 12, tzinfo=UTC))


@pytest.fixture
def pool():
    pool = create_pool("chat")
    add_replica(pool, name="r1", url="http://127.0.0.1:9101")
    return pool


def test_tiles_are_unknown_rather_than_zero(pool):
    tiles = overview.fleet_tiles(fleet_of(pool), WINDOW)

    assert tiles.hit_rate_ratio is None
    assert tiles.hit_rate_state is PointState.UNKNOWN
    assert tiles.ttft_p50_s is None
    assert tiles.ttft_source is None
    assert tiles.requests_per_s is None
    assert tiles.waiting is None
    assert tiles.replicas_up is None
    assert tiles.replicas_total == 1


def test_a_replica_has_a_row_of_unknowns(pool):
    (row,) = overview.replica_rows(fleet_of(pool), WINDOW)

    assert (row.name, row.pool, row.health, row.hit_rate_ratio) == ("r1", "chat", "unknown", None)


def test_every_chart_is_one_long_gap(pool):
    for lines in (
        series.hit_rate_by_replica(Subject([pool]), WINDOW),
        series.hit_rate_by_pool(Subject(), WINDOW),
        figures.ttft_by_router(Subject([pool]), WINDOW),
        series.utilization_by_replica(Subject([pool]), WINDOW, "running"),
    ):
        assert lines
        for line in lines:
            assert len(line.points) == len(WINDOW.starts())
            assert {value for _, value in line.points} == {None}
            assert set(line.states) == {PointState.UNKNOWN}
    assert series.hit_rate_by_group(Subject([pool]), WINDOW) == []
    assert overview.group_rows(fleet_of(pool), WINDOW) == []
    assert replicas.events_of(Subject.of_pool(pool), WINDOW) == []
