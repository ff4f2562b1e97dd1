"""Drops relative to the level since the last change: found in time, and nothing else taken for one."""

from __future__ import annotations

import random
from datetime import timedelta

import pytest

from telemetry.alerts.detection import Bin, GroupBin, Sensitivity, State
from telemetry.alerts.detection.level import inflation
from tests.telemetry.alerts.detection.traffic import MIX, Stretch, alarms, bins, detections, second
from tests.telemetry.conftest import T0

QUIET_H = 6


def test_a_drop_after_an_improvement_of_ten_minutes_is_found() -> None:
    """lowest_cost published at 45 %, 82 % for ten minutes, then random at 41 %: the last hour's median saw no drop."""
    found = detections(bins([Stretch(3000, 0.45), Stretch(600, 0.82), Stretch(300, 0.41)]))

    (alarm,) = alarms(found)
    assert 3600 < second(alarm.at) <= 3600 + 60
    assert 3590 <= second(alarm.change_point) <= 3610
    assert alarm.level == pytest.approx(0.82, abs=0.03)
    assert alarm.ratio == pytest.approx(0.41, abs=0.05)
    assert 3000 <= second(alarm.since) <= 3100


@pytest.mark.parametrize("drop", [0.12, 0.2, 0.4])
@pytest.mark.parametrize("seed", range(3))
def test_drops_are_found_within_90_s(drop: float, seed: int) -> None:
    found = detections(bins([Stretch(1500, 0.75), Stretch(120, 0.75 - drop)], seed))

    assert [0 < second(one.at) - 1500 <= 90 for one in alarms(found)] == [True]


@pytest.mark.parametrize("climb_s", [50, 200, 600])
@pytest.mark.parametrize("seed", range(3))
def test_a_drop_soon_after_a_start_with_empty_caches_is_found_within_90_s(climb_s: int, seed: int) -> None:
    """The rate climbs while caches warm up, and is steady for two minutes before a bad revision."""
    climb = [Stretch(10, 0.1 + 0.7 * at / climb_s) for at in range(0, climb_s, 10)]
    found = detections(bins([*climb, Stretch(120, 0.8), Stretch(180, 0.45)], seed))

    assert [0 < second(one.at) - climb_s - 120 <= 90 for one in alarms(found)] == [True]


@pytest.mark.parametrize("steady_s", [90, 160, 220])
def test_a_first_bin_of_another_task_group_hides_no_drop_and_not_its_change_point(steady_s: int) -> None:
    """As after a start: the first bin comes from the engines' counters, which know no task groups."""
    found = detections(bins([Stretch(10, 0.8, mix={"": 1.0}), Stretch(steady_s, 0.8), Stretch(120, 0.4)]))

    (alarm,) = alarms(found)
    assert 0 < second(alarm.at) - steady_s - 10 <= 60
    assert abs(second(alarm.change_point) - steady_s - 10) <= 10


def test_a_drop_in_the_first_bin_that_has_a_level_to_compare_with_has_a_change_point() -> None:
    found = detections(bins([Stretch(80, 0.8), Stretch(120, 0.4)]))

    (alarm,) = alarms(found)
    assert second(alarm.change_point) == 80


@pytest.mark.parametrize("rate", [2.0, 20.0])
def test_quiet_traffic_raises_no_alarm(rate: float) -> None:
    assert alarms(detections(bins([Stretch(QUIET_H * 3600, 0.7, rate)], seed=7))) == []


def test_the_rate_is_unknown_once_the_usual_task_groups_have_no_traffic_for_a_minute() -> None:
    found = detections(bins([Stretch(1800, 0.8), Stretch(120, 0.3, mix={"batch": 1.0}), Stretch(60, 0.8)]))

    assert alarms(found) == []
    assert [one.ratio is None for one in found][-18:] == [False] * 6 + [True] * 6 + [False] * 6


def test_a_changed_traffic_mix_is_no_drop_and_is_reported_separately() -> None:
    ratios = {"chat": 0.9, "coding": 0.8, "support": 0.2}
    later = {"chat": 0.15, "coding": 0.1, "support": 0.75}
    found = detections(bins([Stretch(1800, ratios), Stretch(600, ratios, mix=later)]))

    assert alarms(found) == []
    moved = [one for one in found if one.mix_since is not None]
    assert 1800 < second(moved[0].mix_since) <= 1860
    assert moved[0].mix < -0.1


def test_a_drop_of_one_task_group_counts_by_its_earlier_share() -> None:
    fallen = {"chat": 0.8, "coding": 0.3, "support": 0.8}
    found = detections(bins([Stretch(1800, 0.8), Stretch(120, fallen)]))

    (alarm,) = alarms(found)
    assert alarm.shortfall == pytest.approx(MIX["coding"] * 0.5, abs=0.04)
    assert (alarm.groups[0].group, alarm.groups[0].level) == ("coding", pytest.approx(0.8, abs=0.04))


def test_a_drop_ends_when_the_rate_recovers_and_keeps_the_level() -> None:
    found = detections(bins([Stretch(1800, 0.8), Stretch(300, 0.4), Stretch(300, 0.8)]))

    assert len(alarms(found)) == 1
    ended = next(
        one for one, before in zip(found[1:], found, strict=False) if before.state is State.DOWN is not one.state
    )
    assert 2100 < second(ended.at) <= 2160
    assert found[-1].level == pytest.approx(0.8, abs=0.03)


def test_a_lasting_drop_becomes_the_level_after_accept_s() -> None:
    found = detections(bins([Stretch(1200, 0.8), Stretch(900, 0.4)]), Sensitivity(accept_s=600))

    (alarm,) = alarms(found)
    states = {second(one.at): one for one in found}
    assert states[second(alarm.at) + 590].state is State.DOWN
    assert states[second(alarm.at) + 600].state is State.STEADY
    assert found[-1].level == pytest.approx(0.4, abs=0.05)


LOW = {"chat": 0.2, "coding": 0.2, "support": 0.8}
SUPPORT_ALONE = {"support": 1.0}  # a fifth of the usual mix


def test_a_drop_ends_when_the_traffic_that_dropped_is_gone() -> None:
    found = detections(bins([Stretch(1800, 0.8), Stretch(200, LOW), Stretch(1200, 0.8, mix=SUPPORT_ALONE)]))

    assert len(alarms(found)) == 1
    assert found[-60].state is State.STEADY
    assert found[-1].ratio == pytest.approx(0.8, abs=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_a_fall_that_traffic_ended_does_not_hide_a_later_drop(seed: int) -> None:
    """Two low bins, no alarm yet; then another mix for half an hour, and a drop of that."""
    falls = [Stretch(1800, 0.8), Stretch(20, 0.55), Stretch(1800, 0.8, mix=SUPPORT_ALONE)]
    found = detections(bins([*falls, Stretch(120, 0.4, mix=SUPPORT_ALONE)], seed))

    assert [3620 < second(one.at) <= 3710 for one in alarms(found)] == [True]


@pytest.mark.parametrize("seed", range(3))
def test_a_second_fall_during_a_drop_has_a_change_point_of_its_own(seed: int) -> None:
    """A restart lowers the rate a little; four minutes later a bad revision lowers it a lot."""
    found = detections(bins([Stretch(1800, 0.8), Stretch(240, 0.65), Stretch(240, 0.35)], seed))

    (alarm,) = alarms(found)
    assert not alarm.worsened
    second_fall = next(one for one in found if one.worsened)
    assert 2040 < second(second_fall.at) <= 2130
    assert abs(second(second_fall.change_point) - 2040) <= 10
    assert second_fall.comparable_since == alarm.change_point
    assert second_fall.ratio == pytest.approx(0.35, abs=0.06)
    assert second_fall.level == pytest.approx(0.8, abs=0.03)
    assert {one.change_point for one in found[found.index(second_fall) :]} == {second_fall.change_point}


@pytest.mark.parametrize("seed", range(3))
def test_a_fall_after_half_of_a_drop_recovered_is_a_second_one(seed: int) -> None:
    """A cleared cache fills again; before it is full, a client begins to send the time."""
    found = detections(bins([Stretch(1800, 0.8), Stretch(120, 0.4), Stretch(150, 0.62), Stretch(180, 0.42)], seed))

    second_fall = next(one for one in found if one.worsened)
    assert 2070 < second(second_fall.at) <= 2170
    assert abs(second(second_fall.change_point) - 2070) <= 20


@pytest.mark.parametrize("rate", [2.0, 8.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_drop_that_stays_as_it_is_or_recovers_slowly_has_no_second_fall(rate: float, seed: int) -> None:
    recovery = [Stretch(60, 0.4 + 0.05 * step, rate) for step in range(9)]
    found = detections(bins([Stretch(1800, 0.8, rate), Stretch(1800, 0.4, rate), *recovery], seed))

    assert len(alarms(found)) == 1
    assert not any(one.worsened for one in found)


@pytest.mark.parametrize("seed", range(3))
def test_a_smaller_fall_during_a_drop_does_not_hide_a_larger_one(seed: int) -> None:
    falls = [Stretch(1800, 0.85), Stretch(300, 0.65), Stretch(900, 0.58), Stretch(180, 0.4)]
    found = detections(bins(falls, seed))

    second_fall = next(one for one in found if one.worsened)
    assert 3000 < second(second_fall.at) <= 3120
    assert abs(second(second_fall.change_point) - 3000) <= 20


def test_no_level_rises_while_a_drop_lasts() -> None:
    """A load test that repeats one prompt while the policy is bad."""
    load_test = Stretch(180, {"chat": 0.5, "coding": 0.5, "support": 0.97})
    found = detections(bins([Stretch(1800, 0.75), Stretch(60, 0.5), load_test, Stretch(60, 0.5), Stretch(900, 0.75)]))

    assert len(alarms(found)) == 1
    assert found[-1].level == pytest.approx(0.75, abs=0.03)


def test_a_change_that_a_drop_followed_never_becomes_the_start_of_the_level() -> None:
    change = T0 + timedelta(seconds=1800)
    found = detections(bins([Stretch(1800, 0.8), Stretch(140, 0.5), Stretch(600, 0.8)]), changes=[change])

    assert found[-1].since is None
    assert 1940 < second(found[-1].comparable_since) <= 2000


def test_a_revision_does_not_reset_the_test() -> None:
    """Operators changed something at the moment of the drop: the level is that of before."""
    change = T0 + timedelta(seconds=1800)
    found = detections(bins([Stretch(1800, 0.8), Stretch(120, 0.5)]), changes=[change])

    assert [one.level for one in alarms(found)] == [pytest.approx(0.8, abs=0.03)]


def test_a_fall_too_small_raises_no_alarm() -> None:
    assert alarms(detections(bins([Stretch(1800, 0.8, 20.0), Stretch(1800, 0.765, 20.0)]))) == []


def test_a_single_bin_raises_no_alarm() -> None:
    known = bins([Stretch(1800, 0.8)])
    known[150] = Bin(known[150].end, {name: GroupBin(100_000, 0.0, 80) for name in MIX})

    assert alarms(detections(known)) == []


def test_there_is_no_level_before_eight_bins() -> None:
    found = detections(bins([Stretch(70, 0.8), Stretch(30, 0.8)]))

    assert {one.state for one in found[:7]} == {State.LEARNING}
    assert found[-1].state is State.STEADY
    assert found[6].level is None


def test_correlated_bins_increase_the_noise() -> None:
    rng, value, values = random.Random(3), 0.0, []
    for _ in range(360):
        value = 0.8 * value + 0.6 * rng.gauss(0, 1)  # variance 1, correlation of neighbours 0.8
        values.append(value)

    assert inflation([rng.gauss(0, 1) for _ in range(360)]) < 1.7
    assert inflation(values) > 4  # (1 + 0.8) / (1 - 0.8) = 9 in the long run


def test_an_empty_bin_and_one_of_no_tokens_change_nothing() -> None:
    known = bins([Stretch(600, 0.8)])
    odd = [
        Bin(known[-1].end + timedelta(seconds=10)),
        Bin(known[-1].end + timedelta(seconds=20), {"chat": GroupBin(0, 0, 0)}),
    ]

    found = detections([*known, *odd])

    assert found[-1].state is State.STEADY
    assert found[-1].level == pytest.approx(found[-3].level, abs=1e-3)
