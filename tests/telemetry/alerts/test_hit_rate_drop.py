"""Rule hit_rate_drop: its finding on the detector's results, and its summary."""

from datetime import timedelta

import pytest

from controlplane.errors import InvalidError
from telemetry.alerts.detection import Bin
from telemetry.alerts.findings import Reason, Result
from telemetry.alerts.hit_rate_series import HitRateSeries, bin_length_s, grid_floor
from telemetry.alerts.kinds import KINDS, Scope
from tests.telemetry.alerts.detection.traffic import Stretch, bins
from tests.telemetry.alerts.histories import evaluated, only, past
from tests.telemetry.conftest import T0

KIND = KINDS["hit_rate_drop"]
SETTINGS = KIND.read({})


def finding_after(*stretches: Stretch, group: str = "", late_s: float = 0.0, **settings: object):
    """What the rule says at the end of some traffic, or so long after it."""
    pool_bins = bins(stretches)
    moved = [Bin(T0 - (pool_bins[-1].end - one.end) - timedelta(seconds=late_s), one.groups) for one in pool_bins]
    series = HitRateSeries(10.0, moved[0].end - timedelta(seconds=10), moved[-1].end, moved)
    return only(evaluated("hit_rate_drop", past(10, series=series), group, **settings))


def test_a_drop_is_a_breach_with_its_level_change_point_and_task_groups():
    finding = finding_after(Stretch(1800, 0.8), Stretch(90, {"chat": 0.3, "coding": 0.8, "support": 0.3}))

    assert (finding.result, finding.reason) == (Result.BREACH, Reason.BELOW)
    assert (finding.baseline, finding.value) == (pytest.approx(0.8, abs=0.03), pytest.approx(0.45, abs=0.06))
    assert finding.limit == pytest.approx(finding.baseline - 0.1)
    assert [one.name for one in finding.evidence.groups] == ["chat", "support"]
    assert finding.evidence.share_ratio == pytest.approx(0.7, abs=0.05)
    text = KIND.summarize(Scope("chat"), SETTINGS, finding)
    assert "points below its baseline of 8" in text
    assert text.endswith("in chat, support (70.0 % of the tokens).") or "in chat, support (" in text
    assert f"% since {T0 - timedelta(seconds=90):%H:%M:%S} UTC" in text


def test_a_drop_names_its_task_groups_and_their_share_of_its_own_tokens():
    """All four fall, and one of them has most of the tokens only since then."""
    names = ("a", "b", "c", "d")
    usual, now = dict.fromkeys(names, 0.25), {"a": 0.7, "b": 0.1, "c": 0.1, "d": 0.1}
    finding = finding_after(Stretch(1800, 0.8, mix=usual), Stretch(90, dict.fromkeys(names, 0.3), mix=now))

    evidence = finding.evidence
    assert {one.name: one.share_ratio for one in evidence.groups} == pytest.approx(now, abs=0.05)
    assert [one.drop_points for one in evidence.groups] == pytest.approx([50] * 4, abs=10)
    assert evidence.share_ratio == pytest.approx(1.0)
    text = KIND.summarize(Scope("chat"), SETTINGS, finding)
    named = ", ".join(one.name for one in evidence.groups[:3])
    assert text.endswith(f"in {named} and 1 more (100.0 % of the tokens).")


def test_a_rule_of_a_task_group_evaluates_only_this_group():
    falls = Stretch(90, {"chat": 0.8, "coding": 0.3, "support": 0.8})

    assert finding_after(Stretch(1800, 0.8), falls, group="coding").result is Result.BREACH
    assert finding_after(Stretch(1800, 0.8), falls, group="chat").result is Result.OK


@pytest.mark.parametrize(
    ("floor", "reason"), [({"min_requests": 5000}, Reason.LITTLE_TRAFFIC), ({"min_tokens": 1e9}, Reason.LITTLE_TRAFFIC)]
)
def test_a_drop_below_the_minimum_traffic_gives_no_result(floor, reason):
    finding = finding_after(Stretch(1800, 0.8), Stretch(90, 0.2), **floor)

    assert (finding.result, finding.reason) == (Result.NO_DATA, reason)


def test_traffic_of_other_task_groups_alone_gives_no_result():
    finding = finding_after(Stretch(1800, 0.8), Stretch(120, 0.2, mix={"batch": 1.0}))

    assert (finding.result, finding.reason, finding.value) == (Result.NO_DATA, Reason.LITTLE_TRAFFIC, None)


def test_too_few_bins_give_no_data_and_not_a_rate_of_zero():
    few = finding_after(Stretch(70, 0.8))
    old = finding_after(Stretch(1800, 0.8), late_s=60)
    none = only(evaluated("hit_rate_drop", past(10)))

    assert (few.reason, few.value) == (Reason.LITTLE_HISTORY, None)
    assert (old.reason, none.reason) == (Reason.NO_READINGS, Reason.NO_READINGS)


def test_repeated_detection_on_a_series_gives_the_same_result():
    pool_bins = bins([Stretch(1800, 0.8), Stretch(90, 0.4)])
    series = HitRateSeries(10.0, T0, pool_bins[-1].end, pool_bins)
    once = series.detect(SETTINGS.sensitivity, "", pool_bins[-1].end)

    other = HitRateSeries(10.0, T0, T0)
    for one in pool_bins:
        other.extend([one], [], one.end, 7200)
        text = other.detect(SETTINGS.sensitivity, "", one.end)
    assert text == once
    assert other.detect(SETTINGS.sensitivity, "", one.end) == once
    assert series.detect(SETTINGS.sensitivity, "", pool_bins[100].end).at == pool_bins[100].end


def test_bins_are_whole_scrape_intervals_on_one_grid():
    assert [bin_length_s(10, interval) for interval in (5, 7, 30)] == [10, 14, 30]
    assert grid_floor(T0 + timedelta(seconds=19.9), 10) == T0 + timedelta(seconds=10)
    assert grid_floor(T0, 10) == T0


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"bin_s": 1}, "$.settings.bin_s"),
        ({"drop_points": 0}, "$.settings.drop_points"),
        ({"drop_points": "many"}, "$.settings.drop_points"),
        ({"drop_points": True}, "$.settings.drop_points"),
        ({"min_tokens": float("nan")}, "$.settings"),
        ({"colour": 1}, "$.settings"),
        ({"bin_s": 60, "baseline_s": 600}, "$.settings.baseline_s"),
        ([], "$.settings"),
    ],
)
def test_invalid_settings_are_rejected_by_name(settings, path):
    with pytest.raises(InvalidError) as caught:
        KIND.read(settings)
    assert [fault.path for fault in caught.value.faults] == [path]
