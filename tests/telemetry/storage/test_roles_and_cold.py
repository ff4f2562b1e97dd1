"""Replicas and times that a pool's hit rate excludes (H18, H19)."""

from datetime import timedelta

import pytest

from controlplane.models import EventKind
from controlplane.services.events import record_event
from controlplane.services.fleet.replicas import add_replica
from telemetry.alerts.history import HistoryQuery, load_histories
from telemetry.alerts.history_window import Source
from telemetry.metrics.counters import ReadingState
from telemetry.metrics.windows import PointState, Window
from telemetry.services.figures import overview, series
from telemetry.services.figures.overview import Subject
from telemetry.services.figures.replicas import cold_periods
from telemetry.storage.replica_facts import COLD_S, cold_bands
from tests.telemetry.conftest import T0, fleet_of
from tests.telemetry.readings import engine_reading, scraped

pytestmark = pytest.mark.django_db
MINUTE = Window(T0, T0 + timedelta(seconds=60), 10.0)
AT = T0 + timedelta(seconds=5)


def record_restart(replica, at):
    record_event(EventKind.REPLICA_RESTARTED, "Its cache is cold.", pool=replica.pool, replica=replica, at=at)


def whole_window(pool):
    """The minute as one window, as alert rules read it."""
    query = HistoryQuery(frozenset({Source.ENGINES}), 60.0, 1, T0 + timedelta(seconds=60))
    return load_histories([pool], query)[pool.pk].windows[""][0]


@pytest.fixture
def replicas(pool):
    return [add_replica(pool, name=f"r{n}", url=f"http://127.0.0.1:91{n:02}") for n in range(3)]


@pytest.mark.parametrize(
    ("labels", "reported", "role", "rate"),
    [
        pytest.param({}, "", "decode", 0.4, id="its role"),
        pytest.param({"role": "decode"}, "decode", "prefill", 0.7, id="the role takes precedence"),
        pytest.param({"role": "decode"}, "", "both", 0.4, id="its label"),
        pytest.param({"llm-d.ai/role": "decode"}, "", "both", 0.4, id="its label in Kubernetes"),
        pytest.param({}, "decode", "both", 0.4, id="its metrics"),
        pytest.param({"role": "prefill"}, "decode", "both", 0.7, id="the label takes precedence"),
        pytest.param({}, "", "both", 0.7, id="neither"),
    ],
)
def test_a_pool_s_rate_excludes_decode_replicas_with_a_note(pool, replicas, labels, reported, role, rate):
    """H19"""
    prefill, decode, _ = replicas
    decode.labels, decode.role = labels, role
    decode.save()
    scraped(prefill, AT)
    scraped(decode, AT, role=reported)
    engine_reading(prefill, AT, queries=1000, hits=400, finished=1)
    engine_reading(decode, AT, queries=1000, hits=0, external_hits=1000, finished=1)

    (line,) = series.hit_rate_by_pool(Subject([pool]), MINUTE)
    tiles = overview.fleet_tiles(fleet_of(pool), MINUTE)
    window = whole_window(pool)

    assert line.points[0][1] == tiles.hit_rate_ratio == pytest.approx(rate)
    assert (window.hits or 0) / (window.queries or 1) == pytest.approx(rate)
    assert ("decode" in line.note) is (rate < 0.5)


def test_a_pool_of_decode_replicas_has_no_rate(pool, replicas):
    """H19"""
    for replica in replicas:
        replica.labels = {"role": "decode"}
        replica.save()
        engine_reading(replica, AT, queries=1000, hits=1000)

    (line,) = series.hit_rate_by_pool(Subject([pool]), MINUTE)
    assert (line.points[0][1], line.states[0]) == (None, PointState.UNKNOWN)


def test_a_cold_band_lasts_from_the_restart_to_the_end_of_the_warm_up(replicas):
    """H18"""
    restarted, before, never = replicas
    for replica, at in ((restarted, T0 + timedelta(seconds=20)), (before, T0 - timedelta(seconds=COLD_S - 30))):
        record_restart(replica, at)
    engine_reading(never, AT, queries=10, hits=0)

    bands = {band.replica_id: (band.start, band.end) for band in cold_bands([r.pk for r in replicas], MINUTE)}
    drawn = {replica.pk: cold_periods(Subject.of_replica(replica), MINUTE) for replica in replicas}

    assert bands == {
        restarted.pk: (T0 + timedelta(seconds=15), MINUTE.end),
        before.pk: (T0, T0 + timedelta(seconds=30)),
    }
    assert drawn == {pk: [bands[pk]] if pk in bands else [] for pk in drawn}


def test_rules_ignore_what_is_counted_in_a_cold_band(pool, replicas):
    """H18"""
    cold, warm, _ = replicas
    scraped(cold, AT, restarted_at=AT)
    record_restart(cold, AT)
    engine_reading(cold, AT, state=ReadingState.RESET, queries=1000, hits=0)
    engine_reading(warm, AT, queries=1000, hits=900)

    window = whole_window(pool)

    assert (window.queries, window.hits) == (1000, 900)
