"""Windows end at the newest time that every replica has reported."""

from datetime import timedelta

import pytest

from controlplane.services.fleet.replicas import add_replica
from telemetry.alerts.kinds import KINDS
from telemetry.alerts.pipeline import evaluate, watermark
from telemetry.models import AlertRule, ScrapeState
from telemetry.services.alerts.previews import preview_period
from telemetry.services.alerts.rules import create_rule, update_rule
from tests.telemetry.conftest import T0
from tests.telemetry.readings import engine_reading, scraped, stored_together

pytestmark = pytest.mark.django_db
INTERVAL_S = 5
SHORT = {"window_s": 10, "min_requests": 10, "for_s": 0}


def at(seconds):
    return T0 + timedelta(seconds=seconds)


@pytest.fixture
def three(pool):
    """Replicas that hit everything, and two that hit nothing."""
    return [add_replica(pool, name=f"r{number}", url=f"http://127.0.0.1:910{number}") for number in (1, 2, 3)]


@stored_together()
def readings(replica, until_s, ratio, *, requests=20):
    """One every interval, the last of them remembered by the scraper."""
    for second in range(INTERVAL_S, until_s + 1, INTERVAL_S):
        engine_reading(replica, at(second), queries=10_000, hits=int(10_000 * ratio), finished=requests)
    scraped(replica, at(until_s))


def evaluated(pool, kind, settings, now_s):
    rule = AlertRule.objects.filter(pool=pool, kind=kind).first() or create_rule(pool, name=kind, kind=kind)
    update_rule(rule, settings=settings)
    (fresh,) = AlertRule.objects.select_related("pool", "group").filter(pk=rule.pk)
    evaluate([fresh], at(now_s))
    return fresh.verdict


def test_a_pool_s_hit_rate_waits_for_all_replicas_of_an_interval(pool, three):
    """Two replicas that hit nothing were read a moment ago; the third, that hits everything, is still being read."""
    for replica, until_s, ratio in zip(three, (240, 240, 235), (0.0, 0.0, 1.0), strict=True):
        readings(replica, until_s, ratio)

    drop = evaluated(pool, "hit_rate_drop", {"baseline_s": 300, "days": 0, "min_requests": 10, "for_s": 0}, 240.5)
    floor = evaluated(pool, "hit_rate_floor", {**SHORT, "floor_ratio": 0.3}, 240.5)

    assert (drop["result"], drop["value"], drop["baseline"]) == ("ok", pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert floor["result"] == "ok"
    assert (
        drop["figures"]["requests"] == 6 * 120
    )  # two readings of each in a bin, and not two of some and one of others


def test_the_last_point_of_a_preview_equals_the_evaluation(pool, three, time_machine):
    for replica, until_s, ratio in zip(three, (240, 240, 235), (0.0, 0.0, 1.0), strict=True):
        readings(replica, until_s, ratio)
    time_machine.move_to(at(240.5), tick=False)
    kind = KINDS["hit_rate_floor"]

    preview = preview_period(kind, kind.read(SHORT), pool, group="", start=at(0), end=at(240.5))

    assert preview.points[-1].value == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("others_s", "now_s", "until_s"),
    [
        pytest.param((100, 100), 103, 103, id="nothing is due"),
        pytest.param((100, 95), 103, 100, id="one reading is due and not there"),
        pytest.param((100, 95), 104.99, 100, id="and takes its time"),
        pytest.param((95, 95), 103, 100, id="of nobody"),
        pytest.param((100, 92), 103, 103, id="a replica that nobody has read for two intervals is not waited for"),
        pytest.param((100, 40), 103, 103, id="nor one that was disabled long ago"),
        pytest.param((40, 40), 103, 103, id="nor anybody where scraping stopped"),
        pytest.param((100, 160), 103, 103, id="nor one that was read before the clock was set back"),
        pytest.param((), 103, 103, id="nor where there is nobody"),
    ],
)
def test_windows_end_just_before_the_first_missing_reading(pool, three, others_s, now_s, until_s):
    for replica, second in zip(three, others_s, strict=False):
        ScrapeState.objects.create(replica=replica, at=at(second))

    assert abs((watermark(at(now_s)) - at(until_s)).total_seconds()) <= 1e-6


def test_a_hanging_replica_does_not_delay_the_watermark(pool, three):
    """Its scrapes fail, and a failed scrape is a reading as well; when even these stop, it is waited for no longer."""
    for replica, until_s in zip(three, (240, 240, 180), strict=True):
        readings(replica, until_s, 0.8)

    verdict = evaluated(pool, "hit_rate_floor", SHORT, 240.5)

    assert (verdict["result"], verdict["figures"]["requests"]) == ("ok", 80)
