"""A small part of the alerts benchmark: fails when detection or the first cause gets worse."""

from __future__ import annotations

import pytest

from tests.benchmarks import alerts
from tests.benchmarks.alerts.classifier import judged
from tests.benchmarks.alerts.incidents import INCIDENTS, SHAPES
from tests.benchmarks.alerts.quiet import alarms_in_week

KINDS = [incident.kind for incident in INCIDENTS]


@pytest.mark.parametrize("kind", ["bad policy", "timestamp in front"])
def test_an_incident_is_found_in_time_with_its_cause_first(kind: str) -> None:
    outcome = judged(KINDS.index(kind), 0, alerts.TUNING_SEED)

    assert outcome.counts
    assert outcome.found
    assert outcome.early == 0
    assert outcome.causes[0] == outcome.right[0]


def test_there_are_enough_kinds_and_shapes() -> None:
    assert len(set(KINDS)) == len(INCIDENTS) >= 10
    assert len(SHAPES) == 3
    assert len(INCIDENTS) * len(SHAPES) * alerts.SEEDS >= 60


def test_a_quiet_day_raises_no_alarm() -> None:
    assert alarms_in_week(alerts.TUNING_SEED, days=1) == 0
