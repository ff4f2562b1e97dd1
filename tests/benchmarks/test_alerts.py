"""A small part of the alerts benchmark: fails when detection or the first cause gets worse."""

from __future__ import annotations

import pytest

from tests.benchmarks import alerts
from tests.benchmarks.alerts.classifier import play_and_judge
from tests.benchmarks.alerts.incidents import INCIDENTS, SHAPES
from tests.benchmarks.alerts.quiet import alarms_in_week

KINDS = [incident.kind for incident in INCIDENTS]


@pytest.mark.parametrize("kind", ["bad policy", "timestamp in front"])
def test_an_incident_is_detected_in_time_and_its_cause_ranks_first(kind: str) -> None:
    outcome = play_and_judge(KINDS.index(kind), 0, alerts.TUNING_SEED)

    assert outcome.must_be_found
    assert outcome.is_found
    assert outcome.early == 0
    assert outcome.causes[0] == outcome.expected[0]


def test_the_benchmark_has_enough_kinds_of_incidents_and_shapes_of_traffic() -> None:
    assert len(set(KINDS)) == len(INCIDENTS) >= 10
    assert len(SHAPES) == 3
    assert len(INCIDENTS) * len(SHAPES) * alerts.SEEDS >= 60


def test_a_quiet_day_raises_no_false_alarm() -> None:
    assert alarms_in_week(alerts.TUNING_SEED, days=1) == 0
